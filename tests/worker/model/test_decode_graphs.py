"""Decode steps as graphs, over a device that records and replays on the CPU, and FlashInfer's emulation."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import Sampling
from mallee.protocol.model import WeightVersion
from mallee.testing.random_model import RandomModel, random_model
from mallee.worker.forward import Draw, ForwardBatch, Row
from mallee.worker.model.attention.flashinfer import FlashInferAttention
from mallee.worker.model.graphs.decode import GraphOptions, padded_size, padding_row
from mallee.worker.model.runner import TorchForward
from support import flashinfer_emulator
from support.examples import examples
from support.recorded_graphs import RecordedGraphs

FAMILIES = ("llama", "qwen3", "gemma3_text")
BLOCK = 4
SAMPLED = Sampling(temperature=1.0)


def recorded(
    model: RandomModel, device: RecordedGraphs | None, *, max_rows: int = 8, **options: Any
) -> TorchForward:
    """A forward whose decode steps are replayed by `device`, over nonsense where a step wrote nothing."""
    max_nbytes = options.pop("max_nbytes", 1 << 30)
    graphs = GraphOptions(max_rows, max_nbytes, device) if device is not None else None
    forward = model.forward(
        **{"dtype": "bfloat16", "num_blocks": 300, "block_size": BLOCK, **options},
        flashinfer=flashinfer_emulator,
        graphs=graphs,
    )
    if device is not None and forward._graphs is not None:
        device.poisoned = places(forward)
    return forward


def places(forward: TorchForward) -> list[torch.Tensor]:
    """All integers that a recorded step reads, but the order of its outputs."""
    assert forward._graphs is not None
    found = []
    for graph in forward._graphs._graphs.values():
        own = graph._places
        found += [own.tokens, own.positions, own.slots, *own.window_slots.values()]
        for tables in graph._decode._tables.values():
            found += [tables.indptr, tables.indices, tables.last_page_len]
    return found


def tiny(family: str = "llama", seed: int = 3, **overrides: Any) -> RandomModel:
    return random_model(family, seed, head_dim=64, **overrides)


class Pair:
    """The same rows through graphs and through eager steps over memory of their own."""

    def __init__(self, model: RandomModel, sequences: Callable[..., Any], **options: Any) -> None:
        self.device = RecordedGraphs()
        self.graphed = recorded(model, self.device, **options)
        options.pop("max_rows", None)
        self.eager = recorded(model, None, **options)
        self.runs = [sequences(self.graphed), sequences(self.eager)]
        blocks = [group.num_blocks(300, BLOCK) for group in self.graphed.spec.groups] or [300]
        self.padding = padding_row(blocks)

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

    def check_memory(self) -> None:
        """KV that any sequence has filled is the same, and nothing else was written beside padding."""
        for own, theirs in zip(self.graphed._memories, self.eager._memories, strict=True):
            assert torch.equal(
                own[:, :-BLOCK].view(torch.uint8), theirs[:, :-BLOCK].view(torch.uint8)
            )


@pytest.mark.slow
@examples(24)
@given(st.data())
def test_any_steps_are_those_of_eager_ones(
    sequences: Callable[..., Any], data: st.DataObject
) -> None:
    """I13, part: sequences begin, fork, decode together in any number, end, and begin again."""
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
    pair.check_memory()


MODELS = {family: tiny(family) for family in FAMILIES}


def test_without_padding_logits_differ_by_rounding_alone(sequences: Callable[..., Any]) -> None:
    """I13, part: five rows in the graph of eight, against five rows."""
    forwards = [recorded(tiny(), RecordedGraphs()), recorded(tiny(), None)]
    found = []
    for forward in forwards:
        run = sequences(forward)
        names = [f"r{i}" for i in range(5)]
        run.step(*(run.row(name, list(range(3 + 5 * i))) for i, name in enumerate(names)))
        found.append(torch.stack(run.step(*(run.row(name, [9]) for name in names))))
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)


def test_tokens_that_only_the_device_knows_go_into_a_replay(sequences: Callable[..., Any]) -> None:
    """I13, part, I5, part: three rows of drawn tokens in the graph of four; logits outlive later replays."""
    forwards = [recorded(tiny(), device) for device in (RecordedGraphs(), None)]
    found = []
    for forward in forwards:
        run = sequences(forward)
        rows = [run.row(f"r{i}", [5 + i]) for i in range(3)]
        drawing = forward.launch_draws(
            [Draw(each, SAMPLED, i, 1) for i, each in enumerate(run.step(*rows))]
        )
        later = [run.row(f"r{i}", [0]) for i in (2, 0, 1)]
        first = forward.forward_drawn(later, drawing, [2, 0, 1])
        forward.forward(ForwardBatch((), [run.row("r0", [99])]))
        found.append(torch.stack([*first]))
        named = [run.tokens[f"r{i}"] for i in range(3)]
        assert named == [[5, 0, 99], [6, 0], [7, 0]]
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
    assert forwards[0].stats().graphs.num_replays == 3


@pytest.mark.slow
def test_a_thousand_forks_capture_nothing(sequences: Callable[..., Any]) -> None:
    """I13, part, F3, part: each decodes its first token beside others, by graphs made at the start."""
    device = RecordedGraphs()
    forward = recorded(tiny(num_hidden_layers=1), device, max_rows=8, num_blocks=60)
    run = sequences(forward)
    run.step(run.row("parent", list(range(19))))
    assert device.num_captures == 4
    num_forks = num_steps = 0
    while num_forks < 1000:
        children = [f"child{num_forks + i}" for i in range(1 + num_steps % 8)]
        copies = [copy for child in children for copy in run.fork("parent", child)]
        run.step(*(run.row(child, [num_steps % 128]) for child in children), copies=copies)
        for child in children:
            run.free += set(run.tables.pop(child)) - set(run.tables["parent"])
        num_forks, num_steps = num_forks + len(children), num_steps + 1
    stats = forward.stats().graphs
    assert (device.num_captures, stats.num_captures) == (4, 4)
    assert stats.num_replays == num_steps == device.num_replays - 8, "each was timed twice"
    assert dict(stats.num_eager) == {"tokens": 1}


def test_the_graph_of_a_step_is_the_smallest_that_holds_it() -> None:
    """I13, part: by brute force; beyond the largest steps are eager."""
    for num in range(1, 300):
        assert padded_size(num) == min(1 << i for i in range(10) if 1 << i >= num)
    for most, sizes in ((1, (1,)), (3, (1, 2, 4)), (8, (1, 2, 4, 8))):
        forward = recorded(tiny(num_hidden_layers=1), RecordedGraphs(), max_rows=most)
        assert forward.stats().graphs.sizes == sizes
        assert forward._graphs is not None
        for num in range(1, 11):
            rows = [Row(np.zeros(1, np.uint32), 0, np.array([i], np.int32), 1) for i in range(num)]
            graph = forward._graphs.choose(rows, is_shared=True)
            expected = min((size for size in sizes if size >= num), default=None)
            assert (graph and graph.num_rows) == expected


def test_eager_steps_are_counted_by_reason(sequences: Callable[..., Any]) -> None:
    """I13, part: rows of several tokens, too many rows, a shared prefix that pays, a step that is watched."""
    forward = recorded(tiny(num_hidden_layers=1), RecordedGraphs(), max_rows=2)
    assert isinstance(forward._attention, FlashInferAttention)
    run = sequences(forward)
    run.step(run.row("a", list(range(40))))
    for i in range(3):
        run.step(run.row(f"b{i}", [i]), copies=run.fork("a", f"b{i}"))
    run.step(*(run.row(f"b{i}", [1]) for i in range(3)))
    run.step(*(run.row(f"b{i}", [1]) for i in range(2)))
    assert dict(forward.stats().graphs.num_eager) == {"tokens": 1, "rows": 1}
    forward._attention.min_saving = 10
    before = forward.stats()
    run.step(*(run.row(f"b{i}", [1]) for i in range(2)))
    after = forward.stats()
    reads, flat = (
        after.num_key_reads - before.num_key_reads,
        after.num_flat_key_reads - before.num_flat_key_reads,
    )
    assert reads == flat - 40
    forward._attention.min_saving = 11  # their ten blocks spare less
    run.step(*(run.row(f"b{i}", [1]) for i in range(2)))
    forward._attention.min_saving = 1
    forward.shares_reads = False
    run.step(*(run.row(f"b{i}", [1]) for i in range(2)))
    forward.decoder.tap = lambda site, layer, values: None
    run.step(run.row("a", [2]))
    stats = forward.stats().graphs
    assert dict(stats.num_eager) == {"tokens": 1, "rows": 1, "shared": 1, "watched": 1}
    assert stats.num_replays == 3 + 1 + 2


def test_a_size_without_memory_is_off_and_the_others_serve(
    sequences: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """I13, part: the device refuses the third graph; those before it are as they were."""
    caplog.set_level(logging.INFO)

    def refuse(number: int) -> None:
        if number == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    forward = recorded(tiny(num_hidden_layers=1), RecordedGraphs(refuse=refuse))
    assert forward.stats().graphs.sizes == (1, 4, 8)
    assert "steps of 2 rows run without a CUDA graph: CUDA out of memory." in caplog.text
    run = sequences(forward)
    for num in (1, 2, 3):
        run.step(*(run.row(f"{num}.{i}", [i]) for i in range(num)))
    assert dict(forward.stats().graphs.num_eager) == {"off": 1}


def test_sizes_beyond_the_budget_are_left_out_with_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I13, part: the largest takes most; what it leaves out has room without it."""
    costs = [900 << 20, 40 << 20, 0, 2 << 20, 1 << 20]
    own = RecordedGraphs(graph_nbytes=lambda number: costs[number])
    forward = recorded(tiny(num_hidden_layers=1), own, max_rows=16, max_nbytes=512 << 20)
    assert forward.stats().graphs.sizes == (1, 2, 4, 8)
    assert "no CUDA graph for 16 rows: it needs 900 MiB, the budget has 512 MiB" in caplog.text
    assert forward.memory_stats().graphs == forward.stats().graphs.nbytes == 43 << 20
    assert own.shares == [False, False, True, True, True], "what is gone has no memory to share"


