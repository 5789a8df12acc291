"""The hierarchy of threads as tables: how many a step spawns, where, and what waits for them."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.session.shareable.tables import TableBuilder, Tables
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

SIZE, PLACE, DISTANCE, SLACK = range(4)
_SIBLINGS: Final = 0.2  # how far apart in the ranks of their durations


@dataclass(frozen=True, slots=True)
class SpawnLaw:
    """Of one kind of spawned threads."""

    kind: int
    above: int  # kind of the threads that spawn them
    is_fork: bool
    joined: float  # share that is waited for
    table: Ints  # threads of a step, its place in its thread, steps to the join, wait; -1: too few
    tables: Tables


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """By row, as in `Steps`; `gap_s` is longer where a join has to wait."""

    parent_step: Int32s
    join: Int32s
    is_fork: Bools
    is_held: Bools
    gap_s: Floats


def fit_spawns(steps: Steps, kind: Ints, at_s: Floats) -> tuple[SpawnLaw, ...]:
    """`kind` of each step, -1: left out; `at_s`: begin of each step in its session."""
    heads = steps.heads.astype(np.int64)
    heads = heads[(kind[heads] >= 0) & (steps.parent_step[heads] >= 0)]
    last = np.zeros(int(steps.thread.max()) + 1, np.int64)
    last[steps.thread[steps.following < 0]] = np.flatnonzero(steps.following < 0)
    length = np.bincount(steps.thread)
    laws = []
    for each in np.unique(kind[heads]).tolist():
        mine = heads[kind[heads] == each]
        by = steps.parent_step[mine]
        above = kind[by][(kind[by] >= 0) & (kind[by] < each)]
        joined = mine[steps.join[mine] >= 0]
        joins, batch = np.unique(steps.join[joined], return_inverse=True)
        ends_s = np.zeros(len(joins))
        np.maximum.at(ends_s, batch, at_s[last[steps.thread[joined]]])
        spawner = np.zeros(len(joins), np.int64)
        spawner[batch] = steps.parent_step[joined]
        builder = TableBuilder()
        samples = (
            np.unique(by, return_counts=True)[1],
            steps.position[by] / np.maximum(1, length[steps.thread[by]] - 1),
            steps.position[joins] - steps.position[spawner],
            np.maximum(0.0, at_s[joins] - ends_s),
        )
        table = np.array([builder.add_if(sample) for sample in samples])
        laws.append(
            SpawnLaw(
                kind=each,
                above=int(np.bincount(above).argmax()) if len(above) else 0,
                is_fork=bool(steps.is_fork[mine].mean() > 0.5),
                joined=len(joined) / len(mine) if table[DISTANCE] >= 0 else 0.0,
                table=table,
                tables=builder.build(),
            )
        )
    return tuple(laws)


def attach(
    laws: tuple[SpawnLaw, ...], kind: Ints, starts: Ints, gap_s: Floats, rng: np.random.Generator
) -> Hierarchy:
    """Give each spawned thread a parent step. Thread i has rows `starts[i]` to `starts[i + 1]`."""
    num = int(starts[-1])
    none = np.full(num, -1, np.int32)
    no = np.zeros(num, np.bool_)
    found = Hierarchy(none, none.copy(), no, no.copy(), gap_s.copy())
    for law in reversed(laws):  # a join that waits makes its thread longer for those above
        threads = np.flatnonzero(kind == law.kind)
        took_s = np.add.reduceat(gap_s, starts[:-1])[threads]  # siblings take about as long
        rank = np.argsort(np.argsort(took_s, kind="stable"), kind="stable")
        near = rank + _SIBLINGS * len(threads) * rng.random(len(threads))
        threads = threads[np.argsort(near)]
        above = np.flatnonzero((kind == law.above) & (np.diff(starts) > 1))
        if not len(above):
            above = np.flatnonzero(kind == law.above)
        weights = np.diff(starts)[above] / np.diff(starts)[above].sum()
        while len(threads):
            size = max(1, round(_one(law, SIZE, 1.0, rng)))
            parent = int(rng.choice(above, p=weights))
            _attach_batch(law, found, starts, parent, threads[:size], rng)
            threads = threads[size:]
    return found


def _attach_batch(
    law: SpawnLaw,
    found: Hierarchy,
    starts: Ints,
    parent: int,
    threads: Ints,
    rng: np.random.Generator,
) -> None:
    low, high = int(starts[parent]), int(starts[parent + 1])
    spawner = low + round(_one(law, PLACE, 0.0, rng) * max(0, high - low - 2))
    while spawner + 2 < high and (found.parent_step == spawner).any():
        spawner += 1
    heads = starts[threads]
    found.parent_step[heads] = spawner
    found.is_fork[heads] = law.is_fork
    if spawner + 1 >= high or rng.random() >= law.joined:
        return
    join = min(high - 1, spawner + max(1, round(_one(law, DISTANCE, 1.0, rng))))
    found.join[heads] = join
    found.is_held[spawner:join] = True
    wanted_s = 0.0
    for thread in threads.tolist():
        rows = slice(int(starts[thread]), int(starts[thread + 1]))
        found.is_held[rows] = True
        wanted_s = max(wanted_s, float(found.gap_s[rows].sum()))
    wanted_s += max(0.0, _one(law, SLACK, 0.0, rng))
    between_s = found.gap_s[spawner + 1 : join + 1]
    between_s *= min(1.0, wanted_s / max(float(between_s.sum()), 1e-9))
    between_s[-1] += max(0.0, wanted_s - float(between_s.sum()))


def _one(law: SpawnLaw, which: int, otherwise: float, rng: np.random.Generator) -> float:
    table = int(law.table[which])
    return otherwise if table < 0 else float(law.tables.spread_out(table, 1, rng)[0])
