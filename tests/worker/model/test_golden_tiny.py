"""A tiny random model of each family: our greedy tokens are transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mallee.protocol.messages import Sampling
from mallee.testing.random_model import random_model, tensors_digest
from mallee.worker.forward import Draw

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_tiny.json").read_text())


@pytest.mark.parametrize("family", GOLDEN)
def test_fifty_prompts_in_one_batch_give_transformers_greedy_tokens(
    family: str, sequences: Callable[..., Any]
) -> None:
    """D18: 32 tokens after each prompt, all in one batch, some longer than a window."""
    model, rows = random_model(family, tie_word_embeddings=False), GOLDEN[family]["rows"]
    assert tensors_digest(model.tensors.items()) == GOLDEN[family]["weights"], (
        "other weights: run tests/worker/model/make_golden.py"
    )
    forward = model.forward(num_blocks=8000)
    run = sequences(forward)
    found: list[list[int]] = [[] for _ in rows]
    batch = [run.row(f"{i}", row["prompt"]) for i, row in enumerate(rows)]
    for _ in range(len(rows[0]["tokens"])):
        tokens = forward.sample([Draw(logits, Sampling(), 0, 0) for logits in run.step(*batch)])
        for own, token in zip(found, tokens, strict=True):
            own.append(token)
        batch = [run.row(f"{i}", [token]) for i, token in enumerate(tokens)]
    assert len(rows) == 50
    assert found == [row["tokens"] for row in rows]
