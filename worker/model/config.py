"""The architectures that are computed, the shape of one decoder, and the spec that others see of it.

A `Family` is data: `decoder.py` reads its flags, and a family that differs in nothing else is one more
record. Its defaults are transformers' for fields that a config.json leaves out (hub files leave out
many). Doesn't know files (`config_json.py` reads them), weights or tensors.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from mallee.protocol.errors import ConfigError
from mallee.protocol.model import GroupSpec, ModelSpec, fingerprint
from mallee.worker.model.linear.scheme import Quantization

DTYPE_NBYTES = {"float32": 4, "bfloat16": 2}
FP8 = "float8_e4m3fn"
_KV_NBYTES = {**DTYPE_NBYTES, FP8: 1}
FP8_ALIGNMENT = 16
_LINE = 64

Activation: TypeAlias = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. Norms are RMS norms that multiply by `norm_offset` + weight.

    With `has_sandwich_norms` the outputs of attention and MLP are normed before they are added.
    """

    model_type: str
    architecture: str  # transformers' class
    has_qk_norm: bool = False  # every query and key head is normed before it is turned
    has_sandwich_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False  # by sqrt(hidden_size), rounded to the model's dtype
    has_rope_per_layer_type: bool = False
    sliding: Literal["none", "from_layer", "pattern"] = "none"  # which layers have windows
    activation_field: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    is_hybrid: bool = field(default=False, repr=False)
    """Some layers are recurrent (`DeltaShape`); attention's output is multiplied by a gate of its own."""
    ignored: tuple[str, ...] = field(default=(), repr=False)
    """Beginnings of the names of tensors that are no part of the decoder."""
    has_mixed_rows: bool = field(default=False, repr=False)
    """A recurrent layer's rows are stored by key head: its query, key, values and their gates."""


