"""Shareable session models: tables of a source, and the source that is drawn from them.

The session walk needs steps, a forest and begins. A shareable model has only tables (`Summary`); from these a
source that never was is drawn, about as big, and generates as any learned source does.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.model import Model
from mallee.synth.core.pace import BASE_S, TOKEN_S
from mallee.synth.core.streams import stream
from mallee.synth.session.model import SessionModel
from mallee.synth.session.shareable.forest import ForestLaw, both, draw_forest, fit_forest_law
from mallee.synth.session.shareable.spawns import SpawnLaw, attach, fit_spawns
from mallee.synth.session.shareable.tables import K, Tables
from mallee.synth.session.shareable.threads import ThreadLaw, draw_threads, fit_threads
from mallee.synth.session.shareable.times import (
    TimesLaw,
    TurnstileLaw,
    draw_starts,
    draw_turnstile,
    fit_times,
    fit_turnstile_law,
)
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Floats, Int32s, Ints

_NAME: Final = "a shared model"


@dataclass(frozen=True, slots=True)
class Summary:
    """The shared tables of a session model. Kinds of threads are numbered anew, rare ones joined."""

    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    num_threads: Ints  # [kinds]
    is_spawned: Ints  # [kinds]
    all_end: bool  # whether the source's sessions all ended
    has_ids: bool
    has_edges: bool
    has_sessions: bool
    threads: ThreadLaw
    forest: ForestLaw
    spawned_forest: ForestLaw | None
    spawns: tuple[SpawnLaw, ...]
    starts: TimesLaw
    turnstile: TurnstileLaw | None


PARTS: Final = (Summary, ThreadLaw, Tables, ForestLaw, SpawnLaw, TimesLaw, TurnstileLaw)


@dataclass(frozen=True)
class SharedModel(SessionModel):
    """A session model of which only `summary` is known."""

    summary: Summary


def to_shareable(model: Model) -> SharedModel:
    """`model` without single requests. A model that is so already is returned as it is.

    Raises ConfigError if it is no session model, or of fewer than `K` sessions, which can't hide each other.
    """
    if isinstance(model, SharedModel):
        return model
    if not isinstance(model, SessionModel):
        raise ConfigError(
            f"a {type(model).__name__} can't be made shareable, only a session model of a trace without"
            " forks; save it whole"
        )
    return drawn(_summary(model))


def _summary(model: SessionModel) -> Summary:
    steps, forest = model.steps, model.forest
    heads = steps.heads
    is_root = steps.parent_step[heads] < 0
    if is_root.sum() < K:
        raise ConfigError(
            f"{model.name} has {is_root.sum()} sessions: {K} or more are needed for a shareable model;"
            " learn a longer trace, or save the model whole"
        )
    of_thread, spawned = _kinds(steps)
    own = np.flatnonzero((of_thread >= 0) & ~steps.is_fork[heads])
    kind = of_thread[steps.thread]
    own_after = 0 if model.has_sessions else model.block_size
    law = fit_threads(steps, kind, forest.depth, model.cut_off, own_after=own_after)
    roots, others = own[is_root[own]], own[~is_root[own]]
    return Summary(
        block_size=model.block_size,
        rule=model.rule,
        classes=tuple(model.classes[i] for i in np.unique(law.cls).tolist()),
        num_threads=np.bincount(of_thread[of_thread >= 0]),
        is_spawned=spawned,
        all_end=model.cut_off is None,
        has_ids=model.has_ids,
        has_edges=model.has_edges,
        has_sessions=model.has_sessions,
        threads=law,
        forest=fit_forest_law(forest, roots),
        spawned_forest=fit_forest_law(forest, others) if len(others) else None,
        spawns=fit_spawns(steps, kind, _at_s(steps)),
        starts=fit_times(model.starts.gaps_s),
        turnstile=fit_turnstile_law(model.turnstile),
    )


def _kinds(steps: Steps) -> tuple[Ints, Ints]:
    """(kind of each thread, whether each kind is spawned).

    Threads of a kind have the same class and depth in the hierarchy. Kinds of fewer than `K` threads are
    joined with the commonest like them (roots, spawned threads, forks); where even that has fewer: -1.
    """
    heads = steps.heads
    role = np.where(steps.parent_step[heads] < 0, 0, np.where(steps.is_fork[heads], 2, 1))
    if (role == 2).sum() < K:
        role[role == 2] = 1
    found = np.full(len(heads), -1, np.int64)
    spawned: list[int] = []
    for each in range(3):
        mine = np.flatnonzero(role == each)
        if len(mine) < K:
            continue
        own = steps.kind[heads][mine]
        counts = np.bincount(own)
        _, place = np.unique(np.where(counts[own] < K, counts.argmax(), own), return_inverse=True)
        found[mine] = len(spawned) + place
        spawned += [int(each > 0)] * (int(place.max()) + 1)
    return found, np.array(spawned, np.int64)


def _at_s(steps: Steps) -> Floats:
    """Begin of each step after its session's."""
    at_s = np.zeros(len(steps))
    for head in steps.heads.tolist():
        above, step = int(steps.parent_step[head]), head
        at_s[step] = at_s[above] + steps.gap_s[step] if above >= 0 else 0.0
        while (following := int(steps.following[step])) >= 0:
            at_s[following] = at_s[step] + steps.gap_s[following]
            step = following
    return at_s