def test_a_graph_that_is_no_faster_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """I13, part: sizes are timed against eager steps, the largest first."""
    caplog.set_level(logging.INFO)
    times = [(4.0, 4.0), (2.0, 3.0), (1.0, 3.0), (0.9, 0.5)]
    device = RecordedGraphs(times=tuple(t / 1000 for a, b in times for t in (a, b, a)))
    forward = recorded(tiny(num_hidden_layers=1), device)
    assert forward.stats().graphs.sizes == (2, 4)
    told = "steps of 8 rows run without a CUDA graph: it is no faster (4.00 ms, eager 4.00)"
    assert told in caplog.text
    assert "4 rows 1 MiB (2.00 ms, eager 3.00)" in caplog.text
    assert "steps of 1 rows run without" in caplog.text
    assert device.num_timed == 12


@pytest.mark.parametrize(("long_s", "gain"), [(60.0, 254 * 2 / 59), (2.0, 508), (0.5, 0)])
def test_rows_share_what_they_read_where_that_saves_more_than_a_graph(
    long_s: float, gain: float, sequences: Callable[..., Any]
) -> None:
    """I13, part, D7, part: a graph saves two seconds here; in reads that is by the trial of longer rows."""
    model = tiny(num_hidden_layers=1)
    forward = recorded(model, RecordedGraphs(times=(1.0, 3.0, long_s)), max_rows=2)
    assert forward._graphs is not None
    assert forward._graphs.gains[2] == pytest.approx(gain)
    assert isinstance(forward._attention, FlashInferAttention)
    forward._attention.min_saving = 1
    for memory in forward._memories:
        assert not memory[:, :-BLOCK].any(), "a trial wrote to a block of the pool"
    run = sequences(forward)
    for num_blocks in (1, 8, 9, 20):
        parent = f"p{num_blocks}"
        run.step(run.row(parent, [3] * (BLOCK * num_blocks)))
        names = [f"{parent}.{i}" for i in range(2)]
        for name in names:
            run.fork(parent, name)
        before = dict(forward.stats().graphs.num_eager).get("shared", 0)
        run.step(*(run.row(name, [1]) for name in names))
        after = dict(forward.stats().graphs.num_eager).get("shared", 0)
        assert after - before == (num_blocks > gain)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [1, 3, 5])
