"""Our decoder against transformers' on tiny random weights: the same logits, however we cut them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mallee.worker.model.random_llama import RandomLlama, random_llama
from mallee.worker.model.runner import load

TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "no_groups": {"num_key_value_heads": 4},
    "wide_heads": {"head_dim": 32},
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


class Oracle:
    """transformers' model over the same weights, no cache."""

    def __init__(self, model: RandomLlama, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        model.save(folder)
        self._model = LlamaForCausalLM.from_pretrained(folder)

    def last(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([tokens])).logits
        return logits[0, -1]


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RandomLlama, Oracle]:
    model = random_llama(3, **VARIANTS[request.param])
    return model, Oracle(model, tmp_path)


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128, n)]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours - theirs).abs().max())
    assert difference < TOLERANCE, f"logits differ by {difference}"


def test_a_whole_prefill_has_the_oracles_logits(
    pair: tuple[RandomLlama, Oracle], sequences: Callable[..., Any]
) -> None:
    model, oracle = pair
    run = sequences(model.forward())
    tokens = prompt(45)
    assert_near(run.step(run.row("a", tokens))[0], oracle.last(tokens))


def test_chunks_and_decodes_have_the_oracles_logits(
    pair: tuple[RandomLlama, Oracle], sequences: Callable[..., Any]
) -> None:
    model, oracle = pair
    run = sequences(model.forward())
    tokens = prompt(70)
    done = 0
    for n in (33, 5, 1, 20, 1, 1, 9):
        logits = run.step(run.row("a", tokens[done : done + n]))[0]
        done += n
        assert_near(logits, oracle.last(tokens[:done]))
    assert done == 70


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 80])
def test_lengths_around_block_edges_have_the_oracles_logits(
    block_size: int, length: int, tmp_path: Path, sequences: Callable[..., Any]
) -> None:
    """D1: 15/16/17, 31/32/33 and 80 tokens over scattered blocks equal a dense run."""
    model = random_llama(4)
    oracle = Oracle(model, tmp_path)
    run = sequences(model.forward(block_size=block_size))
    tokens = prompt(length + 1)
    assert_near(run.step(run.row("a", tokens[:-1]))[0], oracle.last(tokens[:-1]))
    assert_near(run.step(run.row("a", tokens[-1:]))[0], oracle.last(tokens))


def test_a_mixed_batch_equals_separate_runs(
    pair: tuple[RandomLlama, Oracle], sequences: Callable[..., Any]
) -> None:
    """Prefill, chunk, short chunks and decodes of several sequences in one step."""
    model, oracle = pair
    run = sequences(model.forward(num_blocks=200), seed=7)
    cached = {"decode1": 10, "decode2": 61, "decode3": 16, "short": 30, "chunk": 41, "new": 0}
    fresh = {"decode1": 1, "decode2": 1, "decode3": 1, "short": 6, "chunk": 37, "new": 23}
    texts = {name: prompt(cached[name] + fresh[name], i) for i, name in enumerate(cached)}
    first = [run.row(name, texts[name][:n], False) for name, n in cached.items() if n]
    assert run.step(*first) == []
    rows = [run.row(name, texts[name][cached[name] :]) for name in reversed(cached)]
    for name, logits in zip(reversed(cached), run.step(*rows), strict=True):
        assert_near(logits, oracle.last(texts[name]))


def test_only_rows_that_want_logits_get_them(sequences: Callable[..., Any]) -> None:
    model = random_llama(5)
    run = sequences(model.forward())
    alone = run.step(run.row("x", prompt(9, 1)))[0]
    both = run.step(run.row("a", prompt(12), False), run.row("b", prompt(9, 1), True))
    assert len(both) == 1
    assert_near(both[0], alone)


def test_forks_after_a_copy_have_the_oracles_logits_and_leave_the_parent_alone(
    pair: tuple[RandomLlama, Oracle], sequences: Callable[..., Any]
) -> None:
    """D19: every child of a fork inside a block equals a linear run of its tokens (1e-4)."""
    model, oracle = pair
    run = sequences(model.forward(num_blocks=200))
    tokens = prompt(42)
    run.step(run.row("parent", tokens))
    children = [f"child{i}" for i in range(5)]
    copies = [copy for child in children for copy in run.fork("parent", child)]
    assert len(copies) == 5
    rows = [run.row(child, prompt(i + 1, i + 50)) for i, child in enumerate(children)]
    for child, logits in zip(children, run.step(*rows, copies=copies), strict=True):
        assert_near(logits, oracle.last(run.tokens[child]))
    assert_near(run.step(run.row("parent", [7]))[0], oracle.last([*tokens, 7]))
    assert run.forward.stats().num_copied_slots == 5 * 2


def test_a_tree_of_forks_has_the_oracles_logits(
    tmp_path: Path, sequences: Callable[..., Any]
) -> None:
    """D6: all leaves of a three-level tree decode in one forward, each as if it ran alone."""
    model = random_llama(6, max_position_embeddings=1024)
    oracle = Oracle(model, tmp_path)
    run = sequences(model.forward(num_blocks=600))
    run.step(run.row("r", prompt(170)))
    leaves = []
    for i in range(3):
        middle = f"m{i}"
        copies = run.fork("r", middle)
        run.step(run.row(middle, prompt(90 + i, i)), copies=copies)
        for j in range(4):
            leaf = f"m{i}l{j}"
            leaves.append((leaf, run.fork(middle, leaf)))
    copies = [copy for _, own in leaves for copy in own]
    rows = [run.row(leaf, [i]) for i, (leaf, _) in enumerate(leaves)]
    for (leaf, _), logits in zip(leaves, run.step(*rows, copies=copies), strict=True):
        assert_near(logits, oracle.last(run.tokens[leaf]))


def test_a_loaded_directory_equals_the_model_it_was_saved_from(
    tmp_path: Path, sequences: Callable[..., Any]
) -> None:
    """D38: weights from safetensors, single file."""
    model = random_llama(8, tie_word_embeddings=False)
    model.save(tmp_path)
    ours = sequences(load(tmp_path, num_blocks=16, threads=None))
    theirs = sequences(model.forward(block_size=16, num_blocks=16))
    tokens = prompt(30)
    assert torch.equal(ours.step(ours.row("a", tokens))[0], theirs.step(theirs.row("a", tokens))[0])
