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
from mallee.synth.session.forest import NO_SEGMENT
from mallee.synth.session.model import SessionModel
from mallee.synth.session.shareable.begins import BeginLaw, draw_begins, fit_begins
from mallee.synth.session.shareable.forest import ForestLaw, draw_forest, fit_forest_law
from mallee.synth.session.shareable.spawns import (
    FORKED,
    ROOT,
    SpawnLaw,
    attach,
    fit_spawns,
    kinds_of,
)
from mallee.synth.session.shareable.tables import K
from mallee.synth.session.shareable.threads import ThreadLaw, draw_threads, fit_threads


@dataclass(frozen=True, slots=True)
class Summary:
    """The shared tables of a session model. Kinds of threads are numbered anew, rare ones joined."""

    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    all_end: bool  # whether the source's sessions all ended
    has_ids: bool
    has_edges: bool
    has_sessions: bool
    threads: ThreadLaw
    spawns: SpawnLaw
    forests: tuple[ForestLaw, ForestLaw]  # of sessions, and of spawned threads
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
    of_thread, role = kinds_of(steps)
    kind = of_thread[steps.thread]
    spawns = fit_spawns(steps, kind, role)
    own = np.flatnonzero((of_thread >= 0) & ~steps.is_fork[heads])
    return drawn(
        Summary(
            block_size=model.block_size,
            rule=model.rule,
            classes=tuple(model.classes[i] for i in spawns.cls.tolist()),
            all_end=model.cut_off is None,
            has_ids=model.has_ids,
            has_edges=model.has_edges,
            has_sessions=model.has_sessions,
            threads=fit_threads(
                steps,
                kind,
                forest.depth,
                model.cut_off,
                size=model.block_size,
            ),
            spawns=spawns,
            forests=(
                fit_forest_law(forest, own[is_root[own]]),
                fit_forest_law(forest, own[~is_root[own]]),
            ),
            begins=fit_begins(model.starts.gaps_s),
        )
    )


def drawn(summary: Summary) -> SharedModel:
    """The model of a source drawn from the summary; the same for the same summary."""
    rng, size, spawns = stream(0, "shared source"), summary.block_size, summary.spawns
    kinds = np.repeat(np.arange(len(spawns.role)), spawns.num_threads)
    num_roots = int(spawns.num_threads[spawns.role == ROOT].sum())
    kinds[:num_roots] = rng.permutation(kinds[:num_roots])  # their kinds come first
    forest = draw_forest(summary.forests, rng)
    own = np.flatnonzero(spawns.role[kinds] != FORKED)
    chosen, depth = np.full(len(kinds), NO_SEGMENT, np.int32), np.zeros(len(kinds), np.int32)
    chosen[own], depth[own] = forest.chosen, forest.depth
    steps, kept = draw_threads(summary.threads, kinds, depth.astype(np.int64), size, rng)
    steps.gap_s[steps.heads[:num_roots]] = 0.0
    attach(spawns, steps, kept, size, rng)
    before = np.where(steps.position > 0, np.arange(len(steps)) - 1, steps.parent_step)
    service_s = 0.0 if summary.has_edges else BASE_S + TOKEN_S * steps.output[before]
    most_s = np.where(before >= 0, np.maximum(0.0, steps.gap_s - service_s), 0.0)
    return SharedModel(
        name="a shared model",
        block_size=size,
        rule=summary.rule,
        classes=summary.classes,
        steps=replace(
            steps,
            think_s=np.minimum(steps.think_s, most_s) if summary.has_edges else most_s,
            cls=steps.kind,
        ),
        forest=replace(forest, chosen=chosen, depth=depth, first=depth),
        starts=draw_begins(summary.begins, rng),
        turnstile=None,
        cut_off=None if summary.all_end else np.zeros(len(steps)),
        has_ids=summary.has_ids,
        has_edges=summary.has_edges,
        has_sessions=summary.has_sessions,
        summary=summary,
    )
