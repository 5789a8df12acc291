"""Reads a checkpoint's config.json as transformers does.

Refuses, by name, everything that we would compute wrongly.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.worker.model.config import (
    FAMILIES,
    Activation,
    DeltaShape,
    ExpertsShape,
    Family,
    Layer,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Rope,
)
from mallee.worker.model.linear.scheme import ALIGNMENT
from mallee.worker.model.loading.quantization_json import parse_quantization

_DEFAULT_THETA = 10_000.0

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_REFUSED_IF_SET = (
    "attention_bias",
    "mlp_bias",
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "rope_interleaved",
)
_OF_SOME_FAMILIES = ("query_pre_attn_scalar", "final_logit_softcapping", "rope_local_base_freq")
_SEEING = {  # models that also see: the type of their text model, and the prefix of its tensors
    "gemma3": ("gemma3_text", "language_model."),
    "qwen3_5": ("qwen3_5_text", "model.language_model."),
    "qwen3_5_moe": ("qwen3_5_moe_text", "model.language_model."),
}
_EXPERTS_RULES = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
"""As families without these fields have them."""
_OF_BOTH = (
    *("eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings"),
    *("quantization_config", "compression_config"),
)
_PREFIX = "weights_prefix"  # ours, no field of a file
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`. Raises ModelNotFound, UnsupportedModel."""
    raw = _text_part(read_json(folder / "config.json"))
    eos = _ids(raw.get("eos_token_id"))
    extra = folder / "generation_config.json"
    if extra.is_file():
        eos += tuple(i for i in _ids(read_json(extra).get("eos_token_id")) if i not in eos)
    return parse_config(raw, eos_token_ids=eos)


def parse_config(
    raw: Mapping[str, Any], *, eos_token_ids: tuple[int, ...] | None = None
) -> ModelConfig:
    """The config that config.json's content describes. Raises UnsupportedModel naming the field."""
    raw = _text_part(raw)
    family = _family(raw)
    own = _Fields({**family.defaults, **raw})
    _refuse_unsupported(own, family)
    num_heads = own.whole("num_attention_heads")
    num_kv_heads = own.whole("num_key_value_heads", absent=num_heads)
    hidden_size = own.whole("hidden_size")
    head_dim = own.whole("head_dim", absent=hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{num_heads} query heads over {num_kv_heads} key heads of {head_dim} dimensions"
            " don't divide evenly"
        )
    is_capped = own.raw.get("final_logit_softcapping") is not None
    layers = _layers(own, family)
    config = ModelConfig(
        family=family,
        vocab_size=own.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=own.whole("intermediate_size"),
        layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        query_scale=own.number("query_pre_attn_scalar", absent=head_dim) ** -0.5,
        activation=_activation(own, family),
        norm_eps=own.number("rms_norm_eps"),
        logit_softcap=own.number("final_logit_softcapping") if is_capped else None,
        max_positions=own.whole("max_position_embeddings"),
        tie_word_embeddings=own.flag("tie_word_embeddings"),
        eos_token_ids=_ids(raw.get("eos_token_id")) if eos_token_ids is None else eos_token_ids,
        weights_prefix=str(raw.get(_PREFIX, "")),
        dtype=str(own.raw.get("dtype") or own.raw.get("torch_dtype") or "float32").removeprefix(
            "torch."
        ),
        quantization=parse_quantization(own.raw),
        rotary_dim=_rotary_dim(own, head_dim),
        delta=_delta(own) if any(layer.is_recurrent for layer in layers) else None,
        experts=_experts(own, family, len(layers)) if "num_experts" in family.defaults else None,
    )
    if config.quantization is not None:
        if family.is_hybrid:
            raise UnsupportedModel(
                f"weights of 8 bits of {family.model_type} are not supported; take a checkpoint in bfloat16"
            )
        _check_alignment(config)
    return config


def _check_alignment(config: ModelConfig) -> None:
    """Raises UnsupportedModel if a matrix of 8 bits has a dimension that GPUs don't multiply."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads x head_dim": config.num_heads * config.head_dim,
        "num_key_value_heads x head_dim": config.num_kv_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % ALIGNMENT:
            raise UnsupportedModel(
                f"{name}={size}: weights of 8 bits need multiples of {ALIGNMENT}; take a checkpoint in"
                " bfloat16"
            )


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`raw`; of a model that also sees, the part that computes text, with what is said for both."""
    kind, inner = raw.get("model_type"), raw.get("text_config")
    if kind not in _SEEING or not isinstance(inner, Mapping):
        return raw
    outer = {name: raw[name] for name in _OF_BOTH if raw.get(name) is not None}
    text, prefix = _SEEING[kind]
    return {**inner, **outer, "model_type": text, _PREFIX: prefix}


