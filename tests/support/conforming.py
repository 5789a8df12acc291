"""A scene of arrivals, played on engines of different kinds, and what each of them did step by step.

The engines: a real one over a pass that computes (content, or a tiny model) under a clock that its own
plans move on; a mocked one in virtual time, step by step or in strides, with real tokens or outlines.
All are given the same commands at the same times and must decide, tell and publish the same.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import pytest

from mallee.mocker.engine import MockedEngine
from mallee.mocker.passes import TimedForward
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.protocol.events import CapsuleStored, Event, EventBatch, Removed, Stored, unpack_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Command, Update
from mallee.protocol.model import ModelSpec
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from mallee.worker.sched.branch import Branch, node_of
from mallee.worker.sched.plan import Plan
from support.asking import SIZE, Ask, OutlineWriter, Scene, TokenWriter, Writer, command
from support.driving import engine_over

TIMING = Timing(
    ClosedForm(1e-3, 1e-5, 1e-7, 1e-6, (Plane(2e-3, 1e-4, 1e-6), Plane(1e-3, 3e-4, 1e-7))), 5e-4
)


# What happened

Decision = tuple[Any, ...]


class News(NamedTuple):
    """Update of one branch in a step."""

    request: str
    branch: int
    num_tokens: int
    finish: str | None
    cached_tokens: int
    prefill_tokens: int
    capsule: str | None
    boundary: int
    error: str | None


class Done(NamedTuple):
    """One step, or a stride of several."""

    begun: float
    ended: float
    decisions: tuple[Decision, ...]
    news: tuple[News, ...]
    events: tuple[tuple[str, Any], ...]  # one entry a block


class Story(NamedTuple):
    steps: list[Done]
    held: frozenset[int]  # blocks, at the end
    next_seq: int

    @property
    def decisions(self) -> list[tuple[Decision, ...]]:
        return [step.decisions for step in self.steps]

    @property
    def events(self) -> list[tuple[float, str, Any]]:
        """Each with the time it was published."""
        return [(step.ended, *event) for step in self.steps for event in step.events]

    @property
    def choices(self) -> list[Decision]:
        """Admissions and preemptions, in order."""
        every = [decision for step in self.steps for decision in step.decisions]
        return [decision for decision in every if decision[0] != "plan"]

    def told(self) -> dict[tuple[str, int], list[tuple[float, int, News]]]:
        """Updates by branch: time, tokens so far, and other fields."""
        found: dict[tuple[str, int], list[tuple[float, int, News]]] = {}
        for step in self.steps:
            for news in step.news:
                before = found.setdefault((news.request, news.branch), [])
                total = before[-1][1] + news.num_tokens if before else news.num_tokens
                before.append((step.ended, total, news._replace(num_tokens=0)))
        return found


def assert_same(found: Story, expected: Story) -> None:
    """The same steps; their times may differ by rounding."""
    for ours, theirs in zip(found.steps, expected.steps, strict=False):
        assert ours._replace(begun=0.0, ended=0.0) == theirs._replace(begun=0.0, ended=0.0)
        assert ours.begun == pytest.approx(theirs.begun, abs=1e-9)
        assert ours.ended == pytest.approx(theirs.ended, abs=1e-9)
    assert len(found.steps) == len(expected.steps)
    assert found[1:] == expected[1:]


def assert_same_but_for_strides(found: Story, expected: Story, *, abs_s: float = 1e-9) -> None:
    """`found` tells of several steps at once what `expected` tells one by one, when the last is over.

    Events and choices are the same, one by one; of what a branch told the ends of strides are compared.
    """
    assert found.choices == expected.choices
    assert [event[1:] for event in found.events] == [event[1:] for event in expected.events]
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=abs_s)
    told, expected_told = found.told(), expected.told()
    assert told.keys() == expected_told.keys()
    for branch, news in told.items():
        times: dict[tuple[int, News], list[float]] = {}
        for at, total, rest in expected_told[branch]:
            times.setdefault((total, rest), []).append(at)
        for at, total, rest in news:
            assert at == pytest.approx(times[total, rest].pop(0), abs=abs_s), branch
        assert news[-1][1:] == expected_told[branch][-1][1:]
    assert found[1:] == expected[1:]


def flat(events: Sequence[Event]) -> tuple[tuple[str, Any], ...]:
    """One entry for each block and capsule, in order: how blocks are gathered into runs is no matter."""
    found: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, Stored | Removed):
            kind = f"{type(event).__name__}{event.tier}"
            found += [(kind, value) for value in unpack_hashes(event.hashes).tolist()]
        elif isinstance(event, CapsuleStored):
            hashes = tuple(unpack_hashes(event.hashes).tolist())
            found.append(("CapsuleStored", (event.capsule, event.boundary, hashes)))
        else:
            found.append((type(event).__name__, event.capsule))  # type: ignore[union-attr]
    return tuple(found)


def renamed(events: Sequence[tuple[float, str, Any]]) -> list[tuple[float, str, Any]]:
    """The same with blocks numbered as they first appear: equal for texts that are written otherwise."""
    numbers: dict[int, int] = {}

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    found: list[tuple[float, str, Any]] = []
    for at, kind, what in events:
        if kind == "CapsuleStored":
            capsule, boundary, hashes = what
            found.append((at, kind, (capsule, boundary, tuple(map(number, hashes)))))
        else:
            found.append((at, kind, number(what) if isinstance(what, int) else what))
    return found


class Spy:
    """Notes what an engine decides: who is admitted, planned and preempted, in order."""

    def __init__(self, engine: Engine, timing: Timing = TIMING) -> None:
        self.noted: list[Decision] = []
        self._pass_s = 0.0  # of the last plan
        self._timing = timing
        self._engine = engine
        scheduler = engine._scheduler
        make_plan, preempt = scheduler.plan, scheduler.blocks.preempt
        admit = scheduler._planner.admit

        def planned() -> Plan:
            plan = make_plan()
            self._pass_s = self._seconds(plan)
            self._note(plan)
            return plan

        def preempted(victim: Branch) -> None:
            self.noted.append(("preempt", self._name(victim)))
            preempt(victim)

        def admitted(branch: Branch, step: int) -> None:
            self.noted.append(("admit", self._name(branch)))
            admit(branch, step)

        scheduler.plan = planned  # type: ignore[method-assign]
        scheduler.blocks.preempt = preempted  # type: ignore[method-assign]
        scheduler._planner.admit = admitted  # type: ignore[method-assign]

    def take(self) -> tuple[Decision, ...]:
        noted, self.noted = tuple(self.noted), []
        return noted

    def take_pass_s(self) -> float:
        """Seconds of the step that ends now: an engine without requests plans none."""
        seconds, self._pass_s = self._pass_s, 0.0
        return seconds

    def _seconds(self, plan: Plan) -> float:
        """Seconds of a plan, added up by hand. Updates alone take no time."""
        if not (plan.chunks or plan.decodes or plan.ready):
            return 0.0
        chunks = [(len(chunk.tokens), chunk.start) for chunk in plan.chunks]
        if not self._timing.shares_reads:
            return self._timing.step_s(
                chunks, len(plan.decodes), sum(s.length for s in plan.decodes)
            )
        slots: set[tuple[int, int]] = set()
        for branch in plan.decodes:
            table = self._engine._tree.table(node_of(branch)).tolist()
            slots |= {(table[i // SIZE], i % SIZE) for i in range(branch.length)}
        return self._timing.step_s(chunks, len(plan.decodes), len(slots))

    def _note(self, plan: Plan) -> None:
        decodes = tuple(self._name(s) for s in plan.decodes)
        chunks = tuple(
            (self._name(c.branch), c.start, len(c.tokens), c.is_last) for c in plan.chunks
        )
        copies = tuple(copy.num_slots for copy in plan.copies)
        ready = tuple(self._name(s) for s in plan.ready)
        failed = tuple(self._name(s) for s, _ in plan.failed)
        self.noted.append(("plan", decodes, chunks, ready, copies, failed))

    def _name(self, branch: Branch) -> tuple[str, int]:
        return (branch.job.command.request, branch.index)


def news_of(updates: Sequence[Any], count: Callable[[Any], int]) -> tuple[News, ...]:
    return tuple(
        News(
            u.request,
            u.branch,
            count(u),
            u.finish,
            u.cached_tokens,
            u.prefill_tokens,
            u.capsule,
            u.boundary,
            u.error[0] if u.error else None,
        )
        for u in updates
    )


def published(batch: EventBatch | None, next_seq: int) -> tuple[tuple[str, Any], ...]:
    """The events of a batch, which goes on where the last one ended."""
    if batch is None:
        return ()
    assert batch.first_seq == next_seq, "a gap in the numbering"
    return flat(batch.events)


# Playing

Draws = Callable[[Sequence[Any]], list[int]]


class Drawn:
    """A pass whose tokens another draws: what it computes is real, what it says is not."""

    def __init__(self, inner: Any, draw: Draws) -> None:
        self._inner = inner
        self.sample = draw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Time:
    """Seconds, moved on by whoever plays, or read from another clock."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.now = 0.0
        self._clock = clock

    def __call__(self) -> float:
        return self.now if self._clock is None else self._clock()


