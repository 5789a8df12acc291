"""Our greedy tokens are transformers': of SmolLM2 (fifty prompts in test_real_model.py), of tiny models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.doubles.random_model import random_model, tensors_digest
from bench.engine.sanity import LENGTH, phases
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.worker.forward import Draw
from mallee.worker.model.runner import TorchForward, load
from support.driving import engine_over
from support.splits import block_reads, watch_splits

SMOLLM2: list[dict[str, list[int]]] = json.loads(
    Path(__file__).with_name("golden_smollm2.json").read_text()
)


@pytest.fixture(scope="module")
def forward(smollm2: Path) -> TorchForward:
    return load(smollm2, num_blocks=60, block_size=4, dtype="float32")


def greedy(forward: TorchForward, logits: list[torch.Tensor]) -> list[int]:
    return forward.sample([Draw(row, Sampling(), 0, 0) for row in logits])


@pytest.mark.model
@pytest.mark.slow
def test_forks_of_a_shared_prefix_go_on_as_the_parent_would(
    forward: TorchForward, sequences: Callable[..., Any]
) -> None:
    """Real weights through trunk, merge and copied tail block: each child says the golden tokens."""
    run = sequences(forward)
    row, cut = SMOLLM2[0], 8
    logits = run.step(run.row("parent", row["prompt"] + row["tokens"][:cut]))
    children = [f"child{i}" for i in range(4)]
    copies = [copy for child in children for copy in run.fork("parent", child)]
    tokens = greedy(forward, logits) * len(children)
    for step in range(cut, cut + 3):
        assert tokens == [row["tokens"][step]] * len(children)
        rows = [run.row(c, [t]) for c, t in zip(children, tokens, strict=True)]
        tokens = greedy(forward, run.step(*rows, copies=copies))
        copies = []
    splits = watch_splits(forward)
    run.step(*(run.row(child, [1]) for child in children))
    num_flat = sum(len(run.tables[child]) for child in children)
    assert block_reads(splits[0]) < num_flat / 2


# A tiny random model of each family


GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_tiny.json").read_text())


@pytest.mark.parametrize("family", GOLDEN)
def test_fifty_prompts_in_one_batch_give_transformers_greedy_tokens(
    family: str, sequences: Callable[..., Any]
) -> None:
    """D18: 32 or 64 tokens after each prompt, all in one batch, some longer than a window."""
    model, rows = random_model(family, tie_word_embeddings=False), GOLDEN[family]["rows"]
    assert tensors_digest(model.tensors.items()) == GOLDEN[family]["weights"], (
        "other weights: run tests/worker/model/make_golden.py"
    )
    forward = model.forward(num_blocks=8000)
    run = sequences(forward)
    found: list[list[int]] = [[] for _ in rows]
    batch = [run.row(f"{i}", row["prompt"]) for i, row in enumerate(rows)]
    for _ in range(len(rows[0]["tokens"])):
        tokens = greedy(forward, run.step(*batch))
        for own, token in zip(found, tokens, strict=True):
            own.append(token)
        batch = [run.row(f"{i}", [token]) for i, token in enumerate(tokens)]
    assert len(rows) == 50
    assert found == [row["tokens"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("family", GOLDEN)
def test_an_engine_with_all_features_off_gives_transformers_greedy_tokens(family: str) -> None:
    """I30: static batches in contiguous memory, 16 sequences at a time."""
    model = random_model(family, tie_word_embeddings=False, max_position_embeddings=LENGTH)
    engine = engine_over(
        model.forward(num_blocks=16, block_size=LENGTH, shares_reads=False),
        config=phases()["plain"].engine,
    )
    found: dict[str, list[int]] = {}
    expected = {f"{i}": row["tokens"] for i, row in enumerate(GOLDEN[family]["rows"])}
    for name, row in zip(expected, GOLDEN[family]["rows"], strict=True):
        limits = Limits(len(row["tokens"]), ignore_eos=True)
        engine.submit(Generate(name, pack_tokens(row["prompt"]), limits), "g")
    while engine.has_work:
        for update in engine.step().frames["g"].updates:
            found.setdefault(update.request, []).extend(update.tokens)
    assert found == expected
