"""Reads the quantization_config of a config.json: the 8-bit forms that we compute, or a refusal by name.

Formats: "fp8" (Qwen3 FP8, DeepSeek, AutoFP8) and "compressed-tensors" (llm-compressor). A field that is
set and unknown is refused: it might change what the weights mean.
"""

import re
from collections.abc import Mapping
from typing import Any

from mallee.protocol.errors import UnsupportedModel
from mallee.worker.model.linear.scheme import BLOCK, Group, Quantization, Scheme

_FIELD = "quantization_config"
_SUPPORTED = (
    f"supported: bfloat16 or float32 weights; FP8 (e4m3) in blocks of {BLOCK} x {BLOCK}, per channel or"
    ' per tensor; INT8 per channel (quant_method "fp8" or "compressed-tensors"); stored scales of FP8 KV'
    " per tensor"
)
_PLANNED = (
    "; FP4 (NVFP4, MXFP4) and MXFP8 are planned, on GPUs that compute with them: until then take an FP8"
    " or INT8 checkpoint of this model"
)
_PLANNED_WORDS = re.compile(r"fp4|mxfp|nvfp|ue8m0|modelopt", re.IGNORECASE)
_NOTES = {  # of compressed-tensors: these change nothing about the stored weights
    *("quant_method", "global_compression_ratio", "version", "observer", "observer_kwargs"),
    *("zp_dtype", "scale_dtype"),
}
_ANY_LINEAR = ".*"


def parse_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """The forms that config.json's content tells; None without any. Raises UnsupportedModel."""
    if raw.get("compression_config"):
        raise _refusal("compression_config (the old name of quantization_config) is set")
    given = raw.get(_FIELD)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refusal(f"it is {given!r}, not an object")
    method = given.get("quant_method")
    if method == "fp8":
        return _parse_fp8(given)
    if method == "compressed-tensors":
        return _parse_compressed(given)
    raise _refusal(f"quant_method is {method!r}")


