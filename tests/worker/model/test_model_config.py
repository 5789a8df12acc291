"""config.json: what is read from where, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.worker.model.config import model_spec, parse_config, read_config, to_hf
from mallee.worker.model.random_llama import random_llama

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_absent_fields_have_transformers_defaults() -> None:
    config = parse_config(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert (config.tie_word_embeddings, config.rope_scaling) == (False, None)
    assert (config.max_positions, config.rms_norm_eps, config.dtype) == (2048, 1e-6, "float32")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(fields: dict[str, Any]) -> None:
    assert parse_config({**BASE, **fields}).rope_theta == 5e5


def test_llama3_frequencies_are_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {**BASE, "head_dim": 128, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    config = parse_config(scaled)
    assert config.rope_scaling is not None
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**scaled), torch.device("cpu"))
    ours = torch.tensor(config.inverse_frequencies())
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-6, atol=0)


def test_old_rope_scaling_reads_as_the_new_rope_parameters() -> None:
    old = parse_config({**BASE, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = parse_config({**BASE, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba"}, "llama"),
        ({"model_type": None}, "llama"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"head_dim": 15}, "evenly"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_what_we_would_compute_wrongly_is_refused_by_name(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**BASE, **fields})


def test_eos_ids_come_from_both_files_without_doubles(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7}))
    assert read_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert read_config(tmp_path).eos_token_ids == (7, 9)


def test_a_missing_or_broken_config_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match="JSON"):
            read_config(tmp_path)


def test_to_hf_and_back_is_the_same_config() -> None:
    scaled = {**BASE, "eos_token_id": [3, 4], "rope_theta": 5e5, "rope_scaling": LLAMA3}
    for config in (random_llama().config, parse_config(scaled)):
        assert parse_config(to_hf(config)) == config


def test_the_spec_follows_the_config_and_its_fingerprint_every_part() -> None:
    config = parse_config({**BASE, "num_key_value_heads": 2, "eos_token_id": 5})
    options: dict[str, Any] = {
        "name": "m",
        "weights_digest": "w",
        "dtype": "bfloat16",
        "max_model_len": None,
    }
    spec = model_spec(config, **options)
    assert spec.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert (spec.max_model_len, spec.eos_token_ids) == (2048, (5,))
    assert model_spec(config, **{**options, "max_model_len": 99}).max_model_len == 99
    assert model_spec(config, **{**options, "max_model_len": 9999}).max_model_len == 2048
    assert model_spec(config, **{**options, "name": "other"}).fingerprint == spec.fingerprint
    others = [
        model_spec(config, **{**options, "weights_digest": "v"}),
        model_spec(config, **{**options, "dtype": "float32"}),
        model_spec(parse_config({**BASE, "rope_theta": 1e6}), **options),
    ]
    assert len({spec.fingerprint, *(other.fingerprint for other in others)}) == 4