def test_a_trial_fits_any_memory(num_blocks: int) -> None:
    """I13, part: fewer blocks than the rows of a graph."""
    for family in FAMILIES:
        forward = recorded(tiny(family), RecordedGraphs(), num_blocks=num_blocks)
        assert forward.stats().graphs.sizes == (1, 2, 4, 8)
        for memory in forward._memories:
            assert not memory[:, :-BLOCK].any()


@pytest.mark.slow
def test_other_weights_are_recorded_anew_and_the_old_graphs_go(
    sequences: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13, part: the sizes that won, not measured again; a new name for the same weights records nothing."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        tiny(seed=seed).save(folder)
    device = RecordedGraphs(times=(2.0, 1.0, 2.0, 1.0, 2.0, 1.0))
    first = recorded(tiny(seed=0), device, max_rows=4)
    sizes = first.stats().graphs.sizes
    assert sizes == (2,)
    timed, captured = device.num_timed, device.num_captures

    def taken() -> int:
        raise AssertionError("the engine that serves meanwhile takes memory, too")

    monkeypatch.setattr(device, "taken", taken)
    second = first.with_weights(folders[1], WeightVersion(1, "b"))
    assert (device.num_timed, device.num_captures) == (timed, captured + 1)
    assert second.stats().graphs.num_captures == 1
    assert second.stats().graphs.nbytes == first.stats().graphs.nbytes > 0
    device.poisoned = places(first) + places(second)
    logits = []
    for forward in (first, second, recorded(tiny(seed=1), None)):
        run = sequences(forward)
        run.step(run.row("a", [1, 2, 3]), run.row("b", [1]))
        logits.append(torch.stack(run.step(run.row("a", [4]), run.row("b", [5]))))
    assert torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[1])
    assert second.renamed(WeightVersion(2, "c")).stats().graphs.num_captures == 1
    gc.collect()
    gc.disable()
    try:
        assert first._graphs is not None
        graph = weakref.ref(first._graphs._graphs[2]._graph)
        device.poisoned = []
        del first, run, forward
        assert graph() is None, "graphs are freed with their model, at once"
    finally:
        gc.enable()


