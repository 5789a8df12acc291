"""Our engine for `bench/engine/__main__.py`: one engine in this process, driven step by step."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=1)


class Run(NamedTuple):
    """Seconds of each step with the tokens it drew, until all had a token, until all was over."""

    steps: list[tuple[float, int]]
    ttft_s: float
    total_s: float
    prefill_tokens: int  # that were computed
    tokens: dict[tuple[str, int], list[int]]  # drawn, by request and branch


class Ours:
    """Requests are named by a counter; nothing is kept between runs but what the engine caches."""

    def __init__(
        self, forward: TorchForward, config: EngineConfig, *, shares_reads: bool = True
    ) -> None:
        self.forward = forward
        self.forward.shares_reads = shares_reads
        self.engine = Engine(
            self.forward,
            device=self.forward if self.forward.is_beside_host else None,
            config=config,
            clock=time.monotonic,
            worker=WorkerId("bench"),
            incarnation=Incarnation(1),
        )
        self._names: Iterator[str] = (f"r{i}" for i in count())

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling = GREEDY
    ) -> Run:
        """All prompts at once."""
        limits = Limits(max_tokens, ignore_eos=True)
        return self._run(
            [
                Generate(next(self._names), pack_tokens(p), limits, sampling, first_branch=i)
                for i, p in enumerate(prompts)  # equal prompts are sampled apart
            ],
            len(prompts),
        )

    def prefill(self, prompt: Sequence[int]) -> str:
        """The capsule of `prompt`, computed now."""
        name = next(self._names)
        self._run([Prefill(name, pack_tokens(prompt))], 1)
        return capsule_id(RequestId(name), 0)

    def fork(self, capsule: str, suffixes: Sequence[Sequence[int]], max_tokens: int) -> Run:
        """One sampled branch per suffix."""
        packed = tuple(pack_tokens(s) if len(s) else b"" for s in suffixes)
        limits = Limits(max_tokens, ignore_eos=True)
        return self._run([Fork(next(self._names), capsule, packed, limits, SAMPLED)], len(packed))

    def release(self, capsule: str) -> None:
        self._run([Release(capsule)], 0)

    def _run(self, commands: Sequence[Command], num_branches: int) -> Run:
        before = self.engine.stats().num_prefill_tokens
        clock: Callable[[], float] = time.perf_counter
        begin = clock()
        for command in commands:
            self.engine.submit(command, "bench")
        drawn: dict[tuple[str, int], list[int]] = {}
        steps: list[tuple[float, int]] = []
        ttft = 0.0
        while self.engine.has_work:
            at = clock()
            frames = self.engine.step().frames
            now = clock()
            new = 0
            for frame in frames.values():
                for update in frame.updates:
                    assert update.error is None, update.error
                    new += len(update.tokens)
                    drawn.setdefault((update.request, update.branch), []).extend(update.tokens)
            if not ttft and len(drawn) >= num_branches:
                ttft = now - begin
            steps.append((now - at, new))
        computed = self.engine.stats().num_prefill_tokens - before
        return Run(steps, ttft, clock() - begin, computed, drawn)
