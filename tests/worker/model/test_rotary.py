"""Rotary tables against transformers', bit by bit: at long contexts the last bit of a frequency shows."""

from typing import Any

import pytest
import torch

from mallee.worker.model.config import LinearScaling, Rope
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.rotary import Rotary, inverse_frequencies

HEAD_DIM = 128
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_cosines_and_sines_are_transformers_to_the_last_bit(kind: str) -> None:
    """I1, part: every rope type, at positions up to the context's end."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 2 * HEAD_DIM,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 100_000,
    }
    (rope,) = parse_config({**raw, "rope_parameters": SETTINGS[kind]}).ropes
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw, rope_parameters=dict(SETTINGS[kind])))
    assert torch.equal(inverse_frequencies(rope, HEAD_DIM), theirs.inv_freq)
    positions = torch.tensor([0, 1, 7, 8191, 8192, 99_999])
    ours = Rotary(rope, head_dim=HEAD_DIM, max_positions=100_000, dtype=torch.float32, device="cpu")
    cos, sin = ours.at(positions)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    half = HEAD_DIM // 2
    assert torch.equal(cos[:, 0], expected_cos[0])
    assert torch.equal(sin[:, 0, half:], expected_sin[0, :, half:])
    assert torch.equal(sin[:, 0, :half], -expected_sin[0, :, :half])  # rotate_half's sign


def test_linear_scaling_divides_positions() -> None:
    plain = inverse_frequencies(Rope(1e4), 16)
    assert torch.equal(inverse_frequencies(Rope(1e4, LinearScaling(4.0)), 16) * 4, plain)