class _Fields:
    """config.json's fields, or those of its part `where`, by type; what has another is refused by name."""

    def __init__(self, raw: Mapping[str, Any], where: str = "") -> None:
        self.raw = raw
        self._where = f"{where}: " if where else ""

    def whole(self, name: str, *, absent: int | None = None, least: int = 1) -> int:
        value = self._get(name, absent)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UnsupportedModel(f"{name}={value!r} must be a whole number from {least} on")
        return value

    def number(self, name: str, *, absent: float | None = None) -> float:
        value = self._get(name, absent)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise UnsupportedModel(f"{self._where}{name}={value!r} must be a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw[name]
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{name}={value!r} must be true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.raw.get(name) or {}
        if not isinstance(value, Mapping):
            raise UnsupportedModel(f"{name}={value!r} must be an object")
        return dict(value)

    def refuse_if_set(self, name: str, why: str) -> None:
        if self.raw.get(name):
            raise UnsupportedModel(f"{name}={self.raw[name]!r} {why}", field=name)

    def _get(self, name: str, absent: float | None) -> Any:
        value = self.raw.get(name)
        return absent if value is None else value


def _family(raw: Mapping[str, Any]) -> Family:
    kind = raw.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        supported = ", ".join([*FAMILIES, *(f"the text model of {kind}" for kind in _SEEING)])
        raise UnsupportedModel(
            f"model_type {kind!r} is not supported; supported: {supported}",
            model_type=str(kind),
        )
    return family


def _refuse_unsupported(own: _Fields, family: Family) -> None:
    for name in _REFUSED_IF_SET:
        own.refuse_if_set(name, "is not supported")
    for name in _OF_SOME_FAMILIES:
        if name not in family.defaults:
            own.refuse_if_set(name, f"is not known of {family.model_type}")


def _activation(own: _Fields, family: Family) -> Activation:
    name = own.raw[family.activation_field]
    found = _ACTIVATIONS.get(str(name))
    if found is None:
        raise UnsupportedModel(
            f"{family.activation_field} {name!r} is not supported;"
            f" supported: {', '.join(_ACTIVATIONS)}"
        )
    return found


def _layers(own: _Fields, family: Family) -> tuple[Layer, ...]:
    kinds = _layer_types(own, family)
    ropes = _ropes(own, family)
    window = own.whole("sliding_window") if _SLIDING in kinds else None
    return tuple(Layer(ropes.get(kind), window if kind == _SLIDING else None) for kind in kinds)


def _delta(own: _Fields) -> DeltaShape:
    shape = DeltaShape(
        num_key_heads=own.whole("linear_num_key_heads"),
        num_value_heads=own.whole("linear_num_value_heads"),
        key_dim=own.whole("linear_key_head_dim"),
        value_dim=own.whole("linear_value_head_dim"),
        conv_width=own.whole("linear_conv_kernel_dim", least=2),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads={shape.num_value_heads} is no multiple of"
            f" linear_num_key_heads={shape.num_key_heads}"
        )
    return shape


def _experts(own: _Fields, family: Family, num_layers: int) -> ExpertsShape | None:
    """The experts of the layers that have some; None: no layer has."""
    for name, usual in _EXPERTS_RULES.items():
        if name not in family.defaults and own.raw.get(name) not in (None, usual):
            raise UnsupportedModel(f"{name}={own.raw[name]!r} is not known of {family.model_type}")
    own = _Fields({**_EXPERTS_RULES, **own.raw})
    dense, step = own.raw["mlp_only_layers"] or (), own.whole("decoder_sparse_step", absent=1)
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) for i in dense):
        raise UnsupportedModel(f"mlp_only_layers={dense!r} must be a list of layers")
    shape = ExpertsShape(
        layers=tuple(i for i in range(num_layers) if i not in dense and not (i + 1) % step),
        num_experts=own.whole("num_experts"),
        num_chosen=own.whole("num_experts_per_tok"),
        inner=own.whole("moe_intermediate_size"),
        shared_inner=own.whole("shared_expert_intermediate_size"),
        is_normed=own.flag("norm_topk_prob"),
    )
    if shape.num_chosen > shape.num_experts:
        raise UnsupportedModel(
            f"num_experts_per_tok={shape.num_chosen} is more than num_experts={shape.num_experts}"
        )
    return shape if shape.layers else None


def _rotary_dim(own: _Fields, head_dim: int) -> int | None:
    """The dimensions of a head that are turned, the first ones; None: all."""
    given = own.mapping("rope_parameters").get("partial_rotary_factor")
    share = own.number("partial_rotary_factor", absent=1) if given is None else given
    if share == 1:
        return None
    turned = int(head_dim * share) if isinstance(share, float) and 0 < share < 1 else 0
    if not turned or turned % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor={share!r} of {head_dim} dimensions is no even number of them"
        )
    return turned


