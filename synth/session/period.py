"""One period of generated traffic: every line of the source once, recombined, at new times."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mallee.synth.core.knobs import Knobs
from mallee.synth.session.marks import Marks, draw_marks
from mallee.synth.session.recombine import Plan, recombine
from mallee.synth.session.texts import Texts
from mallee.synth.session.walk import (
    Lengths,
    Places,
    places_of,
    seconds_left,
    walk_lengths,
    walk_times,
    walk_turns,
)
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

if TYPE_CHECKING:
    from mallee.synth.session.model import SessionModel

_MOST_NEAR: Final = 16  # sessions begin about where they did: among so many,
_NEAR: Final = 1 / 16  # or such a part of them all


@dataclass(frozen=True, slots=True)
class Period:
    """Requests in no order, one row each; indices are rows, -1 none."""

    at_s: Floats
    turn: Ints  # order of rows at one time: nobody comes before whom he waits for
    tokens: Ints
    output: Ints
    think_s: Floats
    branches: Int32s
    cls: Int32s
    session: Ints
    source: Ints  # row whose path it shares `shared` blocks of
    shared: Ints
    blocks: Ints
    first_id: Ints  # of the blocks after the shared ones
    text: Ints  # blocks that are of the forest's text
    root: Ints  # number of that text
    previous: Ints  # row before it in its line
    spawner: Int32s  # of the first row of a line: who spawned it
    is_reset: Bools  # keeps nothing of its line's context but the forest's text
    joined_starts: Ints
    joined: Ints  # rows that it waits for besides: last ones of lines

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True)
class _Lines:
    """A plan, and for each of its lines the line of the source it begins as."""

    plan: Plan
    donor: Ints


class PeriodMaker:
    """Makes the periods of one generation, one after another."""

    def __init__(self, model: "SessionModel", knobs: Knobs, texts: Texts) -> None:
        self._model = model
        self._knobs = knobs
        self._texts = texts
        self._num_sessions = 0
        self._num_made = 0
        steps = model.steps
        self._spawner = steps.parent_step[steps.heads]
        self._join = steps.join[steps.heads]
        begins_s = np.cumsum(model.starts.gaps_s) - model.starts.gaps_s
        self._left_s = seconds_left(steps, begins_s, model.starts.period_s)
        self._places = [] if model.turnstile is None else model.turnstile.opened()

    @property
    def next_s(self) -> float:
        """No request of the next period comes before."""
        model = self._model
        if model.turnstile is not None:
            return min(self._places)[0] / self._knobs.speedup
        return self._num_made * model.starts.period_s / self._knobs.speedup

    def make(self, rngs: dict[str, np.random.Generator], most: int | None) -> Period:
        """The next period. With `most` only sessions that begin first, until they have so many."""
        plan = recombine(
            self._model.steps,
            rngs["plan"],
            cut_off=self._model.cut_off,
            left_s=self._left_s,
        )
        lines = _Lines(plan, np.arange(plan.num_lines))
        root_of = self._roots(lines)
        begins = self._order(root_of, rngs["starts"])
        model = self._model
        slots = model.starts.period(rngs["starts"])[: len(begins)]
        slots = slots + self._num_made * model.starts.period_s
        if most is not None:
            sizes = _sizes(root_of, np.diff(lines.plan.starts))[begins]
            begins = begins[np.cumsum(sizes) - sizes < most]
        is_in = np.zeros(len(root_of) + 1, np.bool_)
        is_in[begins] = True
        kept = np.flatnonzero(is_in[root_of])  # lost ones have root -1: the last, which is not in
        place = np.full(len(root_of), -1)
        place[kept] = np.arange(len(kept))
        lines = _Lines(_taken(lines.plan, kept), lines.donor[kept])
        self._num_made += 1
        return self._period(lines, place[root_of[kept]], place[begins], slots, rngs)

    def _roots(self, lines: _Lines) -> Ints:
        """For each line the line of its session that has no spawner; -1 if the plan lost a spawner."""
        places = places_of(lines.plan, self._spawner[lines.donor], self._join[lines.donor])
        line_of = _line_of(lines.plan)
        root = np.arange(lines.plan.num_lines)
        for line in places.order.tolist():
            if self._spawner[lines.donor[line]] >= 0:
                above = int(places.spawner[line])
                root[line] = root[line_of[above]] if above >= 0 else -1
        return root

    def _order(self, root_of: Ints, rng: np.random.Generator) -> Ints:
        """Sessions, as their first lines, in the order of their begins: about that of the source."""
        roots = np.flatnonzero(root_of == np.arange(len(root_of)))
        reach = min(_MOST_NEAR, max(2.0, _NEAR * len(roots)))
        place = np.arange(len(roots))
        stretches = self._model.starts.stretches
        stretch = stretches[np.minimum(place, len(stretches) - 1)]
        return roots[np.lexsort((place + reach * rng.random(len(roots)), stretch))]

    def _period(
        self,
        lines: _Lines,
        root_of: Ints,
        begins: Ints,
        slots: Floats,
        rngs: dict[str, np.random.Generator],
    ) -> Period:
        """Of `lines`: `root_of` are their sessions' first lines, `begins` those in order of `slots`."""
        knobs = self._knobs
        plan, donor, picked = lines.plan, lines.donor, lines.plan.steps
        places = places_of(plan, self._spawner[donor], self._join[donor])
        marks = draw_marks(self._model, picked, knobs, rngs["marks"])
        since_s = walk_times(plan.starts, places.order, places.spawner, places.join, marks.gap_s)
        line_of = _line_of(plan)
        durations_s = np.zeros(plan.num_lines)
        np.maximum.at(durations_s, root_of[line_of], since_s)
        slot_s = slots[: len(begins)]
        turnstile = self._model.turnstile
        if turnstile is not None:
            slot_s = turnstile.begins(self._places, durations_s[begins], rngs["starts"])
        begin_s = np.zeros(plan.num_lines)
        begin_s[begins] = slot_s
        family = np.zeros(plan.num_lines, np.int64)
        family[begins] = rngs["families"].integers(knobs.prefix_root, size=len(begins))
        lengths, text = self._lengths(lines, places, family[root_of], marks)
        at_s = (since_s + begin_s[root_of][line_of]) / knobs.speedup
        return self._table(lines, root_of, places, marks, text, at_s, lengths)

    def _lengths(
        self, lines: _Lines, places: Places, family: Ints, marks: Marks
    ) -> tuple[Lengths, Ints]:
        """Lengths of all rows, and the forest's text of each line."""
        model, steps = self._model, self._model.steps
        plan, donor, picked = lines.plan, lines.donor, lines.plan.steps
        is_fork = steps.is_fork[steps.heads[donor]]
        chosen = np.where(is_fork, -1, model.forest.chosen[donor]).astype(np.int32)
        text = self._texts.roots(family, chosen)
        source_base = model.forest.first[steps.thread[picked]].astype(np.int64)
        blocks = self._texts.lengths(text)
        common = np.minimum(steps.kept[picked], source_base).astype(np.int32)
        found = walk_lengths(
            plan.starts,
            places.order,
            places.spawner,
            is_fork,
            steps.back[picked],
            common + self._scaled(steps.kept[picked] - common),
            self._scaled(steps.dropped[picked]),
            marks.fresh,
            steps.added[picked],
            blocks,
            self._first_blocks(donor, blocks),
            source_base,
            model.block_size,
            model.rule == "ceil",
        )
        lengths = Lengths(*found)
        return (lengths if model.has_ids else lengths.without_ids()), text

    def _first_blocks(self, donor: Ints, blocks: Ints) -> Ints:
        """Of each line's `blocks` of the forest's text, how many its first request has."""
        forest = self._model.forest
        first = np.rint(forest.first[donor] * self._knobs.prefix_len).astype(np.int64)
        return np.where(
            forest.first[donor] == forest.depth[donor], blocks, np.minimum(first, blocks)
        )

    def _scaled(self, blocks: Int32s) -> Int32s:
        """Kept and dropped text is stretched as prompts are; -1 has a meaning of its own."""
        if self._knobs.prompt_len == 1.0:
            return blocks
        return np.where(blocks > 0, np.rint(blocks * self._knobs.prompt_len), blocks).astype(
            np.int32
        )

    def _table(
        self,
        lines: _Lines,
        root_of: Ints,
        places: Places,
        marks: Marks,
        text: Ints,
        at_s: Floats,
        lengths: Lengths,
    ) -> Period:
        plan, steps = lines.plan, self._model.steps
        source, join = lengths.source, places.join
        num = len(at_s)
        line_of = _line_of(plan)
        is_first = np.zeros(num, np.bool_)
        is_first[plan.starts[:-1]] = True
        new = lengths.blocks - lengths.shared
        first_id = self._texts.take(int(new.sum())) + np.cumsum(new) - new
        waiting = np.flatnonzero(join >= 0)
        waiting = waiting[np.argsort(join[waiting], kind="stable")]
        joined_starts = np.zeros(num + 1, np.int64)
        np.cumsum(np.bincount(join[waiting], minlength=num), out=joined_starts[1:])
        _, session = np.unique(root_of, return_inverse=True)
        sessions = self._num_sessions + session.astype(np.int64)
        self._num_sessions = int(sessions.max(initial=-1)) + 1
        return Period(
            at_s=at_s,
            turn=walk_turns(plan.starts, places.order, places.spawner, places.join),
            tokens=lengths.tokens,
            output=marks.output,
            think_s=marks.think_s,
            branches=marks.branches,
            cls=steps.cls[plan.steps],
            session=sessions[line_of],
            source=source,
            shared=lengths.shared,
            blocks=lengths.blocks,
            first_id=first_id,
            text=lengths.text,
            root=text[line_of],
            previous=np.where(is_first, -1, np.arange(num) - 1),
            spawner=np.where(is_first, places.spawner[line_of], -1).astype(np.int32),
            is_reset=~is_first & (lengths.shared <= lengths.text[plan.starts[:-1]][line_of]),
            joined_starts=joined_starts,
            joined=plan.starts[1:][waiting] - 1,
        )


def _line_of(plan: Plan) -> Ints:
    return np.repeat(np.arange(plan.num_lines), np.diff(plan.starts))


def _sizes(root_of: Ints, counts: Ints) -> Ints:
    known = root_of >= 0
    sizes = np.zeros(len(root_of), np.int64)
    np.add.at(sizes, root_of[known], counts[known])
    return sizes


def _taken(plan: Plan, picked: Ints) -> Plan:
    """Lines `picked` of a plan, some perhaps twice."""
    counts = np.diff(plan.starts)[picked]
    starts = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(plan.starts[:-1][picked] - starts[:-1], counts) + np.arange(starts[-1])
    return Plan(starts, plan.steps[rows])
