"""Forks on a real (tiny, random) Llama: every branch equals a linear rerun on an engine of its own."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.ids import Incarnation, WorkerId, branch_seed
from mallee.protocol.messages import (
    Fork,
    Generate,
    Limits,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.testing.random_model import random_model
from mallee.worker.engine import Engine
from mallee.worker.passes import ForwardPasses
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive

MODEL = random_model("llama", 3)
VOCAB = MODEL.config.vocab_size


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # many times quicker for tiny matrices on busy cores
    yield
    torch.set_num_threads(before)


def make_engine(num_blocks: int = 96, chunk: int = 16) -> Engine:
    return Engine(
        MODEL.forward(num_blocks=num_blocks, block_size=4),
        config=EngineConfig(SchedulerConfig(chunk, 32), 32),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )


def rerun(text: list[int], n: int, sampling: Sampling, seed: int) -> list[int]:
    """The same tokens on a fresh engine, alone, without any fork."""
    engine = make_engine(chunk=512)
    alone = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
    engine.submit(Generate("r", pack_tokens(text), Limits(n, ignore_eos=True), alone), "g")
    return drive(engine)["r", 0][0]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 1 << 20),
    st.sampled_from(
        [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=20, top_p=0.9)]
    ),
)
def test_every_branch_of_a_random_tree_equals_a_linear_rerun(
    shape: int, sampling: Sampling
) -> None:
    """D19, D3: random trees three levels deep, greedy and sampled, on a real attention path."""
    rng = random.Random(shape)
    engine = make_engine()
    text = [rng.randrange(VOCAB) for _ in range(rng.randint(3, 22))]
    engine.submit(Prefill("p", pack_tokens(text)), "g")
    drive(engine)
    frontier = [("p.0", text)]
    compared = 0
    for level in range(3):
        capsule, before = rng.choice(frontier)
        suffixes = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
            for _ in range(rng.randint(2, 4))
        ]
        n, seed = rng.randint(1, 7), rng.randrange(1 << 64)
        drawn = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        packed = tuple(pack_tokens(s) for s in suffixes)
        engine.submit(Fork(f"f{level}", capsule, packed, Limits(n, ignore_eos=True), drawn), "g")
        answers = drive(engine)
        frontier = []
        for i, suffix in enumerate(suffixes):
            tokens, last = answers[f"f{level}", i]
            assert tokens == rerun(before + suffix, n, sampling, branch_seed(seed, i))
            frontier.append((last.capsule, before + suffix + tokens))
            compared += n
    assert compared > 5


def test_children_do_not_touch_their_parents_kv_or_logits() -> None:
    """D2, D3: the parent's KV bytes and next greedy tokens are bit-identical before and after."""
    engine = make_engine()
    forward: Any = engine._forward
    engine.submit(Prefill("p", pack_tokens(list(range(1, 15)))), "g")
    drive(engine)
    used = [b for b in range(96) if not engine._tree.pool.is_free(b)]
    memory = forward._memory.view(forward._memory.shape[0], 96, -1)
    filled = {b: memory[:, b].clone() for b in used}
    capsule = engine._capsules.get("p.0")
    logits = capsule.logits.clone()  # type: ignore[attr-defined]
    blocks = engine.stats().pool.free
    engine.submit(Fork("f", "p.0", (b"",) * 5, Limits(9, ignore_eos=True), Sampling(1.0)), "g")
    assert engine.stats().pool.free == blocks
    drive(engine)
    assert all(torch.equal(memory[:, b], filled[b]) for b in used)
    assert torch.equal(engine._capsules.get("p.0").logits, logits)  # type: ignore[arg-type]


def test_a_planted_fault_in_copy_on_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above is not blind: without the copy of the partial block tokens differ."""
    monkeypatch.setattr(type(MODEL.forward()), "_copy", lambda *_: None)
    engine = make_engine()
    text = list(range(1, 15))
    engine.submit(Prefill("p", pack_tokens(text)), "g")
    drive(engine)
    suffix = [7, 8, 9]
    engine.submit(Fork("f", "p.0", (pack_tokens(suffix),), Limits(8, ignore_eos=True)), "g")
    tokens, _ = drive(engine)["f", 0]
    monkeypatch.undo()
    assert tokens != rerun(text + suffix, 8, Sampling(), 0)


def test_stale_positions_are_noticed() -> None:
    """S7: positions continue at the prefix length; an engine that restarts at zero would differ."""
    text, suffix = list(range(1, 15)), [7, 8, 9]
    engine = make_engine()
    engine.submit(Prefill("p", pack_tokens(text)), "g")
    drive(engine)
    forward = engine._forward
    run: Callable[..., Any] = forward.forward

    def shifted(batch: Any) -> Any:
        rows = [row._replace(start=0, table=row.table[-(-14 // 4) - 1 :]) for row in batch.rows]
        return run(batch._replace(rows=rows))

    engine.submit(Fork("f", "p.0", (pack_tokens(suffix),), Limits(1, ignore_eos=True)), "g")
    right, _ = drive(engine)["f", 0]
    assert right == rerun(text + suffix, 1, Sampling(), 0)
    logits = {}
    for name, call in (("right", run), ("planted", shifted)):
        captured: list[Any] = []
        tap: Any = _Tap(forward, call, captured)
        engine._passes = ForwardPasses(tap, engine._tree)
        engine.submit(Fork(name, "p.0", (pack_tokens(suffix),), Limits(1, ignore_eos=True)), "g")
        drive(engine)
        logits[name] = captured[0]
    assert not torch.allclose(logits["right"], logits["planted"], atol=1e-2)


class _Tap:
    """A forward pass through `call` whose first logits are kept."""

    def __init__(self, inner: Any, call: Callable[..., Any], captured: list[Any]) -> None:
        self._inner = inner
        self._call = call
        self._captured = captured

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Any) -> Any:
        logits = self._call(batch)
        self._captured += [row.clone() for row in logits]
        return logits
