"""Capsules that move from one worker to another, beside the threads of both: they go on as if at home."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from mallee.protocol import model as spec_module
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Capture,
    Command,
    Fork,
    Generate,
    Grammar,
    Holder,
    Limits,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.testing.random_model import random_model
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.paths import flatten_windows
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import Copier, ThreadedMover
from mallee.worker.kv.tiers.peers import Ask, Loan
from mallee.worker.kv.tiers.prices import MeasuredPrices
from mallee.worker.kv.watch import KVChecks, KVMemory
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

NUM = 64
CUTS = (2, 35)
PROMPT = [3 + i * 7 % 100 for i in range(77)]
LIMITS = Limits(NUM, ignore_eos=True)
PATHS = [[3 + (i * j) % 125 for i in range(1, 7)] * 11 for j in range(1, 40)]
CHOICE = Grammar("choice", json.dumps([path + [3 + i] * 9 for i, path in enumerate(PATHS)]))
WAYS: dict[str, tuple[Sampling, Grammar | None]] = {
    "greedy": (Sampling(), None),
    "sampled": (Sampling(1.0, seed=11), None),
    "constrained": (Sampling(1.0, seed=12), CHOICE),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_window_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "MIN_WINDOW_BLOCKS", 1)
    monkeypatch.setattr(spec_module, "WINDOW_SHARE", 1000)


class Fleet:
    """Engines that are stepped by one thread, and lend to the threads that move each other's blocks."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self._asked: deque[tuple[Ask, Future[Loan]]] = deque()
        self.readers: set[str] = set()

    def lend(self, ask: Ask) -> Loan:
        self.readers.add(threading.current_thread().name)
        answer: Future[Loan] = Future()
        self._asked.append((ask, answer))
        return answer.result(30)

    def add(self, name: str, forward: TorchForward) -> Engine:
        def below(journal: Journal, memory: KVMemory) -> LowerTiers:
            arena = np.empty((0, memory.block_nbytes), np.uint8)
            copier = Copier(memory, arena, None, time.monotonic, peers=self)
            prices = MeasuredPrices(memory.block_nbytes)
            mover = ThreadedMover(copier, name)
            return LowerTiers(
                journal, copier, prices=prices, mover=mover, always_fetches=True, report=_raise
            )

        engine = self.engines[name] = Engine(
            forward,
            config=EngineConfig(SchedulerConfig(16, 32), 0, kv_checks=KVChecks("guards")),
            clock=time.monotonic,
            worker=WorkerId(name),
            incarnation=Incarnation(1),
            structures=MockStructures(128, (2,)),
            below=below,
        )
        return engine

    def run(self, name: str, *commands: Command) -> dict[str, list[int]]:
        """Tokens by request, once nothing is left to do or under way."""
        tokens: dict[str, list[int]] = {}
        for command in commands:
            self.engines[name].submit(command, "g")
        deadline = time.monotonic() + 30
        while self._is_busy and time.monotonic() < deadline:
            if self._asked:
                self._serve(*self._asked.popleft())
            working = [engine for engine in self.engines.values() if engine.has_work]
            if not working:
                time.sleep(1e-4)
            for engine in working:
                for frame in engine.step().frames.values():
                    assert all(reply.error is None for reply in frame.replies), frame.replies
                    for update in frame.updates:
                        assert update.error is None, update.error
                        tokens.setdefault(update.request, []).extend(update.tokens)
        for engine in self.engines.values():
            engine.check()
            assert engine.stats().lending.open == 0
        return tokens

    @property
    def _is_busy(self) -> bool:
        lowers = [engine._lower for engine in self.engines.values()]
        return (
            bool(self._asked)
            or any(engine.has_work for engine in self.engines.values())
            or any(lower is not None and lower.num_moving for lower in lowers)
            or any(engine.stats().lending.open for engine in self.engines.values())
        )

    def _serve(self, ask: Ask, answer: "Future[Loan]") -> None:
        def told(loan: Loan | MalleeError) -> None:
            if isinstance(loan, MalleeError):
                answer.set_exception(loan)
            else:
                answer.set_result(loan)

        self.engines[ask.holder.worker].lend(ask, told)


