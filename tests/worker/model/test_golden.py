"""SmolLM2: our greedy tokens are transformers'; of fifty prompts in test_real_model.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw
from mallee.worker.model.runner import TorchForward, load

pytestmark = pytest.mark.model
GOLDEN: list[dict[str, list[int]]] = json.loads(
    Path(__file__).with_name("golden_smollm2.json").read_text()
)


@pytest.fixture(scope="module")
def forward(smollm2: Path) -> TorchForward:
    return load(smollm2, num_blocks=100, dtype="float32")


def greedy(forward: TorchForward, logits: list[torch.Tensor]) -> list[int]:
    return forward.sample([Draw(row, Sampling(), 0, 0) for row in logits])


@pytest.mark.slow
def test_forks_of_a_shared_prefix_go_on_as_the_parent_would(
    forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    """Real weights through trunk, merge and copied tail block: each child says the golden tokens."""
    run = sequences(forward)
    row = GOLDEN[-1]
    cut = 8
    logits = run.step(run.row("parent", row["prompt"] + row["tokens"][:cut]))
    children = [f"child{i}" for i in range(4)]
    copies = [copy for child in children for copy in run.fork("parent", child)]
    tokens = greedy(forward, logits) * len(children)
    for step in range(cut, cut + 6):
        assert tokens == [row["tokens"][step]] * len(children)
        rows = [run.row(c, [t]) for c, t in zip(children, tokens, strict=True)]
        tokens = greedy(forward, run.step(*rows, copies=copies))
        copies = []
    before = forward.stats()
    run.step(*(run.row(child, [1]) for child in children))
    after = forward.stats()
    reads = after.num_key_reads - before.num_key_reads
    assert reads < (after.num_flat_key_reads - before.num_flat_key_reads) / 2
