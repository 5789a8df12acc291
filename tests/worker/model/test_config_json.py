"""config.json: what is read from where, and what is refused by name before any weights are read."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.doubles.quantized import quantization_config
from bench.doubles.random_model import random_model
from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.worker.model.config import Rope, model_spec
from mallee.worker.model.linear.scheme import Quantization, Scheme
from mallee.worker.model.loading.config_json import parse_config, read_config
from mallee.worker.model.loading.stored import expected_shapes
from mallee.worker.model.runner import load

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
HYBRID: dict[str, Any] = {"model_type": "qwen3_5_text", **SHAPE, "head_dim": 16}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
NEXT: dict[str, Any] = {**HYBRID, "model_type": "qwen3_next", **EIGHT}
MOE: dict[str, Any] = {**HYBRID, "model_type": "qwen3_5_moe_text"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DTYPES = ("bfloat16", "float32")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "sparse",
    [
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
        {"model_type": "gemma3_text", "sliding_window_pattern": 2, "num_hidden_layers": 5},
        {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 3e4},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"model_type": "qwen3_5_text"},
        {"model_type": "qwen3_5_text", "full_attention_interval": 2, "rope_theta": 1e7},
        {"model_type": "qwen3_5_moe_text", "partial_rotary_factor": 0.5},
        {"model_type": "qwen3_next", "rope_scaling": None, "norm_topk_prob": False},
        {"model_type": "qwen3_next", "mlp_only_layers": [1], "decoder_sparse_step": 2},
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


def nested(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {FULL: {"rope_type": "default", **fields}}}


@pytest.mark.parametrize(
    ("base", "fields", "named"),
    [
        (BASE, {"model_type": "mamba"}, "llama, qwen3, gemma3_text"),
        (BASE, {"model_type": "llava", "text_config": {}}, "the text model of gemma3"),
        (BASE, {"model_type": "gemma3", "text_config": None}, "the text model of gemma3"),
        (BASE, {"attention_bias": True}, "attention_bias"),
        (BASE, {"hidden_act": "gelu"}, "gelu"),
        (BASE, {"rope_interleaved": True}, "rope_interleaved"),
        (BASE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (BASE, {"original_max_position_embeddings": 64}, "belongs into rope_parameters"),
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
        (BASE, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (BASE, {"num_hidden_layers": True}, "num_hidden_layers"),
        (BASE, {"head_dim": "16"}, "head_dim='16'"),
        (BASE, {"hidden_size": None}, "hidden_size"),
        (BASE, {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        (BASE, {"eos_token_id": [2, None]}, "eos_token_id"),
        (BASE, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        (BASE, {"layer_types": [SLIDING] * 4, "sliding_window": 8}, "use_sliding_window"),
        (BASE, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, None),
        (QWEN3, {"use_sliding_window": True, "sliding_window": None}, None),
        (GEMMA3, {"layer_types": [FULL] * 3}, "each of 4 layers"),
        (GEMMA3, {"layer_types": [FULL, FULL, FULL, "linear_attention"]}, "linear_attention"),
        (GEMMA3, {"sliding_window": None}, "sliding_window"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "an object per layer type"),
        (GEMMA3, nested(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (GEMMA3, {**nested(), "rope_scaling": {"factor": 2.0}}, "contradict"),
        (HYBRID, {"attn_output_gate": False}, "attn_output_gate must be true"),
        (HYBRID, {"layer_types": [LINEAR] * 4}, "without full_attention"),
        (HYBRID, {"layer_types": [LINEAR, SLIDING, LINEAR, FULL]}, "sliding_attention"),
        (HYBRID, {"layer_types": [FULL] * 4}, None),
        (HYBRID, {"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0\.2 of 16 dimensions"),
        (HYBRID, {"rope_parameters": {"partial_rotary_factor": 0.01}}, "no even number"),
        (HYBRID, {"rope_parameters": {"partial_rotary_factor": 1.5}}, "no even number"),
        (HYBRID, {"rope_parameters": {"partial_rotary_factor": float("nan")}}, "no even"),
        (HYBRID, {"rope_parameters": {"partial_rotary_factor": float("inf")}}, "no even"),
        (HYBRID, {"partial_rotary_factor": 1}, None),
        (HYBRID, {"linear_num_key_heads": 3}, "linear_num_value_heads=32 is no multiple"),
        (HYBRID, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1"),
        (HYBRID, {"quantization_config": FP8}, "weights of 8 bits of qwen3_5_text are not"),
        (NEXT, {"quantization_config": FP8}, "weights of 8 bits of qwen3_next are not"),
        (NEXT, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=8"),
        (NEXT, {"num_experts": 0}, "num_experts=0"),
        (NEXT, {"norm_topk_prob": "no"}, "norm_topk_prob='no' must be true or false"),
        (NEXT, {"mlp_only_layers": 2}, "mlp_only_layers=2 must be a list"),
        (NEXT, {"mlp_only_layers": ["2"]}, "mlp_only_layers"),
        (NEXT, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (NEXT, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob=False is not known of qwen3_5_moe_text"),
        (MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not known"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not known"),
        (MOE, {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}, None),
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
    with pytest.raises(UnsupportedModel, match="quant_method is None"):
        parse_config({**outer, "quantization_config": {"bits": 4}})


# As the hub's files of these models have them


_QWEN3_5_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "use_cache": True,
    "vocab_size": 248320,
}


def seeing(model_type: str, num_layers: int, **text: Any) -> dict[str, Any]:
    """config.json of a Qwen 3.5, whose text model has these fields."""
    kinds = [FULL if i % 4 == 3 else LINEAR for i in range(num_layers)]
    own = {"model_type": f"{model_type}_text", "num_hidden_layers": num_layers}
    return {
        "image_token_id": 248056,
        "model_type": model_type,
        "text_config": {**_QWEN3_5_TEXT, **own, "layer_types": kinds, **text},
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "model_type": model_type,
            "out_hidden_size": text["hidden_size"],
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


HUB: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B-Instruct": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3.5-35B-A3B": seeing(
        "qwen3_5_moe",
        40,
        hidden_size=2048,
        moe_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_key_value_heads=2,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.5-9B": seeing(
        "qwen3_5", 32, hidden_size=4096, intermediate_size=12288, num_key_value_heads=4
    ),
}


LAYER_MIB = (4 * 32 * 128 * 128 + 2 * 3 * (32 + 2 * 16) * 128) / 2**20
"""Of one state: a matrix in float32 for each of 32 value heads, and three tokens' inputs in bfloat16."""