def play_real(scene: Scene, inner: Any, timing: Timing = TIMING) -> Story:
    """On a real engine over a pass that computes; what it draws is what the mocked one draws."""
    drawing = TimedForward(
        inner.spec, timing, num_blocks=inner.num_blocks, block_size=inner.block_size, seed=0
    )

    def make(time: Time) -> Engine:
        return engine_over(Drawn(inner, drawing.sample), config=scene.config, clock=time)

    return play_stepped(make, scene.asks, TokenWriter(), timing)


def play_scene(
    scene: Scene,
    spec: ModelSpec,
    *,
    max_multi_step: int = 1,
    is_raw: bool = False,
    until: float = inf,
    watch: Callable[[MockedEngine], None] = lambda mocked: None,
    **more: Any,
) -> Story:
    """On a mocked engine; `more` are further arguments of it. With `texts` in outlines.

    `watch` is given the engine before anything happens.
    """

    def make(time: Time) -> MockedEngine:
        mocked = make_mocked(
            time,
            scene.config,
            num_blocks=scene.num_blocks,
            max_multi_step=max_multi_step,
            spec=spec,
            **more,
        )
        watch(mocked)
        return mocked

    texts = more.get("texts")
    writer = TokenWriter() if texts is None else OutlineWriter(texts)
    return play_mocked(make, scene.asks, writer, is_raw=is_raw, until=until)


