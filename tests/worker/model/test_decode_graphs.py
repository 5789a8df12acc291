"""Decode steps as graphs, over a device that records and replays on the CPU, and FlashInfer's emulation."""

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.quantized import with_kv_scales
from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.messages import Sampling
from mallee.protocol.model import WeightVersion
from mallee.worker.forward import Draw, ForwardBatch
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.model.graphs.decode import NO_GRAPHS, GraphOptions, padded_size, padding_row
from mallee.worker.model.runner import TorchForward
from support import flashinfer_emulator
from support.examples import examples
from support.forward_schedule import run_schedule
from support.late_device import LateDevice, LateGraphs
from support.recorded_graphs import RecordedGraphs
from support.splits import block_reads, watch_splits

FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_5_text")
BLOCK = 4
NUM_BLOCKS = 300
SAMPLED = Sampling(temperature=1.0)


def recorded(
    model: RandomModel, device: RecordedGraphs | None, *, max_rows: int = 8, **options: Any
) -> TorchForward:
    """A forward whose decode steps are replayed by `device`, over nonsense where a step wrote nothing."""
    max_nbytes = options.pop("max_nbytes", 1 << 30)
    graphs = GraphOptions(max_rows, max_nbytes, device) if device is not None else None
    return model.forward(
        **{"dtype": "bfloat16", "num_blocks": NUM_BLOCKS, "block_size": BLOCK, **options},
        flashinfer=flashinfer_emulator,
        graphs=graphs,
    )


def pool(forward: TorchForward) -> np.ndarray:
    """The bytes of all blocks that can be handed out, of every group of layers."""
    num = forward.num_blocks
    for span in row_spans(forward.spec.groups, num, BLOCK):
        num = span.rows(forward.spec.groups[span.group].num_blocks(forward.num_blocks, BLOCK)).start
    rows = np.zeros((num, forward.memory.block_nbytes), np.uint8)
    forward.memory.read(range(num), rows)
    return rows


def eager_steps(forward: TorchForward) -> dict[str, int]:
    """Their number by reason."""
    return dict(forward.graph_stats().num_eager)


def tiny(family: str = "llama", seed: int = 3, **overrides: Any) -> RandomModel:
    return random_model(family, seed, head_dim=64, **overrides)


SMALL = tiny(num_hidden_layers=1, max_position_embeddings=2048)