def drawn(summary: Summary) -> SharedModel:
    """The model of a source drawn from the summary; the same for the same summary."""
    rng = stream(0, "shared source")
    kinds = np.repeat(np.arange(len(summary.num_threads)), summary.num_threads)
    is_spawned = summary.is_spawned[kinds] > 0
    kinds = np.concatenate([rng.permutation(kinds[~is_spawned]), kinds[is_spawned]])
    num_roots = int((~is_spawned).sum())
    forks = [law.kind for law in summary.spawns if law.is_fork]
    with_root = np.flatnonzero((np.arange(len(kinds)) < num_roots) | ~np.isin(kinds, forks))
    forest = draw_forest(summary.forest, num_roots, rng)
    if summary.spawned_forest is not None:
        below = draw_forest(summary.spawned_forest, len(with_root) - num_roots, rng)
        forest = both(forest, below)
    chosen, depth = np.full(len(kinds), -1, np.int32), np.zeros(len(kinds), np.int32)
    chosen[with_root], depth[with_root] = forest.chosen, forest.depth
    steps = _steps(summary, kinds, depth, rng)
    return SharedModel(
        name=_NAME,
        block_size=summary.block_size,
        rule=summary.rule,
        classes=summary.classes,
        steps=steps,
        forest=replace(forest, chosen=chosen, depth=depth, first=depth),
        starts=draw_starts(summary.starts, rng),
        turnstile=draw_turnstile(summary.turnstile, rng),
        cut_off=None if summary.all_end else np.zeros(len(steps)),
        has_ids=summary.has_ids,
        has_edges=summary.has_edges,
        has_sessions=summary.has_sessions,
        summary=summary,
    )


def _steps(summary: Summary, kinds: Ints, depth: Int32s, rng: np.random.Generator) -> Steps:
    law, size = summary.threads, summary.block_size
    rows = draw_threads(law, kinds, depth.astype(np.int64), size, rng)
    order = np.lexsort((rows.position, rows.thread))
    rows = rows.ordered(order)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows.thread, minlength=len(kinds)))])
    heads, kind = starts[:-1], kinds[rows.thread]
    rows.gap_s[heads[summary.is_spawned[kinds] == 0]] = 0.0
    tree = attach(summary.spawns, kinds, starts, rows.gap_s, rng)
    forked = np.flatnonzero(tree.is_fork)  # they share with their parent step what is not dropped
    full = rows.context[tree.parent_step[forked]] // size
    rows.kept[forked] = np.maximum(0, full - rows.dropped[forked])
    rows.dropped[:] = np.where(rows.position == 0, 0, rows.dropped)
    rows.dropped[forked] = full - rows.kept[forked]
    following = np.arange(1, len(order) + 1, dtype=np.int32)
    following[starts[1:] - 1] = -1
    before = np.arange(-1, len(order) - 1)
    before[heads] = tree.parent_step[heads]
    think_s = np.minimum(rows.think_s, tree.gap_s)
    if not summary.has_edges:
        service_s = BASE_S + TOKEN_S * rows.output[before]
        think_s = np.where(before >= 0, np.maximum(0.0, tree.gap_s - service_s), 0.0)
    branches = np.ones(len(order), np.int32)
    some = np.flatnonzero(rng.random(len(order)) < law.branching[kind])
    if len(some):
        branches[some] = np.maximum(2, np.rint(law.tables.spread_out(law.branches, len(some), rng)))
    _, cls = np.unique(law.cls, return_inverse=True)
    return Steps(
        heads=heads.astype(np.int32),
        following=following,
        position=rows.position.astype(np.int32),
        back=rows.back.astype(np.int32),
        kept=rows.kept.astype(np.int32),
        dropped=rows.dropped.astype(np.int32),
        fresh=rows.fresh,
        added=rows.added,
        context=rows.context,
        output=rows.output,
        gap_s=tree.gap_s,
        think_s=think_s,
        branches=branches,
        cls=cls.astype(np.int32)[kind],
        kind=kind.astype(np.int32),
        thread=rows.thread.astype(np.int32),
        parent_step=tree.parent_step,
        is_fork=tree.is_fork,
        join=tree.join,
        is_held=tree.is_held,
        time_bin=np.zeros(len(order), np.int32),
    )