@pytest.mark.parametrize(
    ("name", "billions", "full", "state_mib"),
    [
        ("Qwen3-Next-80B-A3B-Instruct", 79.67, 12, 36 * LAYER_MIB),
        ("Qwen3.5-35B-A3B", 34.66, 10, 30 * LAYER_MIB),
        ("Qwen3.5-9B", 8.95, 8, 24 * LAYER_MIB),
    ],
)
def test_published_hybrids_have_the_tensors_of_transformers(
    name: str, billions: float, full: int, state_mib: float
) -> None:
    """I2: every name and shape, without those that see; the size that the name tells; the state's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = parse_config(HUB[name])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(HUB[name])))
    prefix = config.weights_prefix
    shapes = {
        name.replace(prefix, "model.") if prefix else name: tuple(tensor.shape)
        for name, tensor in theirs.state_dict().items()
        if not name.startswith("model.visual.")
    }
    own = expected_shapes(config)
    assert own == shapes
    assert sum(map(math.prod, own.values())) / 1e9 == pytest.approx(billions, abs=0.01)
    assert (config.dtype, config.rotary_dim, config.max_positions) == ("bfloat16", 64, 262144)
    assert len(config.layers) - len(config.recurrent_layers) == full
    assert config.ropes == (Rope(1e7),)
    state = model_spec(config, name="m", weights_digest="w", dtype="bfloat16", max_model_len=None)
    assert [g.nbytes / 2**20 for g in state.groups if g.kind == "state"] == [state_mib]
    if config.experts is not None:
        assert config.experts.layers == tuple(range(config.num_layers))
        assert config.experts.is_normed


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
        *(model_spec(config, **{**options, "dtype": d, "kv_dtype": "fp8"}) for d in DTYPES),
        model_spec(parse_config({**BASE, "rope_theta": 1e6}), **options),
        *(
            model_spec(parse_config(raw), **options)
            for raw in (QWEN3, GEMMA3, {**GEMMA3, "sliding_window": 7})
        ),
    ]
    assert len({spec.fingerprint, *(other.fingerprint for other in others)}) == 9


# quantization_config, as published checkpoints have it

RAW = random_model("llama").raw
QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj", "input_layernorm"],
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
_TOKENS = {**_WEIGHTS, "dynamic": True, "observer": None, "strategy": "token"}
FP8_DYNAMIC = {
    "config_groups": {
        "group_0": {
            "input_activations": _TOKENS,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _WEIGHTS,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head", "re:.*layers\\.1\\.self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {"format": "dense", "global_sparsity": 0.1},
    "transform_config": {},
    "version": "0.12.2",
}


def group(**changes: Any) -> dict[str, Any]:
    """FP8_DYNAMIC with other fields of its group; of its weights where `weights` is given."""
    own = FP8_DYNAMIC["config_groups"]["group_0"]  # type: ignore[index]
    weights = {**_WEIGHTS, **changes.pop("weights", {})}
    top = {name: changes.pop(name) for name in list(changes) if name in FP8_DYNAMIC}
    return {**FP8_DYNAMIC, **top, "config_groups": {"a": {**own, "weights": weights, **changes}}}


def int8(**changes: Any) -> dict[str, Any]:
    weights = {"type": "int", **changes.pop("weights", {})}
    return group(
        weights=weights, **{"format": "int-quantized", "input_activations": None, **changes}
    )


def kv_scales(**changes: Any) -> dict[str, Any]:
    """FP8_DYNAMIC with scales of KV, and these fields of their scheme."""
    return group(kv_cache_scheme={**_WEIGHTS, "strategy": "tensor", **changes})


def form_of(given: Any) -> Quantization:
    found = parse_config({**RAW, "quantization_config": given}).quantization
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        (QWEN3_FP8, Scheme("float8_e4m3fn", "block", "dynamic")),
        (AUTO_FP8, Scheme("float8_e4m3fn", "tensor", "static")),
        (
            {**AUTO_FP8, "activation_scheme": "dynamic"},
            Scheme("float8_e4m3fn", "tensor", "dynamic"),
        ),
        (FP8_DYNAMIC, Scheme("float8_e4m3fn", "row", "dynamic")),
        (group(input_activations=None), Scheme("float8_e4m3fn", "row", "float")),
        (
            group(
                weights={"strategy": "tensor"}, input_activations={**_WEIGHTS, "strategy": "tensor"}
            ),
            Scheme("float8_e4m3fn", "tensor", "static"),
        ),
        (
            group(
                weights={"strategy": "block", "block_structure": [128, 128]},
                input_activations={**_TOKENS, "strategy": "group", "group_size": 128},
            ),
            Scheme("float8_e4m3fn", "block", "dynamic"),
        ),
        (int8(), Scheme("int8", "row", "float")),
        (int8(input_activations={**_TOKENS, "type": "int"}), Scheme("int8", "row", "dynamic")),
        (int8(format="pack-quantized"), Scheme("int8", "row", "float", is_packed=True)),
    ],
)
def test_published_forms_are_read(given: dict[str, Any], scheme: Scheme) -> None:
    """I14, part: detected from config.json alone."""
    found = form_of(given)
    assert [own.scheme for own in found.groups] == [scheme]
    assert found.scheme_of("model.layers.3.mlp.up_proj") == scheme
    assert found.scheme_of("lm_head") is None or given not in (QWEN3_FP8, AUTO_FP8, FP8_DYNAMIC)


def test_a_plain_model_has_no_form_and_the_old_name_of_the_field_is_refused() -> None:
    assert parse_config(RAW).quantization is None
    assert parse_config({**RAW, "quantization_config": None}).quantization is None
    with pytest.raises(UnsupportedModel, match="compression_config"):
        parse_config({**RAW, "compression_config": FP8_DYNAMIC})


@pytest.mark.parametrize(
    ("given", "ignored", "kept"),
    [
        (QWEN3_FP8, "model.layers.0.mlp.down_proj", "model.layers.10.mlp.down_proj"),
        (
            {**QWEN3_FP8, "modules_to_not_convert": ["up_proj"]},
            "model.layers.7.mlp.up_proj",
            "lm_head",
        ),
        (
            {**QWEN3_FP8, "modules_to_not_convert": ["model.layers.1"]},
            "model.layers.1.mlp.up_proj",
            "model.layers.11.mlp.up_proj",
        ),
        (FP8_DYNAMIC, "model.layers.1.self_attn.q_proj", "model.layers.10.self_attn.q_proj"),
        (group(ignore=["re:model.*down_proj"]), "model.layers.1.mlp.down_proj", "lm_head"),
        (group(ignore=["model.layers.1.mlp.up_proj"]), "model.layers.1.mlp.up_proj", "up_proj"),
        (group(ignore=["up_proj"]), "up_proj", "model.layers.1.mlp.up_proj"),
        (
            group(targets=["re:.*mlp.*"]),
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.mlp.up_proj",
        ),
    ],
)
def test_names_are_ignored_as_their_format_matches_them(
    given: dict[str, Any], ignored: str, kept: str
) -> None:
    """I14, part: whole names and `re:` of compressed-tensors; beginnings and ends of "fp8"."""
    found = form_of(given)
    assert found.scheme_of(ignored) is None
    assert found.scheme_of(kept) is not None


def test_names_may_have_the_prefix_of_a_model_that_sees() -> None:
    found = form_of(group(ignore=["language_model.lm_head", "re:vision_tower.*"]))
    assert found.scheme_of("lm_head", "language_model.") is None
    assert found.scheme_of("lm_head") is not None


def test_each_group_has_its_own_form() -> None:
    one = group(targets=["re:.*self_attn.*"])["config_groups"]["a"]
    two = int8(format="int-quantized")["config_groups"]["a"]
    given = {
        **FP8_DYNAMIC,
        "format": "mixed-precision",
        "config_groups": {
            "a": {**one, "format": "float-quantized"},
            "b": {**two, "format": "int-quantized"},
        },
    }
    found = form_of(given)
    kinds = [found.scheme_of(f"model.layers.0.{x}") for x in ("self_attn.q_proj", "mlp.up_proj")]
    assert [kind and kind.values for kind in kinds] == ["float8_e4m3fn", "int8"]


OTHERS: list[tuple[Any, str]] = [
    ({}, "quant_method is None"),
    ([], r"it is \[\]"),
    ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
    ({**QWEN3_FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    ({**QWEN3_FP8, "weight_block_size": [1, 128]}, r"weight_block_size is \[1, 128\]"),
    ({**QWEN3_FP8, "activation_scheme": "static"}, "activation_scheme is"),
    ({**QWEN3_FP8, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
    ({**QWEN3_FP8, "modules_to_not_convert": "lm_head"}, "no list of names"),
    ({**QWEN3_FP8, "modules_to_not_convert": ["("]}, "no regular expression"),
    (group(weights={"num_bits": 4, "type": "int"}), "num_bits 4, type 'int'"),
    (group(weights={"strategy": "group", "group_size": 128}), "group_size is 128"),
    (group(weights={"actorder": "group"}), "weights.actorder is 'group'"),
    (group(weights={"symmetric": False}), "weights.symmetric is False"),
    (group(weights={"dynamic": True}), "weights.dynamic is True"),
    (group(weights={"strategy": "block", "block_structure": [16, 16]}), "block_structure"),
    (group(weights={"type": "int"}), "format is 'float-quantized', of int weights"),
    (int8(weights={"strategy": "block", "block_structure": [128, 128]}), "strategy is 'block'"),
    (int8(format="marlin-24"), "format is 'marlin-24'"),
    (group(input_activations={**_TOKENS, "num_bits": 4}), "input_activations has num_bits 4"),
    (group(input_activations={**_TOKENS, "symmetric": False}), "activations.symmetric"),
    (group(output_activations=_TOKENS), "output_activations"),
    (group(targets=[]), "targets names nothing"),
    (group(ignore=["re:("]), "no regular expression"),
    (group(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme has num_bits 8, type None"),
    (kv_scales(strategy="channel"), r"kv_cache_scheme\.strategy is 'channel'"),
    (kv_scales(dynamic=True), r"kv_cache_scheme\.dynamic is True"),
    (kv_scales(symmetric=False), r"kv_cache_scheme\.symmetric is False"),
    (group(kv_cache_scheme="static"), "kv_cache_scheme is 'static'"),
    ({**QWEN3_FP8, "kv_cache_scheme": "dynamic"}, "kv_cache_scheme is 'dynamic'"),
    (group(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    (group(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (group(quantization_status="initialized"), "quantization_status"),
    ({**FP8_DYNAMIC, "config_groups": {}}, r"config_groups is \{\}"),
]
PLANNED: list[tuple[Any, str]] = [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
    ({"quant_method": "mxfp4"}, "'mxfp4'"),
    ({**QWEN3_FP8, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    ({**QWEN3_FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    (group(weights={"num_bits": 4}, format="nvfp4-pack-quantized"), r"num_bits 4.* \(FP4\)"),
    (group(weights={"strategy": "group", "group_size": 32}), "MXFP8"),
]


@pytest.mark.parametrize(
    ("given", "named", "is_planned"),
    [*((*each, False) for each in OTHERS), *((*each, True) for each in PLANNED)],
)
def test_other_forms_are_refused_by_name_with_those_supported(
    given: Any, named: str, is_planned: bool
) -> None:
    """D39, I14, part: what was found, and what can be had instead: FP8 now, FP4 and MXFP8 later."""
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_config({**RAW, "quantization_config": given})
    assert "supported: bfloat16 or float32 weights; FP8 (e4m3)" in str(caught.value)
    assert ("FP4 (NVFP4, MXFP4) and MXFP8 are planned" in str(caught.value)) == is_planned
    assert caught.value.fields["field"] == "quantization_config"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 72}, "hidden_size=72"),
        ({"intermediate_size": 100}, "intermediate_size=100"),
        ({"head_dim": 10}, r"num_attention_heads x head_dim=40"),
    ],
)
def test_odd_dimensions_are_refused(fields: dict[str, Any], named: str) -> None:
    """D39: matrices of 8 bits have dimensions in multiples of 16; plain ones have any."""
    parse_config({**RAW, **fields})
    config = quantization_config("fp8-row")
    with pytest.raises(UnsupportedModel, match=f"{named}: .*multiples of 16"):
        parse_config({**RAW, **fields, "quantization_config": config})


def test_a_refusal_comes_before_any_weights(tmp_path: Path) -> None:
    """I14, part: the folder holds no weights at all."""
    raw = {**RAW, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="awq"):
        load(tmp_path, num_blocks=4)
