"""Tiny decoders with random weights, for tests that need a real forward pass and no download.

Doesn't know tests: equal arguments give equal weights, on every machine with this torch.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from mallee.worker.model.config import ModelConfig, model_spec, parse_config, to_hf
from mallee.worker.model.runner import TorchForward
from mallee.worker.model.weights import expected_shapes, fuse_weights, tensors_digest


class RandomLlama(NamedTuple):
    """A tiny Llama: its config and its tensors (float32) under transformers' names."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor]

    def forward(self, **options: Any) -> TorchForward:
        """A float32 `TorchForward` over these weights on the CPU; options are its keywords.

        `num_blocks` defaults to 64, `block_size` to 4.
        """
        spec = model_spec(
            self.config,
            name="random-llama",
            weights_digest=tensors_digest(self.tensors.items()),
            dtype="float32",
            max_model_len=None,
        )
        weights = fuse_weights(dict(self.tensors), self.config, dtype=torch.float32, device="cpu")
        return TorchForward(
            self.config, weights, spec, **{"num_blocks": 64, "block_size": 4, **options}
        )

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, as transformers reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(to_hf(self.config), indent=1))
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})


def random_llama(seed: int = 0, **overrides: Any) -> RandomLlama:
    """Two layers, hidden 64, 4 query and 2 key heads, vocabulary 128; `overrides` in HF's names."""
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        **overrides,
    }
    config = parse_config(raw)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        # Wide enough that next tokens differ clearly, narrow enough that nothing saturates.
        tensors[name] = 1 + 0.1 * values if len(shape) == 1 else values * 1.5 / shape[1] ** 0.5
    return RandomLlama(config, tensors)
