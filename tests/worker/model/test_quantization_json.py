"""quantization_config: configs of published checkpoints are read; the rest is refused before weights are."""

import json
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.errors import UnsupportedModel
from mallee.testing.quantized import quantization_config
from mallee.testing.random_model import random_model
from mallee.worker.model.linear.scheme import Quantization, Scheme
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.runner import load

RAW = random_model("llama").raw
QWEN3_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj", "input_layernorm"],
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
_WEIGHTS = {
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


def read(given: Any) -> Quantization:
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
        (
            {**int8(), "config_groups": int8(format="pack-quantized")["config_groups"]},
            Scheme("int8", "row", "float"),
        ),
    ],
)
def test_published_forms_are_read(given: dict[str, Any], scheme: Scheme) -> None:
    """I14, part: detected from config.json alone."""
    found = read(given)
    assert [own.scheme for own in found.groups] == [scheme]
    assert found.scheme_of("model.layers.3.mlp.up_proj") == scheme
    assert found.scheme_of("lm_head") is None or given not in (QWEN3_FP8, AUTO_FP8, FP8_DYNAMIC)


def test_a_plain_model_has_no_form() -> None:
    assert parse_config(RAW).quantization is None
    assert parse_config({**RAW, "quantization_config": None}).quantization is None


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
    found = read(given)
    assert found.scheme_of(ignored) is None
    assert found.scheme_of(kept) is not None


def test_names_may_have_the_prefix_of_a_model_that_sees() -> None:
    found = read(group(ignore=["language_model.lm_head", "re:vision_tower.*"]))
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
    found = read(given)
    kinds = [found.scheme_of(f"model.layers.0.{x}") for x in ("self_attn.q_proj", "mlp.up_proj")]
    assert [kind and kind.values for kind in kinds] == ["float8_e4m3fn", "int8"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "quant_method is None"),
        ([], r"it is \[\]"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes'"),
        ({**QWEN3_FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**QWEN3_FP8, "weight_block_size": [1, 128]}, r"weight_block_size is \[1, 128\]"),
        ({**QWEN3_FP8, "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({**QWEN3_FP8, "activation_scheme": "static"}, "activation_scheme is"),
        ({**QWEN3_FP8, "activation_scheme": None}, "activation_scheme is None"),
        ({**QWEN3_FP8, "modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        ({**QWEN3_FP8, "modules_to_not_convert": "lm_head"}, "no list of names"),
        ({**QWEN3_FP8, "modules_to_not_convert": ["("]}, "no regular expression"),
        (group(weights={"num_bits": 4, "type": "int"}), "num_bits 4, type 'int'"),
        (group(weights={"strategy": "group", "group_size": 128}), "group_size is 128"),
        (group(weights={"strategy": "channel", "group_size": 64}), "group_size is 64"),
        (group(weights={"actorder": "group"}), "weights.actorder is 'group'"),
        (group(weights={"actorder": "weight"}), "weights.actorder is 'weight'"),
        (group(weights={"symmetric": False}), "weights.symmetric is False"),
        (group(weights={"dynamic": True}), "weights.dynamic is True"),
        (group(weights={"strategy": "block", "block_structure": [16, 16]}), "block_structure"),
        (group(weights={"future": 1}), "weights.future is 1"),
        (group(weights={"type": "int"}), "format is 'float-quantized', of int weights"),
        (int8(weights={"strategy": "block", "block_structure": [128, 128]}), "strategy is 'block'"),
        (int8(format="marlin-24"), "format is 'marlin-24'"),
        (int8(format="dense"), "format is 'dense'"),
        (group(input_activations={**_TOKENS, "num_bits": 4}), "input_activations has num_bits 4"),
        (group(input_activations={**_TOKENS, "symmetric": False}), "activations.symmetric"),
        (group(output_activations=_TOKENS), "output_activations"),
        (group(targets=[]), "targets names nothing"),
        (group(targets="Linear"), "targets is 'Linear'"),
        (group(ignore=["re:("]), "no regular expression"),
        (group(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme has num_bits 8, type None"),
        (kv_scales(num_bits=4), "kv_cache_scheme has num_bits 4"),
        (kv_scales(type="int"), "kv_cache_scheme has num_bits 8, type 'int'"),
        (kv_scales(strategy="channel"), r"kv_cache_scheme\.strategy is 'channel'"),
        (kv_scales(strategy="attn_head"), r"kv_cache_scheme\.strategy is 'attn_head'"),
        (kv_scales(dynamic=True), r"kv_cache_scheme\.dynamic is True"),
        (kv_scales(symmetric=False), r"kv_cache_scheme\.symmetric is False"),
        (kv_scales(future=1), r"kv_cache_scheme\.future is 1"),
        (group(kv_cache_scheme="static"), "kv_cache_scheme is 'static'"),
        ({**QWEN3_FP8, "kv_cache_scheme": "dynamic"}, "kv_cache_scheme is 'dynamic'"),
        (group(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (group(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (group(quantization_status="initialized"), "quantization_status"),
        ({**FP8_DYNAMIC, "config_groups": {}}, r"config_groups is \{\}"),
    ],
)
def test_other_forms_are_refused_by_name_with_those_supported(given: Any, named: str) -> None:
    """D39, I14, part: what was found, and what can be had instead."""
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_config({**RAW, "quantization_config": given})
    assert "supported: bfloat16 or float32 weights; FP8 (e4m3)" in str(caught.value)
    assert "planned" not in str(caught.value)
    assert caught.value.fields["field"] == "quantization_config"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({**QWEN3_FP8, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({**QWEN3_FP8, "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        (group(weights={"num_bits": 4}, format="nvfp4-pack-quantized"), r"num_bits 4.* \(FP4\)"),
        (group(weights={"strategy": "group", "group_size": 32}), "MXFP8"),
    ],
)
def test_fp4_and_mxfp8_are_refused_with_the_plan(given: dict[str, Any], named: str) -> None:
    """D39: FP8 now, FP4 and MXFP8 later."""
    with pytest.raises(UnsupportedModel, match=named) as caught:
        parse_config({**RAW, "quantization_config": given})
    assert "FP4 (NVFP4, MXFP4) and MXFP8 are planned" in str(caught.value)


def test_the_old_name_of_the_field_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="compression_config"):
        parse_config({**RAW, "compression_config": FP8_DYNAMIC})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 72}, "hidden_size=72"),
        ({"intermediate_size": 100}, "intermediate_size=100"),
        ({"head_dim": 10}, r"num_attention_heads x head_dim=40"),
        (
            {"head_dim": 20, "num_key_value_heads": 1},
            r"num_attention_heads x head_dim=80|x head_dim=20",
        ),
    ],
)
def test_odd_dimensions_are_refused(fields: dict[str, Any], named: str) -> None:
    """D39: matrices of 8 bits have dimensions in multiples of 16; plain ones have any."""
    parse_config({**RAW, **fields})
    config = quantization_config("fp8-row")
    with pytest.raises(UnsupportedModel, match=f"{named}: .*multiples of 16"):
        parse_config({**RAW, **fields, "quantization_config": config})


def test_a_refusal_comes_before_any_weights(tmp_path: Path) -> None:
    """D39, I14, part: the folder holds no weights at all."""
    raw = {**RAW, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="awq"):
        load(tmp_path, num_blocks=4)
