"""Tiny decoders with random weights, for tests that need a real forward pass and no download.

Doesn't know tests: equal arguments give equal weights, on every machine with this torch.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from mallee.testing.random_weights import random_tensors
from mallee.worker.model.config import (
    FAMILIES,
    ModelConfig,
    digest_of,
    model_spec,
    resolve_kv_dtype,
)
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.loading.weights import fuse_weights
from mallee.worker.model.runner import TorchForward

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_EXPERTS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        },
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_next": {**_HYBRID, **_EXPERTS},
    "qwen3_5_moe_text": {**_HYBRID, **_EXPERTS},
}
"""Gemma's window is shorter than most test prompts and no multiple of a block. Qwen 3.5's recurrent heads are
wide: what a narrow one answers may be next to nothing, and is all rounding once it is normed."""


class RandomModel(NamedTuple):
    """A tiny decoder: config.json's content and tensors (float32) under transformers' names."""

    raw: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def config(self) -> ModelConfig:
        return parse_config(self.raw)

    def forward(
        self,
        *,
        dtype: str = "float32",
        kv_dtype: str = "auto",
        device: str = "cpu",
        **options: Any,
    ) -> TorchForward:
        """A `TorchForward` over these weights; dtypes and device as for `load`, options its keywords.

        `num_blocks` defaults to 64, `block_size` to 4.
        """
        config = self.config
        spec = model_spec(
            config,
            name=f"random-{config.family.model_type}",
            weights_digest=tensors_digest(self.tensors.items()),
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_model_len=None,
        )
        kept = getattr(torch, resolve_kv_dtype(kv_dtype, config, dtype))
        weights = fuse_weights(
            dict(self.tensors),
            config,
            dtype=getattr(torch, dtype),
            device=device,
            kv_dtype=kept,
        )
        options = {"num_blocks": 64, "block_size": 4, "kv_dtype": kept, **options}
        return TorchForward(config, weights, spec, **options)

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw, indent=1))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})


def random_model(family: str = "llama", seed: int = 0, **overrides: Any) -> RandomModel:
    """Two to four layers, hidden 64, 4 query and 2 key heads, vocabulary 128.

    `family` is a model_type; `overrides` are fields of config.json.
    """
    raw = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **_BASE,
        **_OF_FAMILY[family],
        **overrides,
    }
    return RandomModel(raw, random_tensors(parse_config(raw), torch.Generator().manual_seed(seed)))


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of all bytes of `tensors`, for small models that never were files."""
    parts: list[bytes] = []
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        parts += [name.encode(), tensor.contiguous().view(torch.uint8).numpy().tobytes()]
    return digest_of(parts)
