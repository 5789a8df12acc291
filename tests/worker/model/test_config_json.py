"""config.json: what is read from where, and what is refused by name."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.worker.model.config import LinearScaling, ModelConfig, Rope, model_spec
from mallee.worker.model.loading.config_json import parse_config, read_config

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
BASE: dict[str, Any] = {"model_type": "llama", **SHAPE}
QWEN3: dict[str, Any] = {"model_type": "qwen3", **SHAPE, "num_key_value_heads": 2, "head_dim": 16}
GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", **SHAPE}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def test_absent_fields_have_transformers_defaults() -> None:
    config = parse_config(BASE)
    assert (config.num_kv_heads, config.head_dim, config.num_layers) == (4, 16, 4)
    assert config.ropes == (Rope(10000.0),)
    assert config.windows == (None,)
    assert (config.tie_word_embeddings, config.activation, config.query_scale) == (
        False,
        "silu",
        0.25,
    )
    assert (config.max_positions, config.norm_eps, config.dtype) == (2048, 1e-6, "float32")


@pytest.mark.parametrize(
    "sparse",
    [
        {"model_type": "llama", "num_key_value_heads": 8},
        {"model_type": "llama", "head_dim": 48, "num_key_value_heads": 8, "rope_theta": 5e5},
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "num_key_value_heads": None, "rope_theta": 1e6},
        {"model_type": "qwen3", "sliding_window": 64, "max_window_layers": 2},
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 3,
            "num_hidden_layers": 5,
        },
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3_text", "num_hidden_layers": 18, "sliding_window": 512},
        {"model_type": "gemma3_text", "sliding_window_pattern": 2, "num_hidden_layers": 5},
        {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 3e4},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
    ],
    ids=lambda sparse: "-".join(str(value) for value in sparse.values())[:60],
)
def test_a_sparse_or_old_file_means_what_transformers_reads_in_it(sparse: dict[str, Any]) -> None:
    """I2: transformers fills the file in, and we read the full and the sparse one alike."""
    from transformers import AutoConfig

    shape = {**SHAPE, "num_attention_heads": 32, "hidden_size": 512}
    raw = {**shape, **sparse, "eos_token_id": 3}
    full = AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()
    full = {name: value for name, value in full.items() if not name.startswith("_")}
    assert parse_config(raw) == parse_config(full)


def test_gemma3_alternates_windows_and_rotary_bases() -> None:
    """I1, part: five sliding layers to one full layer; only the full one is stretched."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = parse_config({**GEMMA3, "num_hidden_layers": 7, "rope_scaling": scaling})
    assert windows(config) == [4096] * 5 + [None, 4096]
    assert config.layers[0].rope == Rope(1e4)
    assert config.layers[5].rope == Rope(1e6, LinearScaling(8.0))
    assert (config.query_scale, config.activation) == (1 / 16, "gelu_tanh")
    assert config.tie_word_embeddings


def test_layer_types_win_over_the_pattern() -> None:
    fields = {"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window": 8}
    assert windows(parse_config({**GEMMA3, **fields})) == [None, 8, 8, None]
    sliding = {**QWEN3, **fields, "use_sliding_window": True}
    assert windows(parse_config(sliding)) == [None, 8, 8, None]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(fields: dict[str, Any]) -> None:
    assert parse_config({**BASE, **fields}).ropes == (Rope(5e5),)


