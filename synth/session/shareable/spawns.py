"""The hierarchy of threads as tables: how many a step spawns, where, and what waits for them."""

from dataclasses import dataclass

import numpy as np

from mallee.synth.session.shareable.tables import TableBuilder, Tables
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats, Ints


@dataclass(frozen=True, slots=True)
class SpawnLaw:
    """One kind of spawned threads. Tables are numbers; -1: of too few to tell."""

    kind: int
    above: int  # kind of the threads that spawn them
    is_fork: bool
    joined: float  # share that is waited for
    together: int  # table: threads that one step spawns
    place: int  # table: where in its thread a parent step is, from 0 to 1
    distance: int  # table: steps from there to the join
    slack: int  # table: seconds from the last thread's last step to the join


def fit_spawns(
    steps: Steps, kind: Ints, at_s: Floats, builder: TableBuilder
) -> tuple[SpawnLaw, ...]:
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
        spawning = np.zeros(len(joins), np.int64)
        spawning[batch] = steps.parent_step[joined]
        distance = builder.add_if(steps.position[joins] - steps.position[spawning])
        laws.append(
            SpawnLaw(
                kind=each,
                above=int(np.bincount(above).argmax()) if len(above) else 0,
                is_fork=bool(steps.is_fork[mine].mean() > 0.5),
                joined=len(joined) / len(mine) if distance >= 0 else 0.0,
                together=builder.add_if(np.unique(by, return_counts=True)[1]),
                place=builder.add_if(
                    steps.position[by] / np.maximum(1, length[steps.thread[by]] - 1)
                ),
                distance=distance,
                slack=builder.add_if(np.maximum(0.0, at_s[joins] - ends_s)),
            )
        )
    return tuple(laws)


def attach(
    laws: tuple[SpawnLaw, ...], tables: Tables, steps: Steps, size: int, rng: np.random.Generator
) -> None:
    """Give each spawned thread of `steps` a parent step; gaps become longer where a join has to wait."""

    def one(table: int, otherwise: float) -> float:
        return otherwise if table < 0 else float(tables.spread_out(table, 1, rng)[0])

    lengths, kind = np.bincount(steps.thread), steps.kind[steps.heads]
    for law in reversed(laws):  # a join that waits makes its thread longer for those above
        threads = rng.permutation(np.flatnonzero(kind == law.kind))
        above = np.flatnonzero(kind == law.above)
        weights = np.where(lengths[above] > 1, lengths[above], 1e-9)
        parents = rng.choice(above, len(threads), p=weights / weights.sum()).tolist()
        while len(threads):
            siblings = threads[: max(1, round(one(law.together, 1.0)))]
            threads = threads[len(siblings) :]
            parent = parents.pop()
            low, high = int(steps.heads[parent]), int(steps.heads[parent] + lengths[parent])
            step = low + round(one(law.place, 0.0) * max(0, high - low - 2))
            heads = steps.heads[siblings]
            steps.parent_step[heads], steps.is_fork[heads] = step, law.is_fork
            if step + 1 >= high or rng.random() >= law.joined:
                continue
            join = min(high - 1, step + max(1, round(one(law.distance, 1.0))))
            steps.join[heads], steps.is_held[step:join] = join, True
            took_s = 0.0
            for head, length in zip(heads.tolist(), lengths[siblings].tolist(), strict=True):
                steps.is_held[head : head + length] = True
                took_s = max(took_s, float(steps.gap_s[head : head + length].sum()))
            between_s = steps.gap_s[step + 1 : join + 1]
            wanted_s = took_s + max(0.0, one(law.slack, 0.0))
            between_s *= min(1.0, wanted_s / max(float(between_s.sum()), 1e-9))
            between_s[-1] += max(0.0, wanted_s - float(between_s.sum()))
    forked = np.flatnonzero(steps.is_fork)  # they share with their parent step what is not dropped
    full = steps.context[steps.parent_step[forked]] // size
    steps.dropped[forked] = np.minimum(steps.dropped[forked], full)
    steps.kept[forked] = full - steps.dropped[forked]
    steps.dropped[steps.heads[~steps.is_fork[steps.heads]]] = 0
