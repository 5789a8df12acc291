"""One period of generated traffic: every thread of the source once, recombined, at new times."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.core.knobs import Knobs
from mallee.synth.session.learned import Learned
from mallee.synth.session.recombine import recombine
from mallee.synth.session.texts import Texts
from mallee.synth.session.values import Values, draw_values
from mallee.synth.session.walk import (
    Bases,
    Changes,
    Lengths,
    Paths,
    Places,
    Plan,
    places_of,
    seconds_left,
    walk_lengths,
    walk_times,
    walk_turns,
)
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

_MOST_NEAR: Final = 16  # sessions begin about where they did: among so many,
_NEAR: Final = 1 / 16  # or such a part of them all


@dataclass(frozen=True, slots=True)
class Period:
    """Requests in no order, one row each; indices are rows, -1 none."""

    at_s: Floats
    turn: Ints  # order of rows at one time: each after those it waits for
    tokens: Ints
    output: Ints
    think_s: Floats
    branches: Int32s
    cls: Int32s
    session: Ints
    paths: Paths
    previous: Ints  # row before it in its thread
    parent: Int32s  # of the first row of a thread
    is_reset: Bools  # keeps nothing of its thread's context but the forest's text
    joined_starts: Ints
    joined: Ints  # rows that it waits for besides: last ones of threads

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class _Threads:
    """A plan, and for each of its threads the thread of the source that is its template."""

    plan: Plan
    template: Ints
    places: Places
    root: Ints  # of each thread the thread of its session without a parent


class PeriodMaker:
    """Makes the periods of one generation, one after another."""

    def __init__(self, source: Learned, knobs: Knobs, texts: Texts) -> None:
        self._source = source
        self._knobs = knobs
        self._texts = texts
        self._num_sessions = 0
        self._num_made = 0
        steps = source.steps
        self._parent_step = steps.parent_step[steps.heads]
        self._join = steps.join[steps.heads]
        begins_s = np.cumsum(source.starts.gaps_s) - source.starts.gaps_s
        self._left_s = seconds_left(steps, begins_s, source.starts.period_s)
        self._places = [] if source.turnstile is None else source.turnstile.opened()

    @property
    def next_s(self) -> float:
        """No request of the next period comes before."""
        if self._source.turnstile is not None:
            return min(self._places)[0] / self._knobs.speedup
        return self._num_made * self._source.starts.period_s / self._knobs.speedup

    def make(self, rngs: dict[str, np.random.Generator], most: int | None) -> Period:
        """The next period. With `most` only sessions that begin first, until they have so many requests."""
        source = self._source
        plan = recombine(source.steps, rngs["plan"], cut_off=source.cut_off, left_s=self._left_s)
        template = np.arange(plan.num_threads)
        root = self._roots(plan)
        begins = self._order(root, rngs["starts"])
        slots_s = source.starts.period(rngs["starts"])[: len(begins)]
        slots_s = slots_s + self._num_made * source.starts.period_s
        if most is not None:
            sizes = np.bincount(root[root >= 0], np.diff(plan.starts)[root >= 0], len(root))[begins]
            begins = begins[np.cumsum(sizes) - sizes < most]
        is_in = np.zeros(len(root) + 1, np.bool_)
        is_in[begins] = True
        kept = np.flatnonzero(is_in[root])  # lost ones have root -1: the last, which is not in
        place = np.full(len(root), -1)
        place[kept] = np.arange(len(kept))
        plan = _taken(plan, kept)
        places = places_of(plan, self._parent_step[kept], self._join[kept])
        threads = _Threads(plan, template[kept], places, place[root[kept]])
        period = self._period(threads, place[begins], slots_s[: len(begins)], rngs)
        self._num_made += 1
        return period

    def _roots(self, plan: Plan) -> Ints:
        """For each thread the thread of its session without a parent; -1 if the plan lost the parent."""
        places = places_of(plan, self._parent_step, self._join)
        thread_of = plan.thread_of
        root = np.arange(plan.num_threads)
        for thread in places.order.tolist():
            if self._parent_step[thread] >= 0:
                above = int(places.parent[thread])
                root[thread] = root[thread_of[above]] if above >= 0 else -1
        return root

    def _order(self, root: Ints, rng: np.random.Generator) -> Ints:
        """Sessions, as their first threads, in the order of their begins: about that of the source."""
        roots = np.flatnonzero(root == np.arange(len(root)))
        reach = min(_MOST_NEAR, max(2.0, _NEAR * len(roots)))
        place = np.arange(len(roots))
        stretches = self._source.starts.stretches
        stretch = stretches[np.minimum(place, len(stretches) - 1)]
        return roots[np.lexsort((place + reach * rng.random(len(roots)), stretch))]

    def _period(
        self,
        threads: _Threads,
        begins: Ints,
        slots_s: Floats,
        rngs: dict[str, np.random.Generator],
    ) -> Period:
        """`begins` are the sessions' first threads in the order of `slots_s`."""
        plan, places, root = threads.plan, threads.places, threads.root
        knobs, turnstile = self._knobs, self._source.turnstile
        values = draw_values(self._source, plan.steps, knobs, rngs["marks"])
        since_s = walk_times(plan, places, values.gap_s)
        thread_of = plan.thread_of
        if turnstile is not None:
            durations_s = np.zeros(plan.num_threads)
            np.maximum.at(durations_s, root[thread_of], since_s)
            slots_s = turnstile.begins(self._places, durations_s[begins], rngs["starts"])
        begin_s, family = np.zeros(plan.num_threads), np.zeros(plan.num_threads, np.int64)
        begin_s[begins] = slots_s
        family[begins] = rngs["families"].integers(knobs.prefix_root, size=len(begins))
        lengths, text = self._lengths(threads, family[root], values)
        at_s = (since_s + begin_s[root][thread_of]) / knobs.speedup
        return self._table(threads, values, text, at_s, lengths)

    def _lengths(self, threads: _Threads, family: Ints, values: Values) -> tuple[Lengths, Ints]:
        """Lengths of all rows, and the forest's text of each thread."""
        source, steps, forest = self._source, self._source.steps, self._source.forest
        template, picked = threads.template, threads.plan.steps
        is_fork = steps.is_fork[steps.heads[template]]
        chosen = np.where(is_fork, -1, forest.chosen[template]).astype(np.int32)
        text = self._texts.roots(family, chosen)
        blocks = self._texts.lengths(text)
        first = np.rint(forest.first[template] * self._knobs.prefix_len).astype(np.int64)
        is_whole = forest.first[template] == forest.depth[template]
        source_base = forest.first[steps.thread[picked]].astype(np.int64)
        common = np.minimum(steps.kept[picked], source_base).astype(np.int32)
        found = walk_lengths(
            threads.plan,
            threads.places,
            Changes(
                back=steps.back[picked],
                kept=common + self._scaled(steps.kept[picked] - common),
                dropped=self._scaled(steps.dropped[picked]),
                fresh=values.fresh,
                added=steps.added[picked],
                source_base=source_base,
            ),
            Bases(is_fork, blocks, np.where(is_whole, blocks, np.minimum(first, blocks))),
            source.block_size,
            source.rule == "ceil",
        )
        return (found if source.has_ids else found.without_ids()), text

    def _scaled(self, blocks: Int32s) -> Int32s:
        """Kept and dropped text is stretched as prompts are; -1 has a meaning of its own."""
        if self._knobs.prompt_len == 1.0:
            return blocks
        longer = np.where(blocks > 0, np.rint(blocks * self._knobs.prompt_len), blocks)
        return longer.astype(np.int32)

    def _table(
        self, threads: _Threads, values: Values, text: Ints, at_s: Floats, lengths: Lengths
    ) -> Period:
        plan, places, steps = threads.plan, threads.places, self._source.steps
        num, thread_of = len(at_s), plan.thread_of
        is_first = np.zeros(num, np.bool_)
        is_first[plan.starts[:-1]] = True
        new = lengths.blocks - lengths.shared
        first_id = self._texts.take(int(new.sum())) + np.cumsum(new) - new
        waiting = np.flatnonzero(places.join >= 0)
        waiting = waiting[np.argsort(places.join[waiting], kind="stable")]
        joined_starts = np.zeros(num + 1, np.int64)
        np.cumsum(np.bincount(places.join[waiting], minlength=num), out=joined_starts[1:])
        _, session = np.unique(threads.root, return_inverse=True)
        sessions = self._num_sessions + session.astype(np.int64)
        self._num_sessions = int(sessions.max(initial=-1)) + 1
        return Period(
            at_s=at_s,
            turn=walk_turns(plan, places),
            tokens=lengths.tokens,
            output=values.output,
            think_s=values.think_s,
            branches=steps.branches[plan.steps],
            cls=steps.cls[plan.steps],
            session=sessions[thread_of],
            paths=Paths(
                source=lengths.source,
                shared=lengths.shared,
                blocks=lengths.blocks,
                first_id=first_id,
                text=lengths.text,
                root=text[thread_of],
            ),
            previous=np.where(is_first, -1, np.arange(num) - 1),
            parent=np.where(is_first, places.parent[thread_of], -1).astype(np.int32),
            is_reset=~is_first & (lengths.shared <= lengths.text[plan.starts[:-1]][thread_of]),
            joined_starts=joined_starts,
            joined=plan.starts[1:][waiting] - 1,
        )


def _taken(plan: Plan, picked: Ints) -> Plan:
    """Threads `picked` of a plan."""
    counts = np.diff(plan.starts)[picked]
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(plan.starts[:-1][picked] - starts[:-1], counts) + np.arange(starts[-1])
    return Plan(starts, plan.steps[rows])