def _layer_types(own: _Fields, family: Family) -> tuple[str, ...]:
    """Full or sliding attention, or none, for each layer, by the family's rules."""
    num_layers = own.whole("num_hidden_layers")
    given = own.raw["layer_types"]
    if family.is_hybrid:
        if own.raw.get("attn_output_gate") is not True:
            raise UnsupportedModel("attn_output_gate must be true")
        every = own.whole("full_attention_interval")
        if given is None:
            given = [_LINEAR if (i + 1) % every else _FULL for i in range(num_layers)]
        kinds = _given_layer_types(given, num_layers, known={_FULL, _LINEAR})
        if _FULL not in kinds:
            raise UnsupportedModel("layer_types without full_attention is not supported")
        return kinds
    match family.sliding:
        case "none":
            may_slide = False
        case "from_layer":
            may_slide = own.flag("use_sliding_window")
        case "pattern":
            may_slide = True
    if given is not None:
        kinds = _given_layer_types(given, num_layers, known={_FULL, _SLIDING})
        if _SLIDING in kinds and not may_slide:
            text = "layer_types has sliding layers, but use_sliding_window is not true"
            raise UnsupportedModel(text)
        return kinds
    if not may_slide:
        return (_FULL,) * num_layers
    if family.sliding == "from_layer":
        first = own.whole("max_window_layers", least=0)
        return tuple(_SLIDING if i >= first else _FULL for i in range(num_layers))
    pattern = own.whole("sliding_window_pattern")
    return tuple(_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers))


def _given_layer_types(given: Any, num_layers: int, *, known: set[str]) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        raise UnsupportedModel(f"layer_types={given!r} must name each of {num_layers} layers")
    unknown = sorted({str(kind) for kind in given} - known)
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)} is not supported")
    return tuple(given)


def _ropes(own: _Fields, family: Family) -> dict[str, Rope]:
    """Rotary settings for each layer type, from new and old fields as transformers reads them."""
    given, old = own.mapping("rope_parameters"), own.mapping("rope_scaling")
    own.refuse_if_set("original_max_position_embeddings", "belongs into rope_parameters")
    is_partial = "partial_rotary_factor" in family.defaults
    if not is_partial and own.number("partial_rotary_factor", absent=1) != 1:
        own.refuse_if_set("partial_rotary_factor", "is not supported")
    is_nested = any(isinstance(value, Mapping) for value in given.values())
    if given and is_nested != family.has_rope_per_layer_type:
        form = "an object per layer type" if family.has_rope_per_layer_type else "one flat object"
        raise UnsupportedModel(f"rope_parameters={given!r} of {family.model_type} must be {form}")
    full = given.get(_FULL) if is_nested else given
    if full and old and full != old:
        raise UnsupportedModel("rope_parameters and rope_scaling contradict each other")
    theta = own.raw.get("rope_theta", _DEFAULT_THETA)
    rope = _parse_rope(full or old, theta=theta, where=_FULL, is_partial=is_partial)
    if not family.has_rope_per_layer_type:
        return {_FULL: rope, _SLIDING: rope}  # recurrent layers have none
    local = own.raw["rope_local_base_freq"]
    return {
        _FULL: rope,
        _SLIDING: _parse_rope(given.get(_SLIDING) or {}, theta=local, where=_SLIDING),
    }


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise UnsupportedModel(f"eos_token_id={value!r} must be one token id or several")
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises ModelNotFound, UnsupportedModel."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise ModelNotFound(f"{path}: no such file", path=str(path)) from e
    except ValueError as e:
        raise UnsupportedModel(f"{path} is not JSON: {e}", path=str(path)) from e
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object", path=str(path))
    return content


def _parse_rope(
    fields: Mapping[str, Any], *, theta: Any, where: str, is_partial: bool = False
) -> Rope:
    """The settings in `fields`; `theta` where they name none. Raises UnsupportedModel."""
    own = _Fields(fields, where)
    kind = str(fields.get("rope_type", fields.get("type", "default")))
    if not is_partial and own.number("partial_rotary_factor", absent=1) != 1:
        turned = fields["partial_rotary_factor"]
        raise UnsupportedModel(f"{where}: partial_rotary_factor={turned!r} is not supported")
    base = own.number("rope_theta", absent=theta)
    if kind == "default":
        return Rope(base)
    names = _SCALINGS.get(kind)
    if names is None:
        raise UnsupportedModel(
            f"{where}: rope type {kind!r} is not supported;"
            f" supported: default, {', '.join(_SCALINGS)}",
            rope_type=kind,
        )
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        raise UnsupportedModel(
            f"{where}: rope type {kind} without {', '.join(missing)}", rope_type=kind
        )
    values = [own.number(name) for name in names]
    if kind == "linear":
        return Rope(base, LinearScaling(values[0]))
    return Rope(base, Llama3Scaling(values[0], values[1], values[2], int(values[3])))


_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
