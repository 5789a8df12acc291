"""A real engine under a timing model: what it decides is real, what it computes takes time only.

The same object is driven in virtual time (`mocker.replay`) and by the wall clock (the live fleet).
While nothing can change from one step to the next (all branches decode, none ends, fills a block or
needs one that is in use) many steps run as one *multi-step*: one event for the driver, O(rows) here.
A command that arrives meanwhile cuts it short at the end of the step under way; so decisions, events and
times are those of single steps.

The driver delivers commands before ends at the same time: a command at the very end of a step is there
for the next.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

from mallee.mocker.links import Peers
from mallee.mocker.passes import TimedForward, mock_spec
from mallee.mocker.texts import Texts
from mallee.mocker.tiers import MockedTiers, TierConfig
from mallee.mocker.timing import Timing
from mallee.mocker.updates import CountedSink, CountedUpdate, counted
from mallee.protocol.errors import ConfigError
from mallee.protocol.events import EventBatch, Snapshot
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command
from mallee.protocol.model import ModelSpec
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.branch import Branch
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.updates import prompt_tokens

_DEFAULT: Final = EngineConfig(SchedulerConfig(max_step_tokens=8192, gang=False))


class Outcome(NamedTuple):
    """The outcome of a step, or of `num_steps` equal steps at once.

    `num_gaps` tokens came one step after the one before of their branch. For each of `late_s` that was so
    many seconds ago: its branch had been left out of steps, or preempted.
    """

    begun: float
    ended: float
    num_steps: int
    num_gaps: int
    late_s: Sequence[float]
    updates: Sequence[CountedUpdate]
    events: EventBatch | None


class _Run(NamedTuple):
    """Steps under way: how long the first n take is `ends[n - 1]`, or else follows from the rows."""

    rows: int
    context: int
    slowdown: float
    ends: Sequence[float] | None


class MockedEngine:
    """Between `start` and `finish` it computes, and commands wait outside.

    With `texts` prompts are run-length texts, and updates are counts (`finish`); else prompts are tokens,
    hashed as gateways do, and updates are frames too (`finish_raw`). A multi-step is at most `max_multi_step`
    steps. Without `reports_progress` (with `texts` alone) a branch is reported with its first token and at
    its end only: `num_tokens` are those since then, and `unreported` has the others. It borrows from `peers`.
    """

    def __init__(
        self,
        *,
        timing: Timing,
        num_blocks: int,
        block_size: int,
        worker: WorkerId,
        incarnation: Incarnation,
        clock: Callable[[], float],
        config: EngineConfig | None = None,
        spec: ModelSpec | None = None,
        texts: Texts | None = None,
        vocabulary: Sequence[int] | None = None,
        seed: int = 0,
        max_multi_step: int = 1 << 20,
        reports_progress: bool = True,
        tiers: TierConfig | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.spec = spec or mock_spec(vocab_size=1 << 32, max_model_len=1 << 24)
        assert reports_progress or texts is not None, "frames report everything"
        if texts is not None and config is not None and config.speculation.drafters != "off":
            raise ConfigError(
                f"speculation={config.speculation.drafters!r}: texts of run lengths have no tokens to draft;"
                " set speculation to off"
            )
        self._updates = CountedSink(reports_progress) if texts is not None else None
        self._forward = TimedForward(
            self.spec,
            timing,
            num_blocks=num_blocks,
            block_size=block_size,
            seed=seed,
            vocabulary=vocabulary,
            notation=None if texts is None else texts.notation,
            updates=self._updates,
        )
        self._tiers = None
        if tiers is not None or peers is not None:
            self._tiers = MockedTiers(
                tiers or TierConfig(),
                block_size=block_size,
                clock=clock,
                timed=self._forward,
                peers=peers,
            )
        self.engine = Engine(
            self._forward,
            config=config or _DEFAULT,
            clock=clock,
            worker=worker,
            incarnation=incarnation,
            passes=self._forward,
            below=self._tiers.make if self._tiers is not None else None,
        )
        self._timing = timing
        # A step may leave a state behind.
        self._max_multi_step = 1 if self.spec.has_states else max_multi_step
        self._result: StepResult | None = None
        self._run: _Run | None = None
        self._num_steps = 0
        self._begun = self._end = 0.0
        # Since when: branches that drew before, and not in the last step.
        self._stalled: dict[Branch, float] = {}
        self._late_s: list[float] = []
        self._num_rows = self._num_late = 0  # decodes of a step, and how many of them had stalled

    @property
    def is_busy(self) -> bool:
        return self._num_steps > 0

    @property
    def has_work(self) -> bool:
        """Whether `start` would begin something. While it is not busy."""
        return self.engine.has_work

    @property
    def host_s(self) -> float:
        """Seconds of the step under way that need no device: the engine's own, at its start."""
        return min(self._forward.step_s, self._timing.overhead_s / self._timing.speedup)

    @property
    def next_due(self) -> float:
        """The end of the next move of blocks, after which there is work; infinite if none is under way."""
        return self._tiers.next_due if self._tiers is not None else inf

    @property
    def max_model_len(self) -> int:
        """The longest text that it takes."""
        return self.engine.spec.max_model_len

    @property
    def num_evicted(self) -> int:
        """Blocks whose content others took the place of."""
        return self.engine.stats().tree.num_evicted

    @property
    def num_preemptions(self) -> int:
        """Branches that gave way to others, and were computed again."""
        return self.engine.stats().sched.num_preemptions

    def submit(self, command: Command, gateway: str = "g") -> None:
        """Take a command. While it is not busy."""
        assert not self.is_busy, "commands wait until the step is over"
        self.engine.submit(command, gateway)

    def slow(self, factor: float) -> None:
        """From the next step on everything takes `factor` times as long. `cut` first."""
        self._forward.slowdown = factor

    @property
    def next_seq(self) -> int:
        """The number of the first event that `finish` has not returned."""
        result = self._result
        if result is not None and result.events is not None:
            return result.events.first_seq
        return self.engine.next_seq

    # Steps

    def start(self, now: float) -> float | None:
        """Begin the next step, or several: when they will be over.

        None: there is nothing to do, before `next_due`.
        """
        assert not self._num_steps, "it computes already"
        engine = self.engine
        self._begun = now
        if (num_equal := self._num_equal_steps()) > 1:
            return self._start_multi_step(now, num_equal)
        if not engine.has_work:
            return None
        forward = self._forward
        if self._updates is not None:
            self._updates.begin()
        before = tuple(engine.decodes)  # the step itself adds those that drew their first token
        self._result = engine.step()
        self._num_steps = 1
        self._end = now + forward.step_s
        if len(forward.decodes) < len(before):
            drawing = set(forward.decodes)
            for s in before:
                if s not in drawing:
                    self._stalled.setdefault(s, now)
        again = [chunk.branch for chunk in forward.chunks if chunk.is_last]
        self._note_late(forward.decodes, again, self._end)
        return self._end

    def _num_equal_steps(self) -> int:
        """The number of next steps that are sure to be alike: each decode draws in each of them.

        None of them ends before the last step, fills a block before it, or needs a block that is in use.
        """
        engine, size = self.engine, self._forward.block_size
        most = self._max_multi_step
        if most < 2 or not engine.is_steady:
            return 0
        has_eos = bool(self.spec.eos_token_ids)
        free = engine.num_free_blocks
        for s in engine.decodes:
            rules, limits = s.job.rules, s.job.limits
            if not rules.is_plain or rules.stop_ids or (has_eos and not limits.ignore_eos):
                return 0  # its tokens have to be looked at
            filled = s.origin_len + len(s.tokens) - 1
            if filled >= s.room:
                free -= 1
                if s.room == 0 or free < 0:
                    return 0  # it needs a node of its own, or blocks of others
            if (left := size - filled % size) < most:
                most = left
            if (left := limits.max_tokens - s.num_output) < most:
                most = left
        return most

    def _start_multi_step(self, now: float, num_steps: int) -> float:
        engine, forward = self.engine, self._forward
        decodes = engine.decodes
        rows, context = len(decodes), forward.context(decodes)
        ends = None
        if forward.has_jitter:
            ends, total = [], 0.0
            for seconds in forward.steps_s(rows, context, num_steps):
                total += seconds
                ends.append(total)
        self._run = _Run(rows, context, forward.slowdown, ends)
        self._num_steps = num_steps
        self._end = now + self._lasts(num_steps)
        self._note_late(decodes, (), now + self._lasts(1))
        if (due := min(engine.next_expiry, self.next_due)) <= self._end:
            self.cut(due)
        return self._end

    def cut(self, now: float) -> float:
        """Cut a multi-step, for a command, after the step that runs at `now`; returns its end."""
        assert self._num_steps, "it computes nothing"
        if self._run is not None and self._num_steps > 1 and now < self._end:
            self._num_steps = self._steps_until(now)
            self._end = self._begun + self._lasts(self._num_steps)
        return self._end

    def delay(self, end: float) -> None:
        """The step under way ends at `end`: until then its device also worked for others.

        Of single steps only: those of an engine with `max_multi_step` 1.
        """
        assert self._num_steps == 1, "the ends of several steps are not known"
        assert self._run is None, "the ends of several steps are not known"
        self._late_s = [late_s + end - self._end for late_s in self._late_s]
        self._end = end

    def finish(self) -> Outcome:
        """The end of what `start` began, at its time."""
        num_steps, result = self._num_steps, self.finish_raw()
        num_gaps = self._num_rows * num_steps - self._num_late
        if self._updates is not None:
            updates: Sequence[CountedUpdate] = self._updates.take()
        else:
            updates = [counted(update) for f in result.frames.values() for update in f.updates]
        events = result.events
        return Outcome(
            begun=self._begun,
            ended=self._end,
            num_steps=num_steps,
            num_gaps=num_gaps,
            late_s=self._late_s,
            updates=updates,
            events=events,
        )

    def finish_raw(self) -> StepResult:
        """The same, as the engine returns it."""
        assert self._num_steps, "it computes nothing"
        result, self._result = self._result, None
        if self._run is not None:
            result = self.engine.advance(self._forward.draw(self.engine.decodes, self._num_steps))
            self._run = None
        assert result is not None
        self._num_steps = 0
        return result

    def unreported(self, now: float) -> list[CountedUpdate]:
        """Tokens of branches, drawn in steps that are over by `now`, that were not reported: for a crash."""
        assert self._updates is not None, "frames report everything"
        over: dict[Branch, int] = {}
        if self._run is not None:
            steps = self._steps_until(now)
            steps -= self._begun + self._lasts(steps) > now
            over = dict.fromkeys(self.engine.decodes, steps)
        is_step = self.is_busy and self._run is None
        in_flight = self._updates.in_flight if is_step else {}
        # A branch that ends in the step that runs is gone from the engine already.
        drew = {branch: branch.num_output for branch in (*self.engine.branches, *in_flight)}
        found = []
        for branch, num in drew.items():
            num = max(0, num - 1) + over.get(branch, 0) - in_flight.get(branch, 0)
            if num > 0 and branch.draws:
                cached, computed = prompt_tokens(branch)
                name = branch.job.command.request
                found.append(
                    CountedUpdate(
                        request=name,
                        branch=branch.index,
                        num_tokens=num,
                        finish=None,
                        cached_tokens=cached,
                        prefill_tokens=computed,
                        capsule=None,
                        boundary=0,
                        error=None,
                    )
                )
        return found

    def snapshot(self) -> Snapshot:
        """All that it holds, as of the events published so far. Between steps."""
        return self.engine.snapshot()

    def close(self) -> None:
        """Let go of what it has borrowed, and end what it has lent. It can't be used afterwards."""
        self.engine.close()

    def check(self) -> None:
        """Raise AssertionError on a broken invariant. Between steps."""
        assert not self.is_busy, "between steps only"
        self.engine.check()

    def _lasts(self, num_steps: int) -> float:
        """Seconds of the first steps of the multi-step under way."""
        run = self._run
        assert run is not None
        if run.ends is not None:
            return run.ends[num_steps - 1]
        return self._timing.multi_step_s(run.rows, run.context, num_steps) * run.slowdown

    def _steps_until(self, now: float) -> int:
        """The number of steps that are over or under way."""
        ends = range(1, self._num_steps)
        return bisect_left(ends, now, key=lambda n: self._begun + self._lasts(n)) + 1

    def _note_late(self, decodes: Sequence[Branch], again: Sequence[Branch], end: float) -> None:
        """Note the stalled branches that draw at `end`: in `decodes`, or in `again` after a recomputation."""
        stalled = self._stalled
        self._num_rows, self._num_late, self._late_s = len(decodes), 0, []
        if not stalled:
            return
        late_s = [end - stalled.pop(s) for s in decodes if s in stalled]
        self._num_late = len(late_s)
        late_s += [end - stalled.pop(s) for s in again if s in stalled]
        self._late_s = late_s
        for s in [s for s in stalled if s.is_over]:
            del stalled[s]
