"""The session model, which generates workloads like its learned source.

One *period* of generated traffic has every thread of the source once, recombined, at new times; endless
traffic is one period after another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from mallee.synth.core.arrivals import Starts, Turnstile
from mallee.synth.core.jitter import Ranks
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.streams import stream
from mallee.synth.session.emit import Queue, Rows
from mallee.synth.session.forest import Forest
from mallee.synth.session.recombine import recombine
from mallee.synth.session.steps import Steps
from mallee.synth.session.texts import Texts
from mallee.synth.session.walk import (
    Bases,
    Changes,
    Plan,
    seconds_left,
    walk_lengths,
    walk_times,
    walk_turns,
)
from mallee.traces.numbers import Floats, Int32s, Ints
from mallee.traces.workload import Request, Workload

_MOST_NEAR: Final = 16  # sessions begin about where they did: among so many,
_NEAR: Final = 1 / 16  # or such a part of them all


@dataclass(frozen=True)
class SessionModel:
    """A `Model` of sessions. See `fit.fit_session`.

    `cut_off` is None where the source's sessions all ended (none begins in its last tenth): its requests are
    then generated session by session to the end. Else it is, for the last step of each thread, the chance
    that the source's end cut the thread off, and as long a piece of endless traffic is generated.
    """

    name: str
    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    steps: Steps
    forest: Forest
    starts: Starts
    turnstile: Turnstile | None
    cut_off: Floats | None
    has_ids: bool
    has_edges: bool
    has_sessions: bool

    kind = "session"

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """`requests` requests in order of arrival; the same for the same seed, knobs and model.

        They carry sessions, waits and tool waits; `arrival_s` is the open loop's time.
        Raises ConfigError for a knob out of range.
        """
        turned = knobs.validate(requests)
        return Workload(
            name=f"{self.name}, generated",
            id_tokens=self.block_size,
            read=lambda: _Traffic(self, seed, turned).requests(requests),
            kind="agentic",
            note=f"session model of {self.name}, seed {seed}",
        )


class _Values(NamedTuple):
    """By row of a plan."""

    fresh: Ints
    output: Ints
    gap_s: Floats  # not yet divided by the knob `speedup`
    think_s: Floats


class _Traffic:
    """One pass over a generated workload."""

    def __init__(self, source: SessionModel, seed: int, knobs: Knobs) -> None:
        steps, starts = source.steps, source.starts
        self._source = source
        self._seed = seed
        self._knobs = knobs
        self._fresh = Ranks(steps.fresh.astype(np.float64))
        self._output = Ranks(steps.output.astype(np.float64))
        self._gap_s = Ranks(steps.gap_s)
        self._changes = _changes(source, knobs.prompt_len)
        begins_s = np.cumsum(starts.gaps_s) - starts.gaps_s
        self._left_s = seconds_left(steps, begins_s, starts.period_s)
        self._places = [] if source.turnstile is None else source.turnstile.opened()
        self._texts = Texts(source.forest, knobs.prefix_len, stream(seed, "texts"))
        self._num_sessions = 0
        self._num_rows = 0

    def requests(self, count: int) -> Iterator[Request]:
        """The first `count` requests."""
        has_ended = self._source.cut_off is None
        queue = Queue(self._source.classes, self._texts)
        for number in range(count):  # each period has a request at least
            queue.add(self._period(number, count - self._num_rows if has_ended else None))
            is_last = has_ended and self._num_rows >= count
            yield from queue.take(count, np.inf if is_last else self._next_s(number))
            if queue.num_taken >= count:
                return

    def _next_s(self, number: int) -> float:
        """No request of the period after `number` comes before."""
        if self._source.turnstile is not None:
            return min(self._places)[0] / self._knobs.speedup
        return (number + 1) * self._source.starts.period_s / self._knobs.speedup

    def _period(self, number: int, most: int | None) -> Rows:
        """With `most` only sessions that begin first, until they have so many requests."""
        source = self._source
        starts_rng, renewal_rng = (stream(self._seed, s, number) for s in ("starts", "renewal"))
        if number:
            self._texts.renew(renewal_rng)
        plan = recombine(
            source.steps,
            stream(self._seed, "plan", number),
            cut_off=source.cut_off,
            left_s=self._left_s,
        )
        begins = self._order(plan.root, starts_rng)
        slots_s = source.starts.period(starts_rng)[: len(begins)] + number * source.starts.period_s
        if most is not None:
            sizes = np.bincount(plan.root, np.diff(plan.starts), plan.num_threads)[begins]
            begins = begins[np.cumsum(sizes) - sizes < most]
            plan, begins = plan.sessions(begins, source.steps)
        values = self._values(plan.steps, stream(self._seed, "marks", number))
        since_s = walk_times(plan, values.gap_s)
        if source.turnstile is not None:
            durations_s = np.zeros(plan.num_threads)
            np.maximum.at(durations_s, plan.root[plan.thread], since_s)
            slots_s = source.turnstile.begins(self._places, durations_s[begins], starts_rng)
        begin_s, family = np.zeros(plan.num_threads), np.zeros(plan.num_threads, np.int64)
        begin_s[begins] = slots_s[: len(begins)]
        families = stream(self._seed, "families", number)
        family[begins] = families.integers(self._knobs.prefix_root, size=len(begins))
        at_s = (since_s + begin_s[plan.root][plan.thread]) / self._knobs.speedup
        return self._rows(plan, values, family[plan.root], at_s)

    def _order(self, root: Ints, rng: np.random.Generator) -> Ints:
        """Sessions, as their first threads, in the order of their begins: about that of the source."""
        roots = np.flatnonzero(root == np.arange(len(root)))
        reach = min(_MOST_NEAR, max(2.0, _NEAR * len(roots)))
        place = np.arange(len(roots))
        stretches = self._source.starts.stretches
        stretch = stretches[np.minimum(place, len(stretches) - 1)]
        return roots[np.lexsort((place + reach * rng.random(len(roots)), stretch))]

    def _values(self, picked: Int32s, rng: np.random.Generator) -> _Values:
        """Lengths and times near those of the source's steps `picked`, as the knobs have them."""
        steps, knobs = self._source.steps, self._knobs
        old = steps.fresh[picked]
        near = self._longer(picked, self._fresh.near(picked, rng))
        output = np.rint(self._output.near(picked, rng) * knobs.osl)
        near_s = self._gap_s.near(picked, rng)
        # steps that wait for one another stay in step, and so do those that were spawned together
        is_tied = steps.is_held[picked] | (steps.parent_step[picked] >= 0)
        gap_s = np.where(is_tied, steps.gap_s[picked], near_s)
        most_s = np.inf if self._source.has_edges else gap_s
        return _Values(
            fresh=np.where(old > 0, np.maximum(1, np.rint(near).astype(np.int64)), old),
            output=np.maximum(1, output).astype(np.int64),
            gap_s=np.where(steps.gap_s[picked] > 0, np.maximum(gap_s, 0.0), 0.0),
            think_s=np.minimum(steps.think_s[picked], most_s) / knobs.speedup,
        )

    def _longer(self, picked: Int32s, fresh: Floats) -> Floats:
        """Text that calls add, as the knob `prompt_len` has it.

        Kept blocks are counted back from the end of the context before. Its partial block counts as fresh
        though it was there: only the rest is new. See `walk.walk_lengths`.
        """
        factor = self._knobs.prompt_len
        if factor == 1.0:
            return fresh
        steps = self._source.steps
        kept, dropped = steps.kept[picked], steps.dropped[picked]
        goes_on = (steps.position[picked] > 0) & (kept > 0) & (dropped >= 0) & (dropped <= kept)
        before = steps.context[picked] - steps.added[picked]
        rest = np.where(goes_on, before % self._source.block_size, 0)
        longer: Floats = rest + factor * (fresh - rest)
        return longer

    def _rows(self, plan: Plan, values: _Values, family: Ints, at_s: Floats) -> Rows:
        """`family` of each thread."""
        source, steps, forest = self._source, self._source.steps, self._source.forest
        thread, heads = plan.thread, plan.heads
        template = steps.thread[heads]
        text = self._texts.roots(family, forest.chosen[template])
        blocks = self._texts.lengths(text)
        first = np.rint(forest.first[template] * self._knobs.prefix_len).astype(np.int64)
        is_whole = forest.first[template] == forest.depth[template]
        bases = Bases(blocks, np.where(is_whole, blocks, np.minimum(first, blocks)))
        lengths = walk_lengths(
            plan, self._changes, bases, values.fresh, source.block_size, source.rule == "ceil"
        )
        if not source.has_ids:
            none = np.zeros_like(lengths.tokens)
            lengths = lengths._replace(source=none - 1, shared=none, blocks=none, text=none)
        num, row = len(at_s), self._num_rows
        begins = plan.starts[:-1]
        previous = np.arange(num) - 1
        previous[begins] = plan.parent
        new = lengths.blocks - lengths.shared
        is_reset = lengths.shared <= lengths.text[begins][thread]
        is_reset[begins] = False
        join = np.full(num, -1, np.int64)
        join[plan.starts[1:] - 1] = plan.join
        _, session = np.unique(plan.root, return_inverse=True)
        session += self._num_sessions
        self._num_sessions = int(session.max(initial=-1)) + 1
        self._num_rows += num
        return Rows(
            at_s=at_s,
            turn=walk_turns(plan),
            number=np.full(num, -1),
            tokens=lengths.tokens,
            output=values.output,
            think_s=values.think_s,
            branches=steps.branches[plan.steps],
            cls=steps.cls[plan.steps],
            session=session[thread],
            previous=np.where(previous < 0, -1, previous + row),
            join=np.where(join < 0, -1, join + row),
            is_reset=is_reset,
            source=np.where(lengths.source < 0, -1, lengths.source + row),
            shared=lengths.shared,
            blocks=lengths.blocks,
            first_id=self._texts.take(int(new.sum())) + np.cumsum(new) - new,
            text=lengths.text,
            root=text[thread],
        )


def _changes(source: SessionModel, factor: float) -> Changes:
    """The changes of the source's steps; kept and dropped text is stretched as prompts are."""

    def longer(blocks: Int32s) -> Int32s:
        if factor == 1.0:
            return blocks
        return np.where(blocks > 0, np.rint(blocks * factor), blocks).astype(np.int32)

    steps = source.steps
    base = source.forest.first[steps.thread]
    common = np.minimum(steps.kept, base)
    return Changes(
        back=steps.back,
        kept=common + longer(steps.kept - common),
        dropped=longer(steps.dropped),
        added=steps.added,
        base=base,
    )
