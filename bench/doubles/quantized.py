"""Checkpoints of 8 bits made from plain ones, as other tools store them, for tests and benches.

The simplest rounding: to nearest, scales from the largest value.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from bench.doubles.random_model import RandomModel
from mallee.worker.model.linear.scheme import BLOCK

Form: TypeAlias = Literal["fp8-block", "fp8-row", "fp8-tensor", "int8-row", "int8-packed"]
FORMS: tuple[Form, ...] = ("fp8-block", "fp8-row", "fp8-tensor", "int8-row", "int8-packed")
Activations: TypeAlias = Literal["float", "dynamic", "static"]

_FLOAT8 = torch.float8_e4m3fn
_STRATEGY = {"block": "block", "row": "channel", "tensor": "tensor", "packed": "channel"}


def quantized_model(
    model: RandomModel,
    form: Form,
    *,
    activations: Activations = "float",
    ignored: Sequence[str] = ("lm_head",),
    scale_dtype: torch.dtype = torch.float32,
) -> RandomModel:
    """`model` with 8-bit matrices, all but those `ignored` by their whole name."""
    tensors = quantized_tensors(
        model.tensors, form, is_ignored=lambda name: name in ignored, scale_dtype=scale_dtype
    )
    if activations == "static":
        scales = [name for name in tensors if ".weight_scale" in name]
        tensors |= {
            f"{name.split('.weight_scale')[0]}.input_scale": torch.ones(1) for name in scales
        }
    config = quantization_config(form, activations=activations, ignored=ignored)
    return RandomModel({**model.raw, "quantization_config": config}, tensors)


def with_kv_scales(
    model: RandomModel,
    scales: Sequence[tuple[float, float]] | None = None,
    names: tuple[str, str] = ("k_scale", "v_scale"),
) -> RandomModel:
    """`model` with stored scales of keys and values, a pair for each layer, under `names` of its attention.

    By default they differ from layer to layer, and fit what random models have.
    """
    layers = range(model.config.num_layers)
    pairs = scales or [(0.013 * (i + 1), 0.0047 * (i + 1)) for i in layers]
    own = {
        f"model.layers.{i}.self_attn.{name}": torch.tensor([value])
        for i, pair in zip(layers, pairs, strict=True)
        for name, value in zip(names, pair, strict=True)
    }
    return RandomModel(model.raw, {**model.tensors, **own})


def quantization_config(
    form: Form, *, activations: Activations = "float", ignored: Sequence[str] = ("lm_head",)
) -> dict[str, Any]:
    """config.json's quantization_config for a checkpoint of `form`.

    With blocks, or a scale per matrix and rounded activations, it is in the form of "fp8", else of
    "compressed-tensors".
    """
    kind, scales = form.split("-")
    if scales == "block" or (scales == "tensor" and activations != "float"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic" if scales == "block" else activations,
            "weight_block_size": [BLOCK, BLOCK] if scales == "block" else None,
            "modules_to_not_convert": list(ignored),
        }
    values = {"num_bits": 8, "type": "float" if kind == "fp8" else "int", "symmetric": True}
    own = {"strategy": _STRATEGY[scales], "dynamic": False, "observer": "minmax", "actorder": None}
    rounded = {
        "float": None,
        "dynamic": {**values, "strategy": "token", "dynamic": True},
        "static": {**values, "strategy": "tensor", "dynamic": False},
    }[activations]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if scales == "packed" else "naive-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**values, **own},
                "input_activations": rounded,
            }
        },
    }


def quantized_tensors(
    tensors: Mapping[str, torch.Tensor],
    form: Form,
    *,
    is_ignored: Callable[[str], bool] = lambda _: False,
    scale_dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """`tensors`, the matrices of linear modules replaced by 8-bit values and scales."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") or module == "lm_head"
        if is_linear and not is_ignored(module):
            found |= _quantized(module, tensor.float(), form, scale_dtype)
        else:
            found[name] = tensor
    return found


def _quantized(
    module: str, weight: torch.Tensor, form: Form, scale_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    kind, scales = form.split("-")
    rows, width = {
        "block": (BLOCK, BLOCK),
        "tensor": tuple(weight.shape),
    }.get(scales, (1, weight.shape[1]))
    largest = 448.0 if kind == "fp8" else 127.0
    grid = (_largest(weight, rows, width) / largest).clamp(min=1e-9).to(scale_dtype)
    spread = grid.float().repeat_interleave(rows, 0).repeat_interleave(width, 1)
    scaled = (weight / spread[: weight.shape[0], : weight.shape[1]]).clamp(-largest, largest)
    values = scaled.to(_FLOAT8) if kind == "fp8" else scaled.round().to(torch.int8)
    name = ".weight_scale_inv" if scales == "block" else ".weight_scale"
    own = {module + name: grid.reshape(1) if scales == "tensor" else grid}
    if scales != "packed":
        return {**own, module + ".weight": values}
    padded = torch.nn.functional.pad(values.to(torch.int64) + 128, (0, -weight.shape[1] % 4))
    words = (padded.view(len(weight), -1, 4) << torch.tensor([0, 8, 16, 24])).sum(2)
    return {
        **own,
        module + ".weight_packed": words.to(torch.int32),  # wraps, as bits do
        module + ".weight_shape": torch.tensor(weight.shape),
    }


def _largest(weight: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The largest magnitude in each block of [rows, width], edges included."""
    pad = (0, -weight.shape[1] % width, 0, -weight.shape[0] % rows)
    padded = torch.nn.functional.pad(weight.abs(), pad)
    return padded.view(padded.shape[0] // rows, rows, -1, width).amax((1, 3))
