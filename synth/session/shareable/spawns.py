"""The hierarchy of threads as tables: how many a step spawns, and where. Nothing waits for them."""

from dataclasses import dataclass

import numpy as np

from mallee.synth.session.shareable.tables import MINORS, Cells, K, cells_of, joined
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats, Ints

ROOT, SPAWNED, FORKED = range(3)


@dataclass(frozen=True, slots=True)
class SpawnLaw:
    """Kinds of threads, and which spawn which."""

    num_threads: Ints  # [kinds]
    cls: Ints  # [kinds] the commonest class
    role: Ints  # [kinds]
    above: Ints  # [kinds] the commonest kind that spawns it; its own of roots
    places: Cells  # by kind: threads that a step spawns, and where in its thread it is, from 0 to 1


def fit_spawns(steps: Steps, kind: Ints, role: Ints) -> SpawnLaw:
    """`kind` of each step, -1: left out; `role` of each kind."""
    heads = steps.heads[kind[steps.heads] >= 0]
    last = np.maximum(1, np.bincount(steps.thread) - 1)
    num = len(role)
    above = np.arange(num)
    keys, places = [], []
    for each in np.flatnonzero(role != ROOT).tolist():
        mine = heads[kind[heads] == each]
        by, together = np.unique(steps.parent_step[mine], return_counts=True)
        uses = np.bincount(kind[by][kind[by] >= 0], minlength=num)[:each]
        above[each] = uses.argmax()
        keys.append(np.full(len(by), each))
        places.append(np.stack([together, steps.position[by] / last[steps.thread[by]]], 1))
    return SpawnLaw(
        num_threads=np.bincount(kind[heads], minlength=num),
        cls=np.array([np.bincount(steps.cls[kind == each]).argmax() for each in range(num)]),
        role=role,
        above=above,
        places=Cells.fit(
            np.concatenate([np.zeros(0, np.int64), *keys]),
            np.concatenate([np.zeros((0, 2)), *places]),
        ),
    )


def attach(law: SpawnLaw, steps: Steps, kept: Floats, size: int, rng: np.random.Generator) -> None:
    """Give each spawned thread of `steps` a parent step; forked ones keep such shares of its context."""
    lengths, kind = np.bincount(steps.thread), steps.kind[steps.heads]
    for each in np.flatnonzero(law.role != ROOT).tolist():
        threads = rng.permutation(np.flatnonzero(kind == each))
        above = np.flatnonzero(kind == law.above[each])
        weights = np.where(lengths[above] > 1, lengths[above], 1e-9)
        together, place = law.places.spread_out(each, len(threads), rng).T
        group = np.repeat(
            np.arange(len(threads)), np.maximum(1, np.rint(together)).astype(np.int64)
        )
        parents = rng.choice(above, len(threads), p=weights / weights.sum())
        by = steps.heads[parents] + np.rint(place * np.maximum(0, lengths[parents] - 2))
        heads = steps.heads[threads]
        steps.parent_step[heads] = by[group[: len(threads)]]
        if law.role[each] == FORKED:
            full = steps.context[steps.parent_step[heads]] // size
            steps.is_fork[heads] = True
            steps.kept[heads] = np.clip(np.rint(kept[threads] * full), 0, full)
            steps.dropped[heads] = full - steps.kept[heads]


def kinds_of(steps: Steps) -> tuple[Ints, Ints]:
    """(kind of each thread, role of each kind).

    Threads of a kind have the same role and, about, the same class and depth in the hierarchy: where there
    are fewer than `K`, neighbours are joined. Threads of a role that has fewer, or that fewer steps
    spawn, have none: -1.
    """
    heads = steps.heads
    by = steps.parent_step[heads]
    role = np.where(by < 0, ROOT, np.where(steps.is_fork[heads], FORKED, SPAWNED))
    keys = role * MINORS + steps.kind[heads].astype(np.int64)
    begins = joined(keys, np.ones(len(keys)), K)
    if len(np.unique(by[by >= 0])) < K:
        begins = begins[begins < SPAWNED * MINORS]
    return cells_of(begins, keys), begins // MINORS
