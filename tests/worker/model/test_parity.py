"""Our decoder against transformers' on tiny random weights: the same logits, however we cut them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.testing.random_model import random_model
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.doctor import examine, load_oracle
from mallee.worker.model.runner import load
from mallee.worker.model.tolerance import TOLERANCES
from support.examples import examples

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-no_groups": ("llama", {"num_key_value_heads": 4}),
    "llama-wide_heads": ("llama", {"head_dim": 32}),
    "llama-stretched": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3-one_kv_head": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3-sliding": ("qwen3", SLIDING),
    "gemma3": ("gemma3_text", {}),
    "gemma3-capped": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "gemma3-all_sliding": (
        "gemma3_text",
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 3},
    ),
}
LENGTHS = (15, 16, 17, 31, 32, 33, 80)


@pytest.fixture(params=VARIANTS)
def oracle(request: pytest.FixtureRequest, oracles: Callable[..., Any]) -> Any:
    family, overrides = VARIANTS[request.param]
    return oracles(random_model(family, 3, **overrides))


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest, oracles: Callable[..., Any]) -> Any:
    """One model per family."""
    return oracles(random_model(request.param, 3))


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128, n)]


def check_near(oracle: Any, tokens: list[int], ours: torch.Tensor, dtype: str = "float32") -> None:
    """D18: on a mismatch the failure names the first layer, head and position that differ."""
    difference = float((ours.float() - oracle.last(tokens)).abs().max())
    if difference >= TOLERANCES[dtype].logits:
        found = examine(oracle.model.forward(dtype=dtype), oracle.hf, tokens, num_steps=0)
        pytest.fail(f"logits differ by {difference} after {len(tokens)} tokens; {found.first}")


def test_chunks_and_decodes_have_the_oracles_logits(
    oracle: Any, sequences: Callable[..., Any]
) -> None:
    """I1, I6: chunked prefill and decode over the cache equal a run without one."""
    run = sequences(oracle.model.forward())
    tokens = prompt(70)
    done = 0
    for n in (33, 5, 1, 20, 1, 1, 9):
        logits = run.step(run.row("a", tokens[done : done + n]))[0]
        done += n
        check_near(oracle, tokens[:done], logits)
    assert done == 70


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 4), (32, 16), (64, 32)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_within_its_row_of_the_table(
    family: str,
    head_dim: int,
    block_size: int,
    oracles: Callable[..., Any],
    sequences: Callable[..., Any],
) -> None:
    """I1: against transformers in bfloat16, which rounds in other places; chunks, decodes, forks.

    The larger shapes are those for which CPUs have kernels of their own.
    """
    oracle = oracles(random_model(family, 3, head_dim=head_dim), "bfloat16")
    run = sequences(oracle.model.forward(dtype="bfloat16", block_size=block_size))
    tokens = prompt(75)
    done = 0
    for n in (40, 7, 17, *(1,) * 6):
        logits = run.step(run.row("a", tokens[done : done + n]))[0]
        done += n
        check_near(oracle, tokens[:done], logits, "bfloat16")
    children = [f"child{i}" for i in range(4)]
    copies = [copy for child in children for copy in run.fork("a", child)]
    rows = [run.row(child, prompt(1 + 6 * i, i)) for i, child in enumerate(children)]
    for child, logits in zip(children, run.step(*rows, copies=copies), strict=True):
        check_near(oracle, run.tokens[child], logits, "bfloat16")


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_lengths_around_block_edges_have_the_oracles_logits(
    block_size: int, plain: Any, sequences: Callable[..., Any]
) -> None:
    """D1: 15/16/17, 31/32/33 and 80 tokens over scattered blocks equal a dense run."""
    run = sequences(plain.model.forward(block_size=block_size, num_blocks=100))
    tokens = prompt(81)
    expected = plain.all(tokens)
    rows = [run.row(str(n), tokens[:n]) for n in LENGTHS]
    first = run.step(*rows)
    second = run.step(*(run.row(str(n), [tokens[n]]) for n in LENGTHS))
    for n, whole, step in zip(LENGTHS, first, second, strict=True):
        for ours, theirs in ((whole, expected[n - 1]), (step, expected[n])):
            assert float((ours - theirs).abs().max()) < TOLERANCES["float32"].logits
            assert float((ours - theirs).norm()) < 1e-4


def test_a_tree_of_forks_has_the_oracles_logits(
    oracles: Callable[..., Any], sequences: Callable[..., Any]
) -> None:
    """D6: all leaves of a three-level tree decode in one forward, each as if it ran alone."""
    for family in FAMILIES:
        oracle = oracles(random_model(family, 6, max_position_embeddings=1024))
        run = sequences(oracle.model.forward(num_blocks=600))
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
            check_near(oracle, run.tokens[leaf], logits)


GROWTH = st.lists(
    st.lists(
        st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([1, 1, 1, 2, 5, 18, 33])),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


@examples(12)
@given(first=st.integers(1, 40), steps=GROWTH, size=st.sampled_from([4, 8, 16]))
def test_random_trees_equal_linear_runs(
    plain: Any,
    sequences: Callable[..., Any],
    first: int,
    steps: list[list[tuple[int, bool, int]]],
    size: int,
) -> None:
    """D19: in each step some nodes grow and some fork and grow; each equals its linear run."""
    run = sequences(plain.model.forward(num_blocks=400, block_size=size), seed=first)
    run.step(run.row("n0", prompt(first)))
    for step in steps:
        rows, copies, grown = [], [], []
        for choice, forks, n in step:
            names = sorted(set(run.tokens) - set(grown))  # what grows in this step has no KV yet
            if not names:
                continue
            name = names[choice % len(names)]
            if forks:
                name, parent = f"n{len(run.tokens)}", name
                copies += run.fork(parent, name)
            grown.append(name)
            rows.append((name, n))
        made = [run.row(name, prompt(n, i)) for i, (name, n) in enumerate(rows)]
        for name, logits in zip(grown, run.step(*made, copies=copies), strict=True):
            check_near(plain, run.tokens[name], logits)


def test_the_text_model_of_one_that_also_sees_agrees_at_every_site(tmp_path: Path) -> None:
    """I1, I2: a tiny Gemma3ForConditionalGeneration, saved by transformers; its eyes are left out."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        name: v for name, v in random_model("gemma3_text").raw.items() if name != "architectures"
    }
    sight = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    made = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    )
    made.save_pretrained(tmp_path)
    forward = load(tmp_path, num_blocks=8)
    oracle = load_oracle(tmp_path, "float32")
    assert type(oracle) is Gemma3ForConditionalGeneration
    assert examine(forward, oracle, prompt(60), num_steps=4).first is None
