"""The tensors that a checkpoint of a config must hold: names, shapes and types, also of 8-bit matrices.

Doesn't load them. Some tensors may be there or not, or have one of two names: those found decide.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch

from mallee.protocol.errors import WeightsMismatch
from mallee.worker.model.config import DeltaShape, Family, ModelConfig
from mallee.worker.model.linear.scheme import BLOCK, Scheme

_SHOWN = 8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE = (torch.int64, torch.int32)
_VALUES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
_SCALE_NAMES = (".weight_scale", ".weight_scale_inv")  # both multiply
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
"""Of checkpoints for static activations; we keep activations in floats and use none of these."""
_KV_SCALE_NAMES = (
    ("k_scale", "v_scale"),  # compressed-tensors
    ("attn.k_scale", "attn.v_scale"),  # vLLM's own
    ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
    ("k_proj.output_scale", "v_proj.output_scale"),  # llm-compressor's first versions, Quark
    ("kv_scale", "kv_scale"),  # AutoFP8: one for both
)
"""Of a layer's attention. Source: vLLM's maybe_remap_kv_scale_name and get_cache_scale."""


class Found(Protocol):
    """A tensor of a checkpoint, or the entry of one in a file's header."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Stored(NamedTuple):
    """A tensor in a checkpoint: one of `shapes`, one of `dtypes`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def expected_tensors(config: ModelConfig, found: Collection[str]) -> dict[str, Stored]:
    """Every tensor that a checkpoint of `config` must hold if it holds those named in `found`."""
    expected = {}
    for name, shape in expected_shapes(config, found).items():
        module = name.removesuffix(".weight")
        scheme = scheme_of(config, module, found)
        if scheme is None:
            expected[name] = Stored((shape,), _FLOATS)
        else:
            expected.update(_of_matrix(module, shape, scheme, found))
    for names in kv_scale_names(config, found).values():
        expected |= {name: Stored(((), (1,)), _SCALES) for name in names}
    return expected


def kv_scale_names(config: ModelConfig, found: Collection[str]) -> dict[int, tuple[str, str]]:
    """By layer with KV the names of the scales of keys and of values; empty if the checkpoint has none.

    If config.json doesn't tell of them, those found decide. All layers have names of one form.
    """
    layers = {
        i: f"model.layers.{i}.self_attn."
        for i, layer in enumerate(config.layers)
        if not layer.is_recurrent
    }
    by_form = [
        {i: (layer + k, layer + v) for i, layer in layers.items()} for k, v in _KV_SCALE_NAMES
    ]
    for names in by_form:
        if any(name in found for pair in names.values() for name in pair):
            return names
    is_told = config.quantization is not None and config.quantization.has_kv_scales
    return by_form[0] if is_told else {}


def is_kv_scale(name: str) -> bool:
    return name.endswith(tuple(f".{ending}" for pair in _KV_SCALE_NAMES for ending in pair))


def scheme_of(config: ModelConfig, module: str, found: Collection[str]) -> Scheme | None:
    """The 8-bit form of the matrix; None if it has plain floats, as embeddings and norms always have."""
    own = config.quantization
    if own is None or not (module.endswith("_proj") or module == "lm_head"):
        return None
    if own.is_head_open and module == "lm_head" and scale_name(module, found) not in found:
        return None
    return own.scheme_of(module, config.weights_prefix)


def scale_name(module: str, found: Collection[str]) -> str:
    """The name of the matrix's scales: the first if none is found."""
    names = [module + ending for ending in _SCALE_NAMES]
    return next((name for name in names if name in found), names[0])