def nested(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {FULL: {"rope_type": "default", **fields}}}


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        (BASE, {"model_type": "mamba"}, "llama, qwen3, gemma3_text"),
        (BASE, {"model_type": None}, "llama"),
        (BASE, {"model_type": "llava", "text_config": {}}, "the text model of gemma3"),
        (BASE, {"model_type": "gemma3", "text_config": None}, "the text model of gemma3"),
        (BASE, {"attention_bias": True}, "attention_bias"),
        (BASE, {"mlp_bias": True}, "mlp_bias"),
        (BASE, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (BASE, {"hidden_act": "gelu"}, "gelu"),
        (BASE, {"rope_interleaved": True}, "rope_interleaved"),
        (BASE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (BASE, {"original_max_position_embeddings": 64}, "belongs into rope_parameters"),
        (BASE, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (BASE, {"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        (BASE, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        (BASE, {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (BASE, {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0"),
        (BASE, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (BASE, {"rope_parameters": LLAMA3, "rope_scaling": {"factor": 2.0}}, "contradict"),
        (BASE, nested(), "one flat object"),
        (BASE, {"rope_theta": -1.0}, "rope_theta"),
        (BASE, {"num_key_value_heads": 3}, "evenly"),
        (BASE, {"head_dim": 15}, "evenly"),
        (BASE, {"head_dim": "16"}, "head_dim='16'"),
        (BASE, {"hidden_size": None}, "hidden_size"),
        (BASE, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (BASE, {"num_hidden_layers": True}, "num_hidden_layers"),
        (BASE, {"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        (BASE, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        (BASE, {"rope_theta": float("nan")}, "rope_theta"),
        (BASE, {"eos_token_id": "</s>"}, "eos_token_id"),
        (BASE, {"eos_token_id": [2, None]}, "eos_token_id"),
        (BASE, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (BASE, {"layer_types": [SLIDING] * 4, "sliding_window": 8}, "use_sliding_window"),
        (BASE, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (BASE, {"query_pre_attn_scalar": 30}, "query_pre_attn_scalar"),
        (QWEN3, {"layer_types": [SLIDING] * 4}, "use_sliding_window"),
        (QWEN3, {"use_sliding_window": "yes"}, "use_sliding_window"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, None),
        (QWEN3, {"use_sliding_window": True, "sliding_window": None}, None),
        (GEMMA3, {"layer_types": [FULL] * 3}, "each of 4 layers"),
        (GEMMA3, {"layer_types": FULL}, "each of 4 layers"),
        (GEMMA3, {"layer_types": [FULL, FULL, FULL, "linear_attention"]}, "linear_attention"),
        (GEMMA3, {"sliding_window": None}, "sliding_window"),
        (GEMMA3, {"sliding_window": 0}, "sliding_window"),
        (GEMMA3, {"hidden_activation": "relu"}, "relu"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "an object per layer type"),
        (GEMMA3, nested(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (GEMMA3, {**nested(), "rope_scaling": {"factor": 2.0}}, "contradict"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    base: dict[str, Any], fields: dict[str, Any], named: str | None
) -> None:
    """D39, I2: an odd dimension or an unknown setting stops the load, naming the field."""
    if named is None:  # the neighbours of refused values, which are fine
        assert parse_config({**base, **fields}).num_layers == 4
        return
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**base, **fields})


def test_of_a_model_that_also_sees_the_text_model_is_read(tmp_path: Path) -> None:
    """I2: gemma3 files hold it as text_config; end-of-sequence ids and dtype stand outside."""
    outer = {
        "model_type": "gemma3",
        "text_config": {**GEMMA3, "eos_token_id": 1},
        "vision_config": {"hidden_size": 7},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    config = parse_config(outer)
    plain = parse_config({**GEMMA3, "eos_token_id": [1, 106], "dtype": "bfloat16"})
    assert dataclasses.replace(config, weights_prefix="") == plain
    assert config.weights_prefix == "language_model."
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert read_config(tmp_path) == config
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        parse_config({**outer, "quantization_config": {"bits": 4}})


def test_eos_ids_come_from_both_files_without_doubles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7}))
    assert read_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_config(tmp_path).eos_token_ids == (7, 9)


def test_a_missing_or_broken_config_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_config(tmp_path)
    for text in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match="JSON"):
            read_config(tmp_path)


def test_the_spec_follows_the_config_and_its_fingerprint_every_part() -> None:
    config = parse_config({**BASE, "num_key_value_heads": 2, "eos_token_id": 5})
    options: dict[str, Any] = {
        "name": "m",
        "weights_digest": "w",
        "dtype": "bfloat16",
        "max_model_len": None,
    }
    spec = model_spec(config, **options)
    assert spec.kv_bytes_per_token == 2 * 4 * 2 * 16 * 2
    assert (spec.max_model_len, spec.eos_token_ids) == (2048, (5,))
    assert model_spec(config, **{**options, "max_model_len": 99}).max_model_len == 99
    assert model_spec(config, **{**options, "max_model_len": 9999}).max_model_len == 2048
    assert model_spec(config, **{**options, "name": "other"}).fingerprint == spec.fingerprint
    others = [
        model_spec(config, **{**options, "weights_digest": "v"}),
        model_spec(config, **{**options, "dtype": "float32"}),
        model_spec(parse_config({**BASE, "rope_theta": 1e6}), **options),
        *(
            model_spec(parse_config(raw), **options)
            for raw in (QWEN3, GEMMA3, {**GEMMA3, "sliding_window": 7})
        ),
    ]
    assert len({spec.fingerprint, *(other.fingerprint for other in others)}) == 7