def _raise(error: MalleeError) -> None:
    raise error


def kv_bytes(engine: Engine, forward: TorchForward, name: str) -> bytes:
    """The bytes of the KV of a capsule: of its tokens' slots alone, in windows of those that are read."""
    capsule = engine._capsules.peek(name)
    assert capsule is not None
    assert capsule.node is not None
    num = capsule.num_computed
    tables = (engine._tree.table(capsule.node), *flatten_windows(capsule.node, forward.block_size))
    windows = [None, *(group.window for group in forward.spec.windows)]
    found = []
    for table, window, memory in zip(tables, windows, forward._memories, strict=True):
        begin = 0 if window is None else max(0, num - window + 1)
        size = forward.block_size
        slots = [int(table[i // size]) * size + i % size for i in range(begin, num)]
        found.append(memory.view(torch.uint8)[:, slots].numpy().tobytes())
    return b"".join(found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    [
        ("llama", "float32", "auto"),
        ("llama", "bfloat16", "auto"),
        ("llama", "float32", "fp8"),
        ("qwen3", "float32", "auto"),
        ("qwen3", "bfloat16", "fp8"),
        ("gemma3_text", "float32", "auto"),
        ("gemma3_text", "bfloat16", "fp8"),
    ],
)
def test_a_capsule_that_moved_goes_on_as_if_it_had_stayed(
    kind: str, dtype: str, kv_dtype: str, way: str
) -> None:
    """X6, part, F1, part, S8, part: fp32, bf16 and FP8 KV; a prompt's capsule, and a running branch's.

    64 tokens equal those of the uninterrupted run, the KV is equal byte by byte, nothing is computed.
    """
    sampling, grammar = WAYS[way]

    def forward() -> TorchForward:
        changes = {"sliding_window": 10} if kind == "gemma3_text" else {}
        return random_model(kind, 5, **changes).forward(
            num_blocks=241, block_size=4, dtype=dtype, kv_dtype=kv_dtype
        )

    fleet = Fleet()
    here, there = forward(), forward()
    a, b = fleet.add("a", here), fleet.add("b", there)
    generate = Generate("g", pack_tokens(PROMPT), LIMITS, sampling, grammar=grammar)
    a.submit(generate, "g")
    whole: list[int] = []
    taken: set[int] = set()
    while len(whole) < NUM:
        for frame in a.step().frames.values():
            whole += [token for update in frame.updates for token in update.tokens]
        for cut in CUTS:
            if len(whole) >= cut and cut not in taken:
                taken.add(cut)
                a.submit(Capture(f"c{cut}", "g"), "g")
    fleet.run("a", Prefill("p", pack_tokens(PROMPT)))
    num_computed = b.stats().num_prefill_tokens
    for name in ("p.0", *(f"c{cut}.0" for cut in CUTS)):
        capsule = a._capsules.peek(name)
        assert capsule is not None
        drawn = capsule.boundary - len(PROMPT)
        text = PROMPT + whole[:drawn]
        holder = Holder(a.worker, a.incarnation, "", len(text), name)
        fleet.run("b", Prefill(f"m{name[:-2]}", pack_tokens(text), capsule=name, holders=(holder,)))
        assert b.stats().num_prefill_tokens == num_computed
        assert kv_bytes(b, there, name) == kv_bytes(a, here, name)
        moved = b._capsules.peek(name)
        assert moved is not None
        assert (moved.pending, moved.continuation, moved.grammar) == (
            capsule.pending,
            capsule.continuation,
            capsule.grammar,
        )
    for cut in CUTS:
        resume = Fork(f"r{cut}", f"c{cut}.0", (b"",), Limits(0), resumes=True)
        boundary = a._capsules.peek(f"c{cut}.0").boundary - len(PROMPT)  # type: ignore[union-attr]
        assert fleet.run("b", resume)[f"r{cut}"] == whole[boundary:]
    fork = Fork("f", "p.0", (b"",), LIMITS, sampling, grammar=grammar)
    assert fleet.run("b", fork)["f"] == whole
    assert all("peers of b" in name for name in fleet.readers)
    for engine in (a, b):
        engine.close()