def _of_matrix(
    module: str, shape: tuple[int, ...], scheme: Scheme, found: Collection[str]
) -> dict[str, Stored]:
    rows, width = shape
    match scheme.scales:
        case "block":
            scales: tuple[tuple[int, ...], ...] = ((-(-rows // BLOCK), -(-width // BLOCK)),)
        case "row":
            scales = ((rows,), (rows, 1))
        case "tensor":
            scales = ((), (1,), (1, 1))
    own = {scale_name(module, found): Stored(scales, _SCALES)}
    if scheme.is_packed:
        own[module + ".weight_packed"] = Stored(((rows, -(-width // 4)),), (torch.int32,))
        own[module + ".weight_shape"] = Stored(((2,),), _WHOLE)
    else:
        own[module + ".weight"] = Stored((shape,), (_VALUES[scheme.values],))
    if scheme.activations == "static":
        names = (module + ending for ending in ACTIVATION_SCALES)
        own |= {name: Stored(((), (1,)), _SCALES) for name in names if name in found}
    return own


def expected_shapes(config: ModelConfig, found: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of `config` must hold, under transformers' names if `found` has no others."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, layer in enumerate(config.layers):
        own: dict[str, tuple[int, ...]] = dict.fromkeys(
            layer_norms(config.family).values(), (hidden,)
        )
        delta = config.delta if layer.is_recurrent else None
        if delta is not None:
            own |= {DELTA_NORM: (delta.value_dim,), DELTA_CONV: _conv_shape(delta)}
            for name in DELTA_DECAY:
                shapes[f"model.layers.{i}.{name}"] = (delta.num_value_heads,)
        elif config.family.has_qk_norm:
            own |= dict.fromkeys(QK_NORMS, (config.head_dim,))
        for matrices in layer_products(config, i).values():
            own |= matrices
        if config.experts_of(i) is not None:
            shapes |= expert_shapes(config, i, found)
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in own.items()}
    return shapes


QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
DELTA_NORM, DELTA_CONV = "linear_attn.norm", "linear_attn.conv1d"
DELTA_QKVZ, DELTA_BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
DELTA_DECAY = ("linear_attn.A_log", "linear_attn.dt_bias")


def _conv_shape(delta: DeltaShape) -> tuple[int, ...]:
    return delta.conv_inputs, 1, delta.conv_width


def layer_norms(family: Family) -> dict[str, str]:
    """The modules of a layer's norms beside those of heads, by the field of `LayerWeights`."""
    if not family.has_sandwich_norms:
        return {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "input_norm": "input_layernorm",
        "attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "output_norm": "post_feedforward_layernorm",
    }


def layer_products(config: ModelConfig, i: int) -> dict[str, dict[str, tuple[int, int]]]:
    """The matrices of the products of layer `i`, with their shapes, by the field of `LayerWeights`."""
    hidden, inner, module = config.hidden_size, config.intermediate_size, "mlp"
    experts, router = config.experts_of(i), {}
    if experts is not None:
        inner, module = experts.shared_inner, "mlp.shared_expert"
        gates = {"mlp.gate": (experts.num_experts, hidden), "mlp.shared_expert_gate": (1, hidden)}
        router = {"experts": gates}  # the experts themselves are no such matrices
    mlp = {
        "gate_up": {f"{module}.gate_proj": (inner, hidden), f"{module}.up_proj": (inner, hidden)},
        "down": {f"{module}.down_proj": (hidden, inner)},
        **router,
    }
    if config.delta is not None and config.layers[i].is_recurrent:
        delta = config.delta
        inputs, values, heads = delta.conv_inputs, delta.values, delta.num_value_heads
        qkv = {
            "linear_attn.in_proj_qkv": (inputs, hidden),
            "linear_attn.in_proj_z": (values, hidden),
            "linear_attn.in_proj_b": (heads, hidden),
            "linear_attn.in_proj_a": (heads, hidden),
        }
        mixed = {DELTA_QKVZ: (inputs + values, hidden), DELTA_BA: (2 * heads, hidden)}
        return {
            "qkv": mixed if config.family.has_mixed_rows else qkv,
            "output": {"linear_attn.out_proj": (hidden, values)},
            **mlp,
        }
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = 2 * query if config.family.is_hybrid else query  # with those of the output's gate
    return {
        "qkv": {
            "self_attn.q_proj": (rows, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
        },
        "output": {"self_attn.o_proj": (hidden, query)},
        **mlp,
    }


def expert_shapes(
    config: ModelConfig, i: int, found: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """The tensors of layer `i`'s routed experts: two of all, or if those are `found` three of each."""
    own, hidden, prefix = config.experts_of(i), config.hidden_size, f"model.layers.{i}.mlp.experts."
    assert own is not None, "a layer without experts"
    into, back = (own.inner, hidden), (hidden, own.inner)
    each = {"gate_proj.weight": into, "up_proj.weight": into, "down_proj.weight": back}
    if any(f"{prefix}0.{name}" in found for name in each):
        numbers = range(own.num_experts)
        return {f"{prefix}{n}.{name}": shape for n in numbers for name, shape in each.items()}
    return {
        f"{prefix}gate_up_proj": (own.num_experts, 2 * own.inner, hidden),
        f"{prefix}down_proj": (own.num_experts, hidden, own.inner),
    }


def check_tensors(expected: Mapping[str, Stored], found: Mapping[str, Found]) -> None:
    """Raises WeightsMismatch, with every tensor that is missing, unexpected, or of another shape or type."""
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    both = [(name, own, found[name]) for name, own in expected.items() if name in found]
    wrong = [
        f"{name} {tuple(tensor.shape)} instead of {' or '.join(map(str, own.shapes))}"
        for name, own, tensor in both
        if tuple(tensor.shape) not in own.shapes
    ]
    wrong += [
        f"{name} {tensor.dtype} instead of {', '.join(map(str, own.dtypes))}"
        for name, own, tensor in both
        if tensor.dtype not in own.dtypes
    ]
    if not missing and not unexpected and not wrong:
        return
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("shape or type", wrong),
        )
        if names
    ]
    raise WeightsMismatch(
        "the weights don't fit config.json; " + "; ".join(parts),
        missing=missing,
        unexpected=unexpected,
        wrong_tensors=wrong,
    )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
