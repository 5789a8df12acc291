"""The states of recurrent layers as a forward pass leaves them: cuts, turns, refolds, slots, bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bench.doubles.random_model import random_model
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.model.runner import TorchForward
from mallee.worker.model.states import FOLD

FAMILY = "qwen3_5_text"


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128, n)]


def state(run: Any, name: str) -> bytes:
    """All bytes of the state of a sequence, as tiers and peers get them."""
    forward: TorchForward = run.forward
    (span,) = row_spans(forward.spec.groups, forward.num_blocks, forward.block_size)
    rows = forward.memory.new_rows(span.per_block)
    forward.memory.read(list(span.rows(run.states[name])), rows)
    return bytes(rows.tobytes()[: forward.spec.sides[0].nbytes])


def folded(run: Any, name: str, tokens: list[int], cuts: list[int]) -> bytes:
    """The state after `tokens`, cut at these places."""
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        run.step(run.row(name, tokens[begin:end]))
    return state(run, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_at_whole_folds_leave_the_bits_of_one_pass_and_others_do_not(
    dtype: str, sequences: Callable[..., Any]
) -> None:
    """F12: a layer that gets equal inputs has the cold prefill's bits after chunks that end with a fold.

    After others the state is equal but for rounding, as it is in layers behind attention after any.
    """
    tokens = prompt(3 * FOLD)
    run = sequences(random_model(FAMILY, 3).forward(dtype=dtype, num_blocks=500, block_size=4))
    whole = folded(run, "whole", tokens, [])
    aligned = folded(run, "aligned", tokens, [FOLD, 2 * FOLD])
    other = folded(run, "other", tokens, [3 * FOLD - 16])
    first = run.forward.decoder.config.delta.matrix_nbytes
    assert aligned[:first] == whole[:first] != other[:first]
    for raw in (aligned, other):
        near, exact = (np.frombuffer(each[: 2 * first], np.float32) for each in (raw, whole))
        assert np.allclose(near, exact, atol={"float32": 1e-5, "bfloat16": 0.1}[dtype])


def test_rows_beside_one_another_fold_as_alone(sequences: Callable[..., Any]) -> None:
    """F11, part: rows of one token, of some, and of several folds in one step, and padding of turns."""
    sizes = {"a": 1, "b": 2 * FOLD + 3, "c": 7, "d": FOLD, "e": 1, "f": FOLD + 1}
    runs = [sequences(random_model(FAMILY, 3).forward(num_blocks=500)) for _ in range(2)]
    for run in runs:
        for seed, name in enumerate(sizes):
            run.step(run.row(name, prompt(5 + seed, seed)))
    together, apart = runs
    tokens = {name: prompt(n, 10 + n) for name, n in sizes.items()}
    found = together.step(*(together.row(name, tokens[name]) for name in sizes))
    for name, logits in zip(sizes, found, strict=True):
        (alone,) = apart.step(apart.row(name, tokens[name]))
        assert torch.allclose(logits, alone, atol=1e-4)
        ours, theirs = (np.frombuffer(state(run, name), np.float32) for run in runs)
        assert np.allclose(ours, theirs, atol=1e-4)


def test_short_rows_are_not_filled_up_to_the_turns_of_long_ones(
    sequences: Callable[..., Any],
) -> None:
    run = sequences(random_model(FAMILY, 3).forward(num_blocks=500))
    run.step(*(run.row(str(i), prompt(n)) for i, n in enumerate((3, FOLD + 1, 1, 2, 4))))
    shapes = [(turns.rows.tolist(), turns.tokens.shape) for turns in run.forward._folds.long]
    assert shapes == [([1], (2, FOLD)), ([4, 0, 3], (3, 4))]


def test_what_was_refused_of_a_draft_is_taken_out_of_the_state(
    sequences: Callable[..., Any],
) -> None:
    """F27, part: refolded rows go on as if they had computed the accepted tokens alone."""
    run = sequences(random_model(FAMILY, 3).forward(num_blocks=500))
    names = ("a", "b", "c")
    for i, name in enumerate(names):
        run.step(run.row(name, prompt(20 + i, i)))
    before = dict(run.states)
    drafts = {name: prompt(6, 7 + i) for i, name in enumerate(names)}
    rows = {name: run.row(name, drafts[name], num_logits=6) for name in names}
    chunk = run.row("d", prompt(30))
    run.step(rows["a"], chunk, rows["b"], rows["c"])
    run.forward.refold([rows["a"], rows["c"]], [2, 5])
    for name, count in (("a", 2), ("b", 6), ("c", 5)):
        other = f"{name} alone"
        run.states[other], run.tables[other] = before[name], list(run.tables[name])
        run.tokens[other] = run.tokens[name][:-6]
        run.step(run.row(other, drafts[name][:count]))
        ours, theirs = (np.frombuffer(state(run, each), np.float32) for each in (name, other))
        assert np.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("lost", ["matrices", "inputs", "keys"])
def test_a_text_goes_on_wrong_without_any_part_of_what_a_capsule_holds(
    lost: str, sequences: Callable[..., Any]
) -> None:
    """F11, F1, part: matrices, inputs of the convolution, and KV are each needed from the next token on."""
    run = sequences(random_model(FAMILY, 3).forward(num_blocks=500))
    tokens = prompt(40)
    run.step(run.row("a", tokens))
    forward = run.forward
    copies = run.fork("a", "b")
    (expected,) = run.step(run.row("b", [5]), copies=copies)
    if lost == "keys":
        forward.memory.write([run.tables["a"][3]], forward.memory.new_rows(1))
    for index in forward.decoder.config.recurrent_layers:
        if lost != "keys":
            getattr(forward._layers[index], lost)[run.states["a"]] = 0
    (found,) = run.step(run.row("a", [5]))
    assert float((found - expected).abs().max()) > 0.05


def test_no_slot_is_read_before_it_was_written(sequences: Callable[..., Any]) -> None:
    """F11, part: a text without tokens begins at zero, whatever its slots held, and padding touches none."""
    run = sequences(random_model(FAMILY, 3).forward(num_blocks=100))
    (expected,) = run.step(run.row("a", prompt(9)))
    run.forward._memories[-1][:-1].fill_(0xFF)  # not a number, in all slots but that of zeros
    (found,) = run.step(run.row("b", prompt(9)))
    assert torch.equal(found, expected)
    assert not run.forward._memories[-1][-1].any()