_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "layer_types": None}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        **_COMMON,
        "head_dim": None,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    has_qk_norm=True,
    sliding="from_layer",
    defaults={
        **_COMMON,
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    has_qk_norm=True,
    has_sandwich_norms=True,
    norm_offset=1.0,
    scales_embedding=True,
    has_rope_per_layer_type=True,
    sliding="pattern",
    activation_field="hidden_activation",
    defaults={
        **_COMMON,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    has_qk_norm=True,
    norm_offset=1.0,
    is_hybrid=True,
    ignored=("mtp.",),  # layers that draft
    defaults={
        **_COMMON,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)

_EXPERTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

QWEN3_NEXT = replace(
    QWEN3_5,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    has_mixed_rows=True,
    defaults={
        **QWEN3_5.defaults,
        **_EXPERTS,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": True,
    },
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        **QWEN3_5.defaults,
        **_EXPERTS,
        "intermediate_size": 512,  # of no layer
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
)

FAMILIES: Mapping[str, Family] = {
    f.model_type: f for f in (LLAMA, QWEN3, GEMMA3, QWEN3_5, QWEN3_NEXT, QWEN3_5_MOE)
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (rope_type "linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretched rotary frequencies (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Settings by which positions turn queries and keys of one kind of layer."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one layer's attention: `window` tokens are seen, itself included."""

    rope: Rope | None  # None: the layer is recurrent, and knows no positions
    window: int | None = None  # None: all tokens before it

    @property
    def is_recurrent(self) -> bool:
        return self.rope is None


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The shape of recurrent layers by the gated delta rule, and of the state that each keeps of a text.

    The state is a matrix for each value head, in float32, and the last inputs of a causal convolution, in the
    model's dtype.
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of `num_key_heads`
    key_dim: int  # of a head
    value_dim: int
    conv_width: int  # tokens

    @property
    def keys(self) -> int:
        """Features of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_inputs(self) -> int:
        """Features that are convolved: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def matrix_nbytes(self) -> int:
        """Bytes of a layer's matrices."""
        return 4 * self.values * self.key_dim

    def conv_nbytes(self, itemsize: int) -> int:
        """Bytes of the inputs that a layer keeps."""
        return (self.conv_width - 1) * self.conv_inputs * itemsize

    def state_nbytes(self, num_layers: int, itemsize: int) -> int:
        """Bytes of the state of so many layers, which lie side by side; the next one begins on a line."""
        nbytes = num_layers * (self.matrix_nbytes + self.conv_nbytes(itemsize))
        return -(-nbytes // _LINE) * _LINE


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The shape of layers with routed experts, of which each token has a few, beside a shared one."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int  # by a token
    inner: int  # features within an expert
    shared_inner: int
    is_normed: bool  # the shares of a token's experts add up to 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder. `dtype` is the checkpoint's own, by torch's name."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float  # scores are query . key times this
    activation: Activation
    norm_eps: float
    logit_softcap: float | None  # logits are bent to +- this by tanh
    max_positions: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    weights_prefix: str  # of our tensors' names, in the files of a model that also sees
    dtype: str
    quantization: Quantization | None = None  # of its matrices; None: they have plain floats
    rotary_dim: int | None = None  # the first dimensions of a head, which are turned; None: all
    delta: DeltaShape | None = None  # of the recurrent layers, where there are some
    experts: ExpertsShape | None = None  # of the layers that have some; the others have one MLP

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.is_recurrent)

    def experts_of(self, i: int) -> ExpertsShape | None:
        """The experts of layer `i`; None: it has one MLP."""
        return self.experts if self.experts is not None and i in self.experts.layers else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The distinct rotary settings, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use."""
        own = (layer.window for layer in self.layers if not layer.is_recurrent)
        return tuple(dict.fromkeys(own))


def check_kv_dtype(kv_dtype: str) -> str:
    """`kv_dtype` itself, "auto" or "fp8". Raises ConfigError for any other."""
    if kv_dtype in ("fp4", "mxfp4", "mxfp8"):
        raise ConfigError(
            f"kv_dtype={kv_dtype!r} is planned, on GPUs that compute with it; until then give fp8"
            " (float8 e4m3) or auto"
        )
    if kv_dtype not in ("auto", "fp8"):
        raise ConfigError(f"kv_dtype={kv_dtype!r}: give auto (the model's dtype) or fp8")
    return kv_dtype


def resolve_kv_dtype(kv_dtype: str, config: ModelConfig, dtype: str) -> str:
    """The dtype, by torch's name, in which a model computed in `dtype` keeps KV. Raises ConfigError."""
    if check_kv_dtype(kv_dtype) == "auto":
        return dtype
    if config.head_dim % FP8_ALIGNMENT:
        raise ConfigError(
            f"kv_dtype='fp8' needs head_dim in multiples of {FP8_ALIGNMENT}, this model has"
            f" {config.head_dim}; give auto"
        )
    return FP8


def model_spec(
    config: ModelConfig,
    *,
    name: str,
    weights_digest: str,
    dtype: str,
    kv_dtype: str = "auto",
    max_model_len: int | None,
) -> ModelSpec:
    """The spec of this model for the rest of the system, when it is computed in `dtype`.

    `max_model_len` can only lower the model's own limit. Raises ConfigError for a bad `kv_dtype`.
    """
    limit = config.max_positions
    if max_model_len is not None:
        limit = min(limit, max_model_len)
    shape = {field.name: getattr(config, field.name) for field in fields(config)}
    for name_of_some in ("rotary_dim", "delta", "experts"):
        if shape[name_of_some] is None:  # models without them keep their fingerprints
            del shape[name_of_some]
    kept = resolve_kv_dtype(kv_dtype, config, dtype)
    return ModelSpec(
        name=name,
        fingerprint=fingerprint(
            shape, weights_digest, dtype if kept == dtype else f"{dtype}+{kept}"
        ),
        vocab_size=config.vocab_size,
        max_model_len=limit,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype_nbytes=_KV_NBYTES[kept],
        eos_token_ids=config.eos_token_ids,
        groups=_groups(
            config,
            limit,
            layer_nbytes=2 * config.num_kv_heads * config.head_dim * _KV_NBYTES[kept],
            itemsize=DTYPE_NBYTES[dtype],
        ),
    )


def _groups(
    config: ModelConfig, max_model_len: int, *, layer_nbytes: int, itemsize: int
) -> tuple[GroupSpec, ...]:
    """The layers by what they read; none if all read alike, or no text outgrows a window.

    A token of one layer takes `layer_nbytes`, a number of a model `itemsize`.
    """
    by_window: dict[int | None, list[int]] = {None: []}
    for i, layer in enumerate(config.layers):
        if layer.is_recurrent:
            continue
        binds = layer.window is not None and layer.window < max_model_len
        by_window.setdefault(layer.window if binds else None, []).append(i)
    if config.delta is None and (not by_window[None] or len(by_window) == 1):
        return ()
    groups = [
        GroupSpec(
            kind="full" if window is None else "window",
            layers=tuple(layers),
            nbytes=layer_nbytes * len(layers),
            window=window,
        )
        for window, layers in by_window.items()
    ]
    if config.delta is not None:
        own = config.recurrent_layers
        nbytes = config.delta.state_nbytes(len(own), itemsize)
        groups.append(GroupSpec(kind="state", layers=own, nbytes=nbytes))
    return tuple(groups)


def digest_of(parts: list[bytes]) -> str:
    """32 hex digits over `parts`, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
