"""The hierarchy of threads as tables: how many a step spawns, and where. Nothing waits for them."""

from dataclasses import dataclass

import numpy as np

from mallee.synth.session.shareable.tables import TableBuilder, Tables
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Ints


@dataclass(frozen=True, slots=True)
class SpawnLaw:
    """One kind of spawned threads. Tables are numbers; -1: of too few to tell."""

    kind: int
    above: int  # kind of the threads that spawn them
    is_fork: bool
    together: int  # table: threads that one step spawns
    place: int  # table: where in its thread a parent step is, from 0 to 1


def fit_spawns(steps: Steps, kind: Ints, builder: TableBuilder) -> tuple[SpawnLaw, ...]:
    """`kind` of each step, -1: left out."""
    heads = steps.heads[(kind[steps.heads] >= 0) & (steps.parent_step[steps.heads] >= 0)]
    last = np.maximum(1, np.bincount(steps.thread) - 1)
    laws = []
    for each in np.unique(kind[heads]).tolist():
        mine = heads[kind[heads] == each]
        by = steps.parent_step[mine]
        above = kind[by][(kind[by] >= 0) & (kind[by] < each)]
        laws.append(
            SpawnLaw(
                kind=each,
                above=int(np.bincount(above).argmax()) if len(above) else 0,
                is_fork=bool(steps.is_fork[mine].mean() > 0.5),
                together=builder.add(np.unique(by, return_counts=True)[1]),
                place=builder.add(steps.position[by] / last[steps.thread[by]]),
            )
        )
    return tuple(laws)


def attach(
    laws: tuple[SpawnLaw, ...], tables: Tables, steps: Steps, size: int, rng: np.random.Generator
) -> None:
    """Give each spawned thread of `steps` a parent step."""
    lengths, kind = np.bincount(steps.thread), steps.kind[steps.heads]
    for law in laws:
        heads = rng.permutation(steps.heads[kind == law.kind])
        above = np.flatnonzero(kind == law.above)
        weights = np.where(lengths[above] > 1, lengths[above], 1e-9)
        together = np.ones(len(heads), np.int64)
        if law.together >= 0:
            drawn = tables.spread_out(law.together, len(heads), rng)
            together = np.maximum(1, np.rint(drawn)).astype(np.int64)
        group = np.repeat(np.arange(len(heads)), together)[: len(heads)]
        parents = rng.choice(above, len(heads), p=weights / weights.sum())
        place = np.zeros(len(heads))
        if law.place >= 0:
            place = tables.spread_out(law.place, len(heads), rng)
        by = steps.heads[parents] + np.rint(place * np.maximum(0, lengths[parents] - 2))
        steps.parent_step[heads], steps.is_fork[heads] = by[group], law.is_fork
    forked = np.flatnonzero(steps.is_fork)  # they share with their parent step what is not dropped
    full = steps.context[steps.parent_step[forked]] // size
    steps.dropped[forked] = np.minimum(steps.dropped[forked], full)
    steps.kept[forked] = full - steps.dropped[forked]
    steps.dropped[steps.heads[~steps.is_fork[steps.heads]]] = 0
