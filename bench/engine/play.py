"""One client against one engine: what every branch saw, and what the engine needed for it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.engine.workloads import Client, Request
from mallee.protocol.messages import Fork, Prefill, Update
from mallee.worker.engine import Engine
from mallee.worker.kv.usage import TreeUsage

STARVED_STEPS = 64


@dataclass
class Life:
    """One branch as its client saw it; seconds and steps on the engine's clock."""

    submitted: float
    step: int
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    ended: float = 0.0
    longest_wait: int = 0  # steps between two signs of life


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds, nearest rank."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """`ttft` is a branch's latency: from the request that asked for it to its first token. A branch is
    starved if it went without a token for `STARVED_STEPS` steps. The solution is there when the last answer
    has ended. Peaks are over the run's steps; shares
    are those of the step with the most blocks in use. `gb_per_branch`: KV in use there, by branches.
    """

    total_s: float
    time_to_solution_s: float
    throughput_tok_s: float
    ttft_ms: Spread
    itl_ms: Spread
    latency_ms: Spread
    queue_wait_ms: Spread
    starved: int
    prefill_tokens: int
    cached_tokens: int
    steps: int
    preemptions: int
    copies: int
    peak_blocks: int
    peak_memory_share: float
    share_ratio: float
    slot_fill: float
    gb_per_branch: float
    answers: str  # a digest


class Run:
    """One client against one engine, until nothing is left to do."""

    def __init__(self, engine: Engine, client: Client, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.client = client
        self.clock = clock
        self.lives: dict[tuple[str, int], Life] = {}
        self.peak: TreeUsage = engine.usage()
        self._steps = 0

    def play(self) -> float:
        """Seconds it took."""
        begin = self.clock()
        self._send(self.client.begin())
        while self.engine.has_work:
            self._step()
        return self.clock() - begin

    def _send(self, commands: Sequence[Request]) -> None:
        for command in commands:
            if not isinstance(command, Prefill):
                branches = len(command.suffixes) if isinstance(command, Fork) else 1
                for index in range(branches):
                    self.lives[command.request, index] = Life(self.clock(), self._steps)
            self.engine.submit(command, "bench")

    def _step(self) -> None:
        began = self.clock()
        result = self.engine.step()
        self._steps += 1
        self._note_admitted(began)
        usage = self.engine.usage()
        if usage.live_blocks > self.peak.live_blocks:
            self.peak = usage
        for frame in result.frames.values():
            for update in frame.updates:
                self._note(update, began)
                self._send(self.client.heard(update))

    def _note_admitted(self, now: float) -> None:
        """Looks into the engine's own table: no update tells a client that its request begins."""
        for branch in self.engine.branches:
            if branch.attached_tokens is not None:
                for index in branch.members:
                    life = self.lives.get((branch.job.command.request, index))
                    if life is not None and life.admitted is None:
                        life.admitted = now

    def _note(self, update: Update, began: float) -> None:
        life = self.lives.get((update.request, update.branch))
        if life is None:
            return
        now = self.clock()
        if life.admitted is None:
            life.admitted = began  # it came and went within the step
        life.longest_wait = max(life.longest_wait, self._steps - life.step)
        life.step = self._steps
        life.tokens += [now] * len(update.tokens)
        if update.finish is not None:
            life.ended = now


def measure(
    engine: Engine, client: Client, clock: Callable[[], float], token_nbytes: int
) -> Metrics:
    """Play `client`; `token_nbytes` is what one token takes of the KV memory."""
    before = engine.stats()
    run = Run(engine, client, clock)
    begun = clock()
    total = run.play()
    after, lives, peak = engine.stats(), list(run.lives.values()), run.peak
    gaps = [b - a for life in lives for a, b in zip(life.tokens, life.tokens[1:], strict=False)]
    num_tokens = sum(len(life.tokens) for life in lives)
    return Metrics(
        total_s=total,
        time_to_solution_s=max(life.ended for life in lives) - begun,
        throughput_tok_s=num_tokens / total,
        ttft_ms=spread([life.tokens[0] - life.submitted for life in lives]),
        itl_ms=spread(gaps),
        latency_ms=spread([life.ended - life.submitted for life in lives]),
        queue_wait_ms=spread([(life.admitted or 0) - life.submitted for life in lives]),
        starved=sum(life.longest_wait > STARVED_STEPS for life in lives),
        prefill_tokens=after.num_prefill_tokens - before.num_prefill_tokens,
        cached_tokens=after.num_cached_tokens - before.num_cached_tokens,
        steps=after.num_steps - before.num_steps,
        preemptions=after.sched.num_preemptions - before.sched.num_preemptions,
        copies=after.tree.num_copies - before.tree.num_copies,
        peak_blocks=peak.live_blocks,
        peak_memory_share=peak.pool_ratio,
        share_ratio=peak.share_ratio,
        slot_fill=peak.fill_ratio,
        gb_per_branch=peak.live_blocks * peak.block_size * token_nbytes / len(lives) / 1e9,
        answers=hashlib.sha256(json.dumps(client.branch_answers()).encode()).hexdigest()[:16],
    )


def spread(seconds: Sequence[float]) -> Spread:
    """Milliseconds of `seconds`; zeros if there are none."""
    ordered = sorted(seconds) or [0.0]
    ranks = [ordered[min(len(ordered) - 1, -(-len(ordered) * p // 100) - 1)] for p in (50, 95, 99)]
    return Spread(*(1000 * value for value in ranks))