def _parse_fp8(given: Mapping[str, Any]) -> Quantization:
    known = {"activation_scheme", "fmt", "weight_block_size", "scale_fmt", "dequantize"}
    known |= {"modules_to_not_convert", "ignored_layers", "kv_cache_scheme"}
    _refuse_unknown(given, known, "")
    _expect(given, "fmt", (None, "e4m3"))
    _expect(given, "scale_fmt", (None, "float"))
    _expect(given, "weight_block_size", (None, [BLOCK, BLOCK]))
    _expect(given, "activation_scheme", ("dynamic", "static"))
    _expect(given, "kv_cache_scheme", (None, "static"))
    has_blocks = given.get("weight_block_size") is not None
    is_dynamic = given["activation_scheme"] == "dynamic"
    if has_blocks and not is_dynamic:
        raise _refusal('activation_scheme is "static" with a weight_block_size')
    scheme = Scheme(
        values="float8_e4m3fn",
        scales="block" if has_blocks else "tensor",
        activations="dynamic" if is_dynamic else "static",
    )
    names = _names(given, "modules_to_not_convert", "") + _names(given, "ignored_layers", "")
    # As transformers matches them: from the start up to the end of a module's name, or at the end.
    ignored = [rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$" for name in names]
    groups = (Group((_ANY_LINEAR,), scheme),)
    return Quantization(
        "fp8",
        groups,
        _compiled(ignored),
        is_head_open=True,
        has_kv_scales=given.get("kv_cache_scheme") is not None,
    )


def _parse_compressed(given: Mapping[str, Any]) -> Quantization:
    known = {"config_groups", "format", "ignore", "quantization_status", "sparsity_config"}
    _refuse_unknown(given, {*known, "kv_cache_scheme", *_NOTES}, "")
    sparsity = given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise _refusal(f"sparsity_config is {sparsity!r}")
    _expect(given, "quantization_status", (None, "compressed", "frozen"))
    groups, has_kv_scales = given.get("config_groups"), _has_kv_scales(given.get("kv_cache_scheme"))
    if not isinstance(groups, Mapping) or not (groups or has_kv_scales):
        raise _refusal(f"config_groups is {groups!r}")
    return Quantization(
        method="compressed-tensors",
        groups=tuple(_group(groups[name], given, f"config_groups.{name}") for name in groups),
        ignored=_compiled([_pattern(name) for name in _names(given, "ignore", "")]),
        has_kv_scales=has_kv_scales,
    )


def _has_kv_scales(args: Any) -> bool:
    """Whether layers have stored scales of keys and values. Raises UnsupportedModel for another scheme."""
    where = "kv_cache_scheme"
    if args is None:
        return False
    if not isinstance(args, Mapping):
        raise _refusal(f"{where} is {args!r}")
    if args.get("num_bits") != 8 or args.get("type") != "float":
        raise _refusal(f"{where} has num_bits {args.get('num_bits')!r}, type {args.get('type')!r}")
    _refuse_unknown(args, {*_ARGS, *_NOTES}, where)
    _expect(args, "strategy", ("tensor",), where)
    _expect(args, "symmetric", (True,), where)
    _expect(args, "dynamic", (None, False), where)
    _expect(args, "group_size", (None, -1), where)
    _expect(args, "block_structure", (None,), where)
    return True


def _group(group: Any, given: Mapping[str, Any], where: str) -> Group:
    if not isinstance(group, Mapping):
        raise _refusal(f"{where} is {group!r}, not an object")
    _refuse_unknown(group, {"targets", "weights", "input_activations", "format"}, where)
    targets = [
        _ANY_LINEAR if name == "Linear" else _pattern(name)
        for name in _names(group, "targets", where)
    ]
    if not targets:
        raise _refusal(f"{where}.targets names nothing")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise _refusal(f"{where}.weights is {weights!r}")
    kind, scales = _eight_bits(weights, f"{where}.weights")
    form = group.get("format") or given.get("format")
    own = ("float-quantized",) if kind == "float" else ("int-quantized", "pack-quantized")
    if form not in (*own, "naive-quantized"):
        raise _refusal(f"format is {form!r}, of {kind} weights of 8 bits")
    activations = _activations(group.get("input_activations"), kind, f"{where}.input_activations")
    scheme = Scheme(
        values="float8_e4m3fn" if kind == "float" else "int8",
        scales=scales,
        activations=activations,
        is_packed=form == "pack-quantized",
    )
    return Group(_compiled(targets), scheme)


_ARGS = {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"}


def _eight_bits(args: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """ "float" or "int", and the scales of a scheme. Raises UnsupportedModel."""
    kind, strategy = args.get("type"), args.get("strategy")
    if args.get("num_bits") != 8 or kind not in ("float", "int"):
        is_planned = kind == "float" and args.get("num_bits") == 4
        what = f"{where} has num_bits {args.get('num_bits')!r}, type {kind!r}"
        raise _refusal(what + (" (FP4)" if is_planned else ""))
    if kind == "float" and strategy == "group" and args.get("group_size") == 32:
        raise _refusal(f"{where} has groups of 32 (MXFP8)")
    _refuse_unknown(args, {*_ARGS, *_NOTES}, where)
    _expect(args, "symmetric", (True,), where)
    _expect(args, "dynamic", (None, False), where)
    _expect(args, "group_size", (None, -1), where)
    blocks = args.get("block_structure")
    if strategy == "block" and kind == "float":
        if blocks not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            raise _refusal(f"{where}.block_structure is {blocks!r}")
        return kind, "block"
    scales = {"channel": "row", "tensor": "tensor"}.get(str(strategy))
    if scales is None or blocks is not None:
        raise _refusal(f"{where}.strategy is {strategy!r}, of {kind} weights of 8 bits")
    return kind, scales


def _activations(args: Any, kind: str, where: str) -> Any:
    """The activations of a scheme. Raises UnsupportedModel."""
    if args is None:
        return "float"
    if not isinstance(args, Mapping):
        raise _refusal(f"{where} is {args!r}")
    if args.get("num_bits") != 8 or args.get("type") != kind:
        raise _refusal(f"{where} has num_bits {args.get('num_bits')!r}, type {args.get('type')!r}")
    _refuse_unknown(args, {*_ARGS, *_NOTES}, where)
    _expect(args, "symmetric", (True,), where)
    _expect(args, "group_size", (None, -1, BLOCK), where)
    _expect(args, "block_structure", (None,), where)
    if args.get("dynamic") is True:
        _expect(args, "strategy", ("token", "tensor", "group"), where)
        return "dynamic"
    _expect(args, "dynamic", (None, False), where)
    _expect(args, "strategy", ("tensor",), where)
    return "static"


def _refuse_unknown(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in sorted(given.keys() - known - {"quant_method"}):
        if given[name]:
            raise _refusal(f"{where}{'.' if where else ''}{name} is {given[name]!r}")


def _expect(given: Mapping[str, Any], name: str, allowed: tuple[Any, ...], where: str = "") -> None:
    value = given.get(name)
    if not any(value is each or (value == each and value is not True) for each in allowed):
        raise _refusal(f"{where}{'.' if where else ''}{name} is {value!r}")


def _names(given: Mapping[str, Any], field: str, where: str) -> list[str]:
    value = given.get(field)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"{where}{'.' if where else ''}{field} is {value!r}, no list of names")
    return names


def _pattern(name: str) -> str:
    """As compressed-tensors matches a name: whole, or as an expression from the start."""
    return name[3:] if name.startswith("re:") else re.escape(name) + "$"


def _compiled(patterns: list[str]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as e:
            raise _refusal(f"{pattern!r} is no regular expression ({e})") from e
    return tuple(patterns)


def _refusal(found: str) -> UnsupportedModel:
    planned = _PLANNED if _PLANNED_WORDS.search(found) else ""
    return UnsupportedModel(f"{_FIELD}: {found}; {_SUPPORTED}{planned}", field=_FIELD)
