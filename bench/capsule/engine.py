"""The engine of these benches: a model on this CPU, with host memory and a disk below."""

import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Event
from typing import NamedTuple

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import KVMemory
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume, VolumeConfig
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.movers import Carrier, Pace, ThreadedMover
from mallee.worker.transfer.prices import MeasuredPrices

GIVEN_WAY_BYTES_S = 2 << 30
"""Of moves while answers are drawn: `engine.tier_gib_s=2`."""
SAMPLED = Sampling(temperature=1.0, seed=1)


class Run(NamedTuple):
    """Seconds until all branches had a token, until all was over, between tokens of one; tokens computed."""

    ttft_s: float
    total_s: float
    gaps_s: list[float]
    num_prefilled: int
    tokens: list[int]  # drawn, of all branches


class Tiered:
    """One engine in this process, driven step by step; nothing is kept between runs but what it caches."""

    def __init__(
        self,
        folder: Path,
        *,
        num_tokens: int,
        host_tokens: int,
        threads: int,
        shares: bool = True,
        has_tiers: bool = True,
        keeps: int = 0,
        model: str = "smollm2",
    ) -> None:
        """`keeps`: capsules of answers. Without `shares` nothing is found again."""
        self.forward = load(
            resolve_model(model), num_blocks=num_tokens // 16, dtype="bfloat16", threads=threads
        )
        self.block_nbytes = self.forward.memory.block_nbytes
        self._host_blocks, self._folder = host_tokens // 16, folder
        self.engine = Engine(
            self.forward,
            config=EngineConfig(
                SchedulerConfig(max_step_tokens=1024),
                max_answer_capsules=keeps,
                prefix_cache=shares,
            ),
            clock=time.monotonic,
            worker=WorkerId("bench"),
            incarnation=Incarnation(1),
            below=self._below if shares and has_tiers else None,
        )
        self._news = Event()
        self.engine.notify(self._news.set)
        self._names = (f"r{i}" for i in count())

    def _below(self, journal: Journal, memory: KVMemory) -> LowerTiers:
        volume = Volume.open(
            Directory(self._folder), {"model": "bench"}, memory.block_nbytes, VolumeConfig(64 << 30)
        )
        arena = memory.new_rows(self._host_blocks)
        arena[:] = 1  # its pages are there
        pace = Pace(GIVEN_WAY_BYTES_S, time.monotonic, time.sleep)
        carrier = Carrier(memory, arena, volume, time.monotonic, pace.spent)
        mover = ThreadedMover(carrier, "bench")
        prices = MeasuredPrices(memory.block_nbytes)
        return LowerTiers(journal, carrier, prices=prices, mover=mover, always_fetches=True)

    def prefill(self, prompt: Sequence[int]) -> str:
        """The capsule of `prompt`, computed now."""
        name = next(self._names)
        self.run([Prefill(name, pack_tokens(prompt))])
        return f"{name}.0"

    def fork(self, capsule: str, suffixes: Sequence[Sequence[int]], max_tokens: int) -> Run:
        packed = tuple(pack_tokens(suffix) if suffix else b"" for suffix in suffixes)
        limits = Limits(max_tokens, ignore_eos=True)
        return self.run([Fork(next(self._names), capsule, packed, limits, SAMPLED)])

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """All prompts at once."""
        limits = Limits(max_tokens, ignore_eos=True)
        return self.run(
            [Generate(next(self._names), pack_tokens(p), limits, SAMPLED) for p in prompts]
        )

    def demote(self, capsule: str, tier: int) -> float:
        """Seconds until it is there."""
        return self.run([Demote(next(self._names), capsule, tier)]).total_s

    def promote(self, capsule: str) -> float:
        return self.run([Promote(next(self._names), capsule)]).total_s

    def release(self, capsule: str) -> None:
        self.run([Release(capsule)])

    def flood(self) -> None:
        """Evict all that is only cache, and wait until it has left."""
        tree = self.engine._tree
        tree.evict_ahead(tree.num_available)
        self.run([])

    def run(self, commands: Sequence[Command], later: Sequence[Command] = ()) -> Run:
        """Until nothing is left to do or under way; `later` comes at the 8th step."""
        before = self.engine.stats().num_prefill_tokens
        begin = time.perf_counter()
        for command in commands:
            assert self.engine.submit(command, "bench") is None
        first: dict[tuple[str, int], float] = {}
        last: dict[tuple[str, int], float] = {}
        gaps, drawn, num_steps, lower = [], [], 0, self.engine._lower
        while self.engine.has_work or (lower is not None and lower.under_way):
            self._news.clear()
            if not self.engine.has_work:
                self._news.wait(1.0)  # as a host does: asking all the time takes the copies' time
                continue
            frames = self.engine.step().frames
            now, num_steps = time.perf_counter(), num_steps + 1
            if num_steps == 8:
                for command in later:
                    assert self.engine.submit(command, "bench") is None
            for frame in frames.values():
                assert all(reply.error is None for reply in frame.replies), frame.replies
                for update in frame.updates:
                    assert update.error is None, update.error
                    if update.tokens:
                        drawn += update.tokens
                        key = (update.request, update.branch)
                        first.setdefault(key, now - begin)
                        if key in last:
                            gaps.append(now - last[key])
                        last[key] = now
        computed = self.engine.stats().num_prefill_tokens - before
        ttft = max(first.values(), default=0.0)
        return Run(ttft, time.perf_counter() - begin, gaps, computed, drawn)

    def close(self) -> None:
        self.engine.close()