def play_stepped(
    make: Callable[[Time], Engine], asks: Sequence[Ask], writer: Writer, timing: Timing = TIMING
) -> Story:
    """On an engine that is stepped by hand; each step takes what its plan says it would."""
    time = Time()
    engine = make(time)
    spy = Spy(engine, timing)
    coming = deque(asks)
    steps: list[Done] = []
    while coming or engine.has_work:
        if not engine.has_work:
            time.now = max(time.now, coming[0].at_s)
        while coming and coming[0].at_s <= time.now:
            engine.submit(command(coming.popleft(), writer), "g")
        if not engine.has_work:
            continue
        begun, next_seq = time.now, engine.next_seq
        result = engine.step()
        time.now += spy.take_pass_s()
        engine.check()
        updates = [u for frame in result.frames.values() for u in frame.updates]
        steps.append(
            Done(
                begun,
                time.now,
                spy.take(),
                news_of(updates, lambda u: len(u.tokens)),
                published(result.events, next_seq),
            )
        )
    return story_of(engine, steps)


def play_mocked(
    make: Callable[[Time], MockedEngine],
    asks: Sequence[Ask],
    writer: Writer,
    *,
    is_raw: bool = False,
    until: float = inf,
) -> Story:
    """On a mocked engine, as a driver does: who arrives while it computes waits; strides are cut.

    It starts again when a move of blocks has ended. All that happens up to `until`.
    """
    time = Time()
    mocked = make(time)
    spy = Spy(mocked.engine)
    coming = deque(asks)
    inbox: list[Command] = []
    end: float | None = None
    steps: list[Done] = []
    while coming or end is not None or mocked.next_due < inf:
        due = mocked.next_due if end is None else end
        if min(coming[0].at_s if coming else inf, due) > until:
            break
        if coming and coming[0].at_s <= due:
            time.now = coming[0].at_s
            while coming and coming[0].at_s <= time.now:
                inbox.append(command(coming.popleft(), writer))
            if mocked.is_busy:
                end = mocked.cut(time.now)
                assert end >= time.now
                continue
        elif end is None:
            time.now = due
        else:
            time.now = end
            steps.append(_finished(mocked, spy, time.now, is_raw=is_raw))
        for each in inbox:
            mocked.submit(each)
        inbox = []
        end = mocked.start(time.now)
    return story_of(mocked.engine, steps)


def _finished(mocked: MockedEngine, spy: Spy, now: float, *, is_raw: bool) -> Done:
    next_seq = mocked.engine.next_seq
    if is_raw:
        result = mocked.finish_raw()
        updates: list[Update] = [u for frame in result.frames.values() for u in frame.updates]
        news, events, begun = news_of(updates, lambda u: len(u.tokens)), result.events, now
    else:
        outcome = mocked.finish()
        assert outcome.ended == now
        news, events = news_of(outcome.updates, lambda told: told.num_tokens), outcome.events
        begun = outcome.begun
    mocked.engine.check()
    before = next_seq if events is None else events.next_seq - len(events.events)
    return Done(begun, now, spy.take(), news, published(events, before))


def story_of(engine: Engine, steps: list[Done]) -> Story:
    held = frozenset(unpack_hashes(engine.snapshot().hashes).tolist())
    return Story(steps, held, engine.next_seq)


def make_mocked(
    time: Callable[[], float],
    config: EngineConfig | None = None,
    *,
    num_blocks: int,
    max_multi_step: int = 1,
    timing: Timing = TIMING,
    block_size: int = SIZE,
    worker: str = "w0",
    **more: Any,
) -> MockedEngine:
    return MockedEngine(
        timing=timing,
        num_blocks=num_blocks,
        block_size=block_size,
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        clock=time,
        config=config,
        max_multi_step=max_multi_step,
        **more,
    )
