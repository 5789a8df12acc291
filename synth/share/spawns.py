"""Who spawns lines and who waits for them, as tables."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.synth.session.steps import Steps
from mallee.synth.share.tables import K, TableBuilder, Tables
from mallee.traces.numbers import Bools, Floats, Int32s, Ints

SIZE, PLACE, DISTANCE, SLACK = range(4)
_NONE: Final = -1
_SIBLINGS: Final = 0.2  # how far apart in the ranks of their durations


@dataclass(frozen=True, slots=True)
class SpawnLaw:
    """Of one kind of spawned lines."""

    kind: int
    above: int  # kind of the lines that spawn them
    is_fork: bool
    spawning: float  # lines that spawn, for each step that does
    joined: float  # share that is waited for
    table: tuple[
        int, int, int, int
    ]  # lines of a step; its place in its line; steps to the join; wait
    tables: Tables


@dataclass(frozen=True, slots=True)
class Hung:
    """By row, as in `Steps`; `gap_s` is longer where a join has to wait."""

    spawner: Int32s
    join: Int32s
    is_fork: Bools
    is_held: Bools
    gap_s: Floats


def fit_spawns(steps: Steps, kind: Ints, at_s: Floats) -> tuple[SpawnLaw, ...]:
    """`kind` of each step in the law's numbering, -1: left out. `at_s` when each began in its session."""
    heads = steps.heads.astype(np.int64)
    heads = heads[(kind[heads] >= 0) & (steps.parent_step[heads] >= 0)]
    last = np.zeros(int(steps.thread.max()) + 1, np.int64)
    last[steps.thread[steps.following < 0]] = np.flatnonzero(steps.following < 0)
    length = np.bincount(steps.thread)
    laws = []
    for each in np.unique(kind[heads]).tolist():
        mine = heads[kind[heads] == each]
        spawners, sizes = np.unique(steps.parent_step[mine], return_counts=True)
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
            sizes,
            steps.position[by] / np.maximum(1, length[steps.thread[by]] - 1),
            steps.position[joins] - steps.position[spawner],
            np.maximum(0.0, at_s[joins] - ends_s),
        )
        table = [builder.add(sample) if len(sample) >= K else _NONE for sample in samples]
        laws.append(
            SpawnLaw(
                kind=each,
                above=int(np.bincount(above).argmax()) if len(above) else 0,
                is_fork=bool(steps.is_fork[mine].mean() > 0.5),
                spawning=len(np.unique(steps.thread[spawners])) / len(spawners),
                joined=len(joined) / len(mine) if table[DISTANCE] != _NONE else 0.0,
                table=(table[0], table[1], table[2], table[3]),
                tables=builder.build(),
            )
        )
    return tuple(laws)


def hang(
    laws: tuple[SpawnLaw, ...],
    kind: Ints,
    starts: Ints,
    gap_s: Floats,
    rng: np.random.Generator,
) -> Hung:
    """Gives each spawned line a spawner. Line i of `kind[i]` has rows `starts[i]` to `starts[i + 1]`."""
    num = int(starts[-1])
    hung = Hung(
        np.full(num, _NONE, np.int32),
        np.full(num, _NONE, np.int32),
        np.zeros(num, np.bool_),
        np.zeros(num, np.bool_),
        gap_s.copy(),
    )
    for law in reversed(laws):  # a join that waits makes its line longer for those above
        lines = np.flatnonzero(kind == law.kind)
        took_s = np.add.reduceat(gap_s, starts[:-1])[lines]  # siblings take about as long
        rank = np.argsort(np.argsort(took_s, kind="stable"), kind="stable")
        lines = lines[np.argsort(rank + _SIBLINGS * len(lines) * rng.random(len(lines)))]
        above = np.flatnonzero((kind == law.above) & (np.diff(starts) > 1))
        if not len(above):
            above = np.flatnonzero(kind == law.above)
        sizes = _sizes(law, len(lines), rng)
        first_of = np.cumsum(sizes) - sizes
        spawning = max(1, round(law.spawning * len(sizes)))
        weights = np.diff(starts)[above].astype(np.float64)
        among = rng.choice(
            above, min(spawning, len(above)), replace=False, p=weights / weights.sum()
        )
        chosen = np.concatenate(
            [among[: len(sizes)], rng.choice(among, max(0, len(sizes) - len(among)))]
        )
        for batch, parent in zip(
            rng.permutation(len(sizes)).tolist(), chosen.tolist(), strict=True
        ):
            siblings = lines[first_of[batch] : first_of[batch] + sizes[batch]]
            _hang_batch(law, hung, starts, parent, siblings, rng)
    return hung


def _sizes(law: SpawnLaw, num_lines: int, rng: np.random.Generator) -> Ints:
    """Of batches, as many lines as there are in all."""
    if law.table[SIZE] == _NONE:
        return np.ones(num_lines, np.int64)
    drawn = law.tables.spread_out(law.table[SIZE], num_lines, rng)
    sums = np.cumsum(np.maximum(1, np.rint(drawn)).astype(np.int64))
    ends = np.minimum(sums[: int(np.searchsorted(sums, num_lines)) + 1], num_lines)
    return np.diff(ends, prepend=0)


def _hang_batch(
    law: SpawnLaw,
    hung: Hung,
    starts: Ints,
    parent: int,
    lines: Ints,
    rng: np.random.Generator,
) -> None:
    low, high = int(starts[parent]), int(starts[parent + 1])
    spawner = low + round(_one(law, PLACE, 0.0, rng) * max(0, high - low - 2))
    while spawner + 2 < high and (hung.spawner == spawner).any():
        spawner += 1
    heads = starts[lines]
    hung.spawner[heads] = spawner
    hung.is_fork[heads] = law.is_fork
    if spawner + 1 >= high or rng.random() >= law.joined:
        return
    join = min(high - 1, spawner + max(1, round(_one(law, DISTANCE, 1.0, rng))))
    hung.join[heads] = join
    hung.is_held[spawner:join] = True
    ends_s = []
    for line in lines.tolist():
        hung.is_held[starts[line] : starts[line + 1]] = True
        ends_s.append(float(hung.gap_s[starts[line] : starts[line + 1]].sum()))
    wanted_s = max(ends_s) + max(0.0, _one(law, SLACK, 0.0, rng))
    between_s = hung.gap_s[spawner + 1 : join + 1]
    between_s *= min(1.0, wanted_s / max(float(between_s.sum()), 1e-9))
    between_s[-1] += max(0.0, wanted_s - float(between_s.sum()))


def _one(law: SpawnLaw, which: int, otherwise: float, rng: np.random.Generator) -> float:
    table = law.table[which]
    return otherwise if table == _NONE else float(law.tables.spread_out(table, 1, rng)[0])