def test_there_are_none_without_flashinfer_or_in_deterministic_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I13, part: and the log says so. On a CPU there is nothing to say."""
    caplog.set_level(logging.INFO)
    device = RecordedGraphs()
    assert recorded(tiny(), device, is_deterministic=True)._graphs is None
    assert "no CUDA graphs: they need FlashInfer's attention, and not engine.determ" in caplog.text
    caplog.clear()
    assert recorded(tiny(), device, uses_kernels=False)._graphs is None
    assert "no CUDA graphs" in caplog.text
    assert device.num_captures == 0
    caplog.clear()
    assert tiny().forward(graphs=GraphOptions())._graphs is None
    assert not caplog.records


def test_padding_has_a_block_that_no_pool_knows(sequences: Callable[..., Any]) -> None:
    """I13, part: beside those that are counted and given to tiers, in every group of layers."""
    for family, num_groups in (("llama", 1), ("gemma3_text", 2)):
        forward = recorded(tiny(family), RecordedGraphs())
        groups = forward.spec.groups
        blocks = [group.num_blocks(300, BLOCK) for group in groups] or [300]
        assert len(blocks) == num_groups
        assert [memory.shape[1] for memory in forward._memories] == [
            (n + 1) * BLOCK for n in blocks
        ]
        forward.check()
        run = sequences(forward)
        run.step(*(run.row(f"{i}", [i]) for i in range(3)))
        for memory in forward._memories:
            assert memory[:, -BLOCK].any()
            assert not memory[:, -BLOCK + 1 :].any()
