"""Capsules that move from one worker to another, beside the threads of both: they go on as if at home."""

import threading
import time
from collections import deque
from concurrent.futures import Future

import numpy as np
import pytest

from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Fork, Holder, Limits, Prefill, pack_tokens
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import Copier, ThreadedMover
from mallee.worker.kv.tiers.peers import Ask, Loan
from mallee.worker.kv.tiers.prices import MeasuredPrices
from mallee.worker.kv.watch import KVChecks, KVMemory
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.exact_capsules import (
    CASES,
    CUTS,
    LIMITS,
    PROMPT,
    WAYS,
    drawn_with_captures,
    kv_bytes,
    tiny_forward,
)

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


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


@pytest.mark.parametrize(("kind", "dtype", "kv_dtype", "way"), CASES)
def test_a_capsule_that_moved_goes_on_as_if_it_had_stayed(
    kind: str, dtype: str, kv_dtype: str, way: str
) -> None:
    """X6, part, F1, part, S8, part: fp32, bf16 and FP8 KV; a prompt's capsule, and a running branch's.

    64 tokens equal those of the uninterrupted run, the KV is equal byte by byte, nothing is computed.
    """
    sampling, grammar = WAYS[way]

    def forward() -> TorchForward:
        return tiny_forward(kind, dtype, kv_dtype, num_blocks=241, block_size=4)

    fleet = Fleet()
    here, there = forward(), forward()
    a, b = fleet.add("a", here), fleet.add("b", there)
    whole = drawn_with_captures(a, way)
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