class Pair:
    """The same rows through graphs and through eager steps over memory of their own."""

    def __init__(self, model: RandomModel, sequences: Callable[..., Any], **options: Any) -> None:
        self.device = RecordedGraphs()
        self.graphed = recorded(model, self.device, **options)
        options.pop("max_rows", None)
        self.eager = recorded(model, None, **options)
        self.runs = [sequences(self.graphed), sequences(self.eager)]
        groups = self.graphed.spec.groups
        blocks = [group.num_blocks(NUM_BLOCKS, BLOCK) for group in groups] or [NUM_BLOCKS]
        self.padding = padding_row(groups, blocks)

    def step(
        self, new: Sequence[tuple[str, list[int]]], forks: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Fork, then run rows of new tokens by name; logits must be equal.

        To the bit beside rows of padding: without these other plans, and other products, round otherwise.
        """
        found = []
        for run, forward in zip(self.runs, (self.graphed, self.eager), strict=True):
            copies = [copy for parent, child in forks for copy in run.fork(parent, child)]
            rows = [run.row(name, tokens) for name, tokens in new]
            is_decode = all(len(tokens) == 1 for _, tokens in new)
            if is_decode and forward is self.eager and len(rows) <= 8:
                rows += [self.padding] * (padded_size(len(rows)) - len(rows))
            logits = forward.forward(ForwardBatch(copies, rows))
            found.append(torch.stack([forward.keep(each) for each in logits[: len(new)]]))
        assert torch.equal(*found), float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, {}),
        ({"num_attention_heads": 8}, {}),
        ({}, {"is_deterministic": True}),
        ({}, {"kv_dtype": "fp8"}),
    ],
    ids=["narrow groups", "wide groups", "deterministic", "fp8"],
)
def test_on_a_device_that_is_late_no_step_waits_for_pageable_memory_or_overwrites_a_copy(
    sequences: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    overrides: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """I5, part, I13, part: prompts, chunks, forks and decodes, eager and as graphs.

    These are recorded on another stream, as CUDA does.
    """
    model = tiny(**overrides)
    expected = run_schedule(sequences(recorded(model, RecordedGraphs(), **options)), 5)
    late = LateDevice()
    late.install(monkeypatch)
    found = run_schedule(sequences(recorded(model, LateGraphs(late), **options)), 5)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert late.num_waits > 10


def test_steps_that_do_not_wait_for_their_plans_copies_are_refused(
    sequences: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrapper's, and that of tables which steps of all sizes take turns with."""
    late = LateDevice()
    late.install(monkeypatch)
    monkeypatch.setattr("mallee.worker.model.attention.flashinfer.Mark.wait", lambda mark: None)
    with pytest.raises(AssertionError, match="pinned memory is overwritten"):
        run_schedule(sequences(recorded(SMALL, None)), 5)
    late = LateDevice()
    late.install(monkeypatch)
    monkeypatch.setattr("mallee.worker.model.graphs.tables.Mark.wait", lambda mark: None)
    with pytest.raises(AssertionError, match="pinned memory is overwritten"):
        recorded(SMALL, LateGraphs(late))


@pytest.mark.slow
@examples(24)
@given(st.data())
def test_any_steps_are_those_of_eager_ones(
    sequences: Callable[..., Any], data: st.DataObject
) -> None:
    """I13, part, F3, part: sequences begin, fork, decode together in any number, end, and begin again.

    Nothing is captured after the start.
    """
    family = data.draw(st.sampled_from(FAMILIES))
    pair = Pair(
        MODELS[family], sequences, max_rows=8, kv_dtype=data.draw(st.sampled_from(["auto", "fp8"]))
    )
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    names: list[str] = []
    for step in range(data.draw(st.integers(2, 8))):
        kind = data.draw(st.sampled_from(["prompt", "fork", "decode", "decode", "mixed"]))
        name = f"s{step}"
        if kind == "prompt" or not names:
            pair.step([(name, rng.integers(0, 128, int(rng.integers(1, 40))).tolist())])
            names.append(name)
        elif kind == "fork":
            pair.step([(name, [int(rng.integers(128))])], forks=[(str(rng.choice(names)), name)])
            names.append(name)
        else:
            num = data.draw(st.integers(1, len(names)))
            chosen = rng.permutation(names)[:num].tolist()
            size = 1 if kind == "decode" else 2
            pair.step([(each, rng.integers(0, 128, size).tolist()) for each in chosen])
    assert pair.device.num_captures == 4
    assert (pool(pair.graphed) == pool(pair.eager)).all(), "padding wrote to a block of the pool"


MODELS = {family: tiny(family) for family in FAMILIES}


def test_tokens_that_only_the_device_knows_go_into_a_replay(sequences: Callable[..., Any]) -> None:
    """I13, part, I5, part: three rows of drawn tokens in the graph of four; logits outlive later replays.

    Against steps without padding, by rounding alone.
    """
    forwards = [recorded(tiny(), device) for device in (RecordedGraphs(), None)]
    found = []
    for forward in forwards:
        run = sequences(forward)
        rows = [run.row(f"r{i}", [5 + i]) for i in range(3)]
        drawing = forward.launch_draws(
            [Draw(each, SAMPLED, i, 1) for i, each in enumerate(run.step(*rows))]
        )
        later = [run.row(f"r{i}", [0]) for i in (2, 0, 1)]
        first = forward.forward_drawn(ForwardBatch((), later), drawing, [2, 0, 1])
        forward.forward(ForwardBatch((), [run.row("r0", [99])]))
        found.append(torch.stack([*first]))
        named = [run.tokens[f"r{i}"] for i in range(3)]
        assert named == [[5, 0, 99], [6, 0], [7, 0]]
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
    assert forwards[0].graph_stats().num_replays == 3


@pytest.mark.parametrize(("most", "sizes"), [(1, (1,)), (3, (1, 2, 4)), (8, (1, 2, 4, 8))])
def test_the_graph_of_a_step_is_the_smallest_that_holds_it(
    most: int, sizes: tuple[int, ...], sequences: Callable[..., Any]
) -> None:
    """I13, part: eager are steps of more rows than the largest has, of several tokens, and watched ones."""
    device = RecordedGraphs()
    forward = recorded(SMALL, device, max_rows=most)
    run = sequences(forward)
    assert forward.graph_stats().sizes == sizes
    for num in range(1, 11):
        device.replayed.clear()
        run.step(*(run.row(f"{num}.{i}", [i]) for i in range(num)))
        holding = [size for size in sizes if size >= num]  # the largest was recorded first
        assert device.replayed == [len(holding) - 1] * bool(holding)
    run.step(run.row("a", [1, 2]))
    forward.decoder.tap = lambda site, layer, values: None
    run.step(run.row("a", [3]))
    num_replayed = sizes[-1]
    assert eager_steps(forward) == {"tokens": 1, "rows": 10 - num_replayed, "watched": 1}
    assert forward.graph_stats().num_replays == num_replayed


@pytest.mark.parametrize(
    ("long_s", "shared_s", "least"),
    [(60.0, 3.0, 274), (1.272, 5.424, 277), (1.272, 5.44, 278)],
)
def test_rows_share_what_they_read_where_that_saves_more_than_a_graph(
    long_s: float, shared_s: float, least: int, sequences: Callable[..., Any]
) -> None:
    """I13, part, D7, part: what a graph saves, against an eager step with its prefix, counts in reads.

    A read takes a millisecond in the last two cases; of the trial's prefix, 274 are in the eager step. At
    least 4,096 blocks must be spared in any case, by 16 rows 15 times their common ones.
    """
    device = RecordedGraphs(times=lambda n: (1.0, 3.0, long_s, shared_s))
    forward = recorded(SMALL, device, max_rows=16)
    assert not pool(forward).any(), "a trial wrote to a block of the pool"
    run, splits = sequences(forward), watch_splits(forward)
    names = [f"r{i}" for i in range(16)]
    for num_blocks, num_shared in ((least - 1, 0), (least, 1)):
        run.step(run.row("p", [3] * (BLOCK * num_blocks - len(run.tokens.get("p", ())))))
        for name in names:
            run.fork("p", name)
        splits.clear()
        run.step(*(run.row(name, [1]) for name in names))
        assert eager_steps(forward).get("shared", 0) == num_shared
        assert [block_reads(split) for split in splits] == [least + 16] * num_shared
        run.free += [run.tables[name].pop() for name in names]


@pytest.mark.parametrize("times", [(1.0, 3.0, 0.5, 3.0), (1.0, 3.0, 1.001, 3.0)])
def test_rows_stay_in_a_graph_where_reads_cost_less_than_launches(
    times: tuple[float, ...], sequences: Callable[..., Any]
) -> None:
    """I13, part: reads that take no time to speak of, and ones of which no step has enough to spare."""
    forward = recorded(SMALL, RecordedGraphs(times=lambda n: times), max_rows=16)
    run = sequences(forward)
    run.step(run.row("p", [3] * (BLOCK * 280)))
    for i in range(16):
        run.fork("p", f"r{i}")
    run.step(*(run.row(f"r{i}", [1]) for i in range(16)))
    assert "shared" not in eager_steps(forward)
    assert forward.graph_stats().num_replays == 1


def test_sizes_that_fail_or_do_not_pay_are_off_and_the_others_serve(
    sequences: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """I13, part: of 16 rows too large, of 8 no faster, of 2 without memory; the log has both numbers."""
    caplog.set_level(logging.INFO)

    def refuse(number: int) -> None:
        if number == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    costs = [900 << 20, 40 << 20, 2 << 20, 0, 1 << 20]
    times = {0: (9.0, 9.0), 1: (4.0, 4.0), 2: (2.0, 3.0), 4: (1.0, 3.0)}
    device = RecordedGraphs(
        refuse=refuse,
        graph_nbytes=lambda number: costs[number],
        times=lambda n: tuple(t / 1000 for t in (*times[n], *times[n])),
    )
    forward = recorded(SMALL, device, max_rows=16, max_nbytes=512 << 20)
    assert forward.graph_stats().sizes == (1, 4)
    assert forward.memory_stats().graphs == forward.graph_stats().nbytes == 3 << 20
    assert device.shares == [False, False, False, True], "what is gone has no memory to share"
    for told in (
        "no CUDA graph for 16 rows: it needs 900 MiB, the budget has 512 MiB",
        "steps of 8 rows run without a CUDA graph: it is no faster (4.00 ms, eager 4.00)",
        "4 rows 2 MiB (2.00 ms, eager 3.00)",
        "steps of 2 rows run without a CUDA graph: CUDA out of memory.",
    ):
        assert told in caplog.text
    run = sequences(forward)
    for num in (1, 2, 3):
        run.step(*(run.row(f"{num}.{i}", [i]) for i in range(num)))
    assert eager_steps(forward) == {"off": 1}


@pytest.mark.parametrize("num_blocks", [1, 3, 5])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_trial_fits_any_memory(family: str, num_blocks: int) -> None:
    """I13, part: fewer blocks than the rows of a graph. Padding has a block that no pool knows."""
    forward = recorded(tiny(family), RecordedGraphs(), num_blocks=num_blocks)
    assert forward.graph_stats().sizes == (1, 2, 4, 8)
    forward.check()
    assert not pool(forward).any()


def test_recorded_steps_serve_on_with_other_weights(
    sequences: Callable[..., Any], tmp_path: Path
) -> None:
    """I13, part: they read what is at the same addresses now; nothing is captured, or measured, again."""
    for seed, name in enumerate("ab"):
        tiny(seed=seed).save(tmp_path / name)
    device = RecordedGraphs()
    forward = recorded(tiny(seed=0), device, max_rows=4)
    stats, timed = forward.graph_stats(), device.num_timed
    logits = []
    for each in (forward, forward, recorded(tiny(seed=1), None)):
        run = sequences(each)
        run.step(run.row("a", [1, 2, 3]), run.row("b", [1]))
        logits.append(torch.stack(run.step(run.row("a", [4]), run.row("b", [5]))))
        if len(logits) == 1:
            forward.update(forward.prepare_update(tmp_path / "b", WeightVersion(1, "b")))
            forward.rename(WeightVersion(2, "c"))
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[1])
    after = forward.graph_stats()
    assert after.num_replays == 2
    assert (after.num_captures, after.sizes, after.nbytes) == (3, stats.sizes, stats.nbytes)
    assert (device.num_captures, device.num_timed) == (3, timed)


def test_scales_of_kv_are_a_part_of_recorded_steps(
    sequences: Callable[..., Any], tmp_path: Path
) -> None:
    """I13, part: weights that bring other ones are recorded again, and the old graphs go first."""
    for name, factor in (("same", 0.02), ("other", 0.3)):
        scales = [(factor, factor / 3)] * 2
        with_kv_scales(tiny(seed=5), scales).save(tmp_path / name)
    device = RecordedGraphs()
    model = with_kv_scales(tiny(seed=0), [(0.02, 0.02 / 3)] * 2)
    forward = recorded(model, device, max_rows=2, kv_dtype="fp8")
    assert device.num_captures == 2
    gc.collect()
    gc.disable()
    try:
        for number, (name, num_captures) in enumerate((("same", 2), ("other", 4)), 1):
            forward.update(forward.prepare_update(tmp_path / name, WeightVersion(number, name)))
            assert (device.num_captures, len(device.alive())) == (num_captures, 2)
    finally:
        gc.enable()
    run = sequences(forward)
    run.step(run.row("a", [1, 2, 3]))
    run.step(run.row("a", [4]))  # fails where a recorded number is another now
    assert forward.graph_stats().num_replays == 1


def test_there_are_none_without_flashinfer_in_deterministic_mode_or_of_experts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I13, part: and the log says so. On a CPU there is nothing to say."""
    caplog.set_level(logging.INFO)
    device = RecordedGraphs()
    for options in ({"is_deterministic": True}, {"uses_kernels": False}):
        assert recorded(SMALL, device, **options).graph_stats() == NO_GRAPHS
        said = "no CUDA graphs: they need FlashInfer's attention, and not engine.determ"
        assert said in caplog.text
        caplog.clear()
    assert recorded(tiny("qwen3_next"), device).graph_stats() == NO_GRAPHS
    assert "no CUDA graphs: the host waits for how many tokens chose each expert" in caplog.text
    caplog.clear()
    assert device.num_captures == 0
    assert SMALL.forward(graphs=GraphOptions()).graph_stats() == NO_GRAPHS
    assert not caplog.records
