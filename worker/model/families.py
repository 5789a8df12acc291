"""The architectures we compute: what sets one apart from another, as data.

`decoder.py` reads these flags; adding a family that differs in nothing else is adding a record. The
defaults are transformers' for fields that a config.json leaves out (hub files leave out many).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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

FAMILIES: Mapping[str, Family] = {f.model_type: f for f in (LLAMA, QWEN3, GEMMA3)}
