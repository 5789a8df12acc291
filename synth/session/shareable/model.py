"""Shareable session models: tables of a source, and the source that is drawn from them.

The session walk needs steps, a forest and begins. A shareable model has only tables (`Summary`); from these a
source that never was is drawn, about as big, and generates as any learned source does.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.model import Model
from mallee.synth.core.pace import BASE_S, TOKEN_S
from mallee.synth.core.streams import stream
from mallee.synth.session.model import SessionModel
from mallee.synth.session.shareable.begins import BeginLaw, draw_begins, fit_begins
from mallee.synth.session.shareable.forest import ForestLaw, draw_forest, fit_forest_law
from mallee.synth.session.shareable.spawns import SpawnLaw, attach, fit_spawns
from mallee.synth.session.shareable.tables import K, TableBuilder, Tables
from mallee.synth.session.shareable.threads import ThreadLaw, draw_threads, fit_threads
from mallee.synth.session.steps import Steps
from mallee.traces.numbers import Ints


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
    tables: Tables
    threads: ThreadLaw
    forests: tuple[ForestLaw, ForestLaw]  # of sessions, and of spawned threads
    spawns: tuple[SpawnLaw, ...]
    begins: BeginLaw


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
    steps, forest = model.steps, model.forest
    heads = steps.heads
    is_root = steps.parent_step[heads] < 0
    if is_root.sum() < K:
        raise ConfigError(
            f"{model.name} has {is_root.sum()} sessions: {K} or more are needed for a shareable model;"
            " learn a longer trace, or save the model whole"
        )
    of_thread, spawned = _kinds(steps)
    kind = of_thread[steps.thread]
    own = np.flatnonzero((of_thread >= 0) & ~steps.is_fork[heads])
    builder = TableBuilder()
    law = fit_threads(
        steps, kind, forest.depth, model.cut_off,
        size=model.block_size, own_after=0 if model.has_sessions else model.block_size,
        builder=builder,
    )  # fmt: skip
    return drawn(
        Summary(
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
            forests=(
                fit_forest_law(forest, own[is_root[own]], builder),
                fit_forest_law(forest, own[~is_root[own]], builder),
            ),
            spawns=fit_spawns(steps, kind, builder),
            begins=fit_begins(model.starts.gaps_s, model.turnstile, builder),
            tables=builder.build(),
        )
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


def drawn(summary: Summary) -> SharedModel:
    """The model of a source drawn from the summary; the same for the same summary."""
    rng = stream(0, "shared source")
    kinds = np.repeat(np.arange(len(summary.num_threads)), summary.num_threads)
    is_spawned = summary.is_spawned[kinds] > 0
    kinds = np.concatenate([rng.permutation(kinds[~is_spawned]), kinds[is_spawned]])
    num_roots = int((~is_spawned).sum())
    forks = [law.kind for law in summary.spawns if law.is_fork]
    own = np.flatnonzero((np.arange(len(kinds)) < num_roots) | ~np.isin(kinds, forks))
    forest = draw_forest(summary.forests, summary.tables, rng)
    chosen, depth = np.full(len(kinds), -1, np.int32), np.zeros(len(kinds), np.int32)
    chosen[own], depth[own] = forest.chosen, forest.depth
    size = summary.block_size
    steps = draw_threads(summary.threads, summary.tables, kinds, depth.astype(np.int64), size, rng)
    steps.gap_s[steps.heads[:num_roots]] = 0.0
    attach(summary.spawns, summary.tables, steps, size, rng)
    before = np.where(steps.position > 0, np.arange(len(steps)) - 1, steps.parent_step)
    service_s = 0.0 if summary.has_edges else BASE_S + TOKEN_S * steps.output[before]
    most_s = np.where(before >= 0, np.maximum(0.0, steps.gap_s - service_s), 0.0)
    think_s = np.minimum(steps.think_s, most_s) if summary.has_edges else most_s
    starts, turnstile = draw_begins(summary.begins, summary.tables, rng)
    return SharedModel(
        name="a shared model",
        block_size=size,
        rule=summary.rule,
        classes=summary.classes,
        steps=replace(steps, think_s=think_s),
        forest=replace(forest, chosen=chosen, depth=depth, first=depth),
        starts=starts,
        turnstile=turnstile,
        cut_off=None if summary.all_end else np.zeros(len(steps)),
        has_ids=summary.has_ids,
        has_edges=summary.has_edges,
        has_sessions=summary.has_sessions,
        summary=summary,
    )
