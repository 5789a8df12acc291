"""Session models without the trace: tables of it, and the donors that are drawn from them.

What recombination needs is steps, a forest and begins, as if of a source. A shareable model has only tables
of the source (`Tally`); from these, with a seed that is kept with them, such a source is drawn that
never was, about as big, and a session model of it generates as any other does.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.pace import BASE_S, TOKEN_S
from mallee.synth.core.streams import stream
from mallee.synth.session.model import SessionModel
from mallee.synth.session.steps import Steps
from mallee.synth.share.chances import Chances
from mallee.synth.share.choice import closest_seed
from mallee.synth.share.copula import Copula
from mallee.synth.share.draw import DrawnSteps, draw_steps
from mallee.synth.share.forest import ForestLaw, both, draw_forest, fit_forest_law
from mallee.synth.share.kinds import kinds_given, kinds_of, shares_by_depth
from mallee.synth.share.spawns import Hung, SpawnLaw, fit_spawns, hang
from mallee.synth.share.steps import DROPPED, HEAD, KEPT, LineLaw, fit_lines
from mallee.synth.share.tables import K, Tables
from mallee.synth.share.times import (
    TimesLaw,
    TurnstileLaw,
    draw_starts,
    draw_turnstile,
    fit_times,
    fit_turnstile_law,
)
from mallee.traces.numbers import Floats, Int32s, Ints

if TYPE_CHECKING:
    from mallee.synth.core.model import Model

_NAME: Final = "a shared model"


@dataclass(frozen=True, slots=True)
class Tally:
    """What is shared of a session model. Kinds of lines are numbered anew, rare ones joined."""

    seed: int
    block_size: int
    rule: Literal["floor", "ceil"]
    classes: tuple[str, ...]
    num_lines: Ints  # [kinds]
    sort: Ints  # [kinds] what lines they are; kinds of one sort differ in how long they grow
    by_depth: Floats  # [kinds, context bins] shares of their sort, given the forest's part
    is_spawned: Ints  # [kinds]
    all_end: bool  # whether the source's sessions all ended
    has_ids: bool
    has_edges: bool
    has_sessions: bool
    lines: LineLaw
    forest: ForestLaw
    spawned_forest: ForestLaw | None
    spawns: tuple[SpawnLaw, ...]
    starts: TimesLaw
    turnstile: TurnstileLaw | None


PARTS: Final = (
    Tally, LineLaw, Chances, Copula, Tables, ForestLaw, SpawnLaw, TimesLaw, TurnstileLaw,
)  # fmt: skip


@dataclass(frozen=True)
class SharedModel(SessionModel):
    """A session model of which nothing but `tally` is known."""

    tally: Tally

    @staticmethod
    def drawn(tally: Tally) -> "SharedModel":
        """The same for the same tally."""
        return _drawn(tally)


def to_shareable(model: "Model") -> SharedModel:
    """`model` without what is known of single requests. A model that is so already is returned as it is.

    Raises ConfigError if it is no session model, or of fewer than `K` sessions, which can't hide each other.
    """
    if isinstance(model, SharedModel):
        return model
    if not isinstance(model, SessionModel):
        raise ConfigError(
            f"a {type(model).__name__} can't be made shareable, only a session model of a trace without"
            " forks; save it whole"
        )
    tally = _tally(model)
    seed = closest_seed(model, lambda seed: _drawn(replace(tally, seed=seed)))
    return _drawn(replace(tally, seed=seed))


def _tally(model: SessionModel) -> Tally:
    steps, forest = model.steps, model.forest
    heads = steps.heads
    of_line, sorts, spawned = kinds_of(steps)
    num_roots = int((steps.parent_step[heads] < 0).sum())
    if num_roots < K:
        raise ConfigError(
            f"{model.name} has {num_roots} sessions: {K} or more are needed for a shareable model;"
            " learn a longer trace, or save the model whole"
        )
    rng = stream(0, "tally")
    kind = of_line[steps.thread]
    own = np.flatnonzero((of_line >= 0) & ~steps.is_fork[heads])
    is_root = steps.parent_step[heads[own]] < 0
    lines = fit_lines(
        steps, kind, forest.depth, model.cut_off, rng,
        own_after=0 if model.has_sessions else model.block_size,
    )  # fmt: skip
    return Tally(
        seed=0,
        block_size=model.block_size,
        rule=model.rule,
        classes=tuple(model.classes[i] for i in np.unique(lines.cls).tolist()),
        num_lines=np.bincount(of_line[of_line >= 0]),
        sort=sorts,
        by_depth=shares_by_depth(of_line, sorts, forest.depth),
        is_spawned=spawned,
        all_end=model.cut_off is None,
        has_ids=model.has_ids,
        has_edges=model.has_edges,
        has_sessions=model.has_sessions,
        lines=lines,
        forest=fit_forest_law(forest, own[is_root]),
        spawned_forest=None if is_root.all() else fit_forest_law(forest, own[~is_root]),
        spawns=fit_spawns(steps, np.where(kind >= 0, sorts[kind], -1), _at_s(steps)),
        starts=fit_times(model.starts.gaps_s, rng),
        turnstile=fit_turnstile_law(model.turnstile, rng),
    )


def _at_s(steps: Steps) -> Floats:
    """When each step began after its session did."""
    at_s = np.zeros(len(steps))
    for head in steps.heads.tolist():
        above = int(steps.parent_step[head])
        step = head
        at_s[step] = at_s[above] + steps.gap_s[step] if above >= 0 else 0.0
        while (following := int(steps.following[step])) >= 0:
            at_s[following] = at_s[step] + steps.gap_s[following]
            step = following
    return at_s


def _drawn(tally: Tally) -> SharedModel:
    rng = stream(tally.seed, "donors")
    sorts = np.repeat(tally.sort, tally.num_lines)
    is_spawned = np.repeat(tally.is_spawned, tally.num_lines) > 0
    num_roots = int((~is_spawned).sum())
    sorts = np.concatenate([rng.permutation(sorts[~is_spawned]), sorts[is_spawned]])
    forks = [law.kind for law in tally.spawns if law.is_fork]
    is_own = ~np.isin(sorts[num_roots:], forks)
    forest = draw_forest(tally.forest, num_roots, rng)
    if tally.spawned_forest is not None:
        below = draw_forest(tally.spawned_forest, int(is_own.sum()), rng)
        forest = both(forest, below)
    chosen = np.full(len(sorts), -1, np.int32)
    depth = np.zeros(len(sorts), np.int32)
    with_root = np.concatenate([np.arange(num_roots), num_roots + np.flatnonzero(is_own)])
    chosen[with_root], depth[with_root] = forest.chosen, forest.depth
    steps = _steps(tally, kinds_given(tally.sort, tally.by_depth, sorts, depth, rng), depth, rng)
    return SharedModel(
        name=_NAME,
        block_size=tally.block_size,
        rule=tally.rule,
        classes=tally.classes,
        steps=steps,
        forest=replace(forest, chosen=chosen, depth=depth, first=depth),
        starts=draw_starts(tally.starts, rng),
        turnstile=draw_turnstile(tally.turnstile, rng),
        cut_off=None if tally.all_end else np.zeros(len(steps)),
        has_ids=tally.has_ids,
        has_edges=tally.has_edges,
        has_sessions=tally.has_sessions,
        tally=tally,
    )


def _steps(tally: Tally, kinds: Ints, depth: Int32s, rng: np.random.Generator) -> Steps:
    drawn = draw_steps(tally.lines, kinds, depth.astype(np.int64), tally.block_size, rng)
    order = np.lexsort((drawn.position, drawn.line))
    starts = np.concatenate([[0], np.cumsum(np.bincount(drawn.line, minlength=len(kinds)))])
    line, output, gap_s = drawn.line[order], drawn.output[order], drawn.gap_s[order].copy()
    heads = starts[:-1]
    gap_s[heads[tally.is_spawned[kinds] == 0]] = 0.0
    hung = hang(tally.spawns, tally.sort[kinds], starts, gap_s, rng)
    following = np.arange(1, len(order) + 1, dtype=np.int32)
    following[starts[1:] - 1] = -1
    _, cls = np.unique(tally.lines.cls, return_inverse=True)
    kept, dropped, fresh = _lengths(tally, kinds, drawn, order, hung, rng)
    return Steps(
        heads=heads.astype(np.int32),
        following=following,
        position=drawn.position[order].astype(np.int32),
        back=drawn.back[order].astype(np.int32),
        kept=kept,
        dropped=dropped,
        fresh=fresh,
        added=drawn.added[order],
        context=drawn.context[order],
        output=output,
        gap_s=hung.gap_s,
        think_s=_think_s(tally, hung.gap_s, drawn.think_s[order], output, heads, hung.spawner),
        branches=_branches(tally.lines, kinds[line], rng),
        cls=cls.astype(np.int32)[kinds][line],
        kind=tally.sort[kinds[line]].astype(np.int32),
        thread=line.astype(np.int32),
        parent_step=hung.spawner,
        is_fork=hung.is_fork,
        join=hung.join,
        is_held=hung.is_held,
        time_bin=np.zeros(len(order), np.int32),
    )


def _lengths(
    tally: Tally,
    kinds: Ints,
    drawn: DrawnSteps,
    order: Ints,
    hung: Hung,
    rng: np.random.Generator,
) -> tuple[Int32s, Int32s, Ints]:
    """(blocks kept, dropped, fresh tokens); a forked line's first step has those of its spawner."""
    kept, dropped, fresh = drawn.kept[order], drawn.dropped[order], drawn.fresh[order].copy()
    forked = np.flatnonzero(hung.is_fork)
    extra = tally.lines.extra[kinds[drawn.line[order[forked]]], HEAD].astype(np.int64)
    if len(forked):
        full = drawn.context[order][hung.spawner[forked]] // tally.block_size
        lost = np.rint(tally.lines.tables.draw(extra[:, DROPPED], rng.random(len(forked))))
        kept[forked] = np.maximum(0, full - lost.astype(np.int64))
        dropped[forked] = full - kept[forked]
        drawn_fresh = tally.lines.tables.draw(extra[:, KEPT], rng.random(len(forked)))
        fresh[forked] = np.maximum(1, np.rint(drawn_fresh)).astype(np.int64)
    return kept.astype(np.int32), dropped.astype(np.int32), fresh


def _branches(law: LineLaw, kind: Ints, rng: np.random.Generator) -> Int32s:
    """Of each step; 1 where the source says nothing of more."""
    branches = np.ones(len(kind), np.int32)
    some = np.flatnonzero(rng.random(len(kind)) < law.branching[kind])
    if len(some):
        drawn = law.tables.spread_out(law.branches, len(some), rng)
        branches[some] = np.maximum(2, np.rint(drawn))
    return branches


def _think_s(
    tally: Tally, gap_s: Floats, drawn_s: Floats, output: Ints, heads: Ints, spawner: Int32s
) -> Floats:
    """As `steps_of` has it: from the tables where the source has edges, else what calls leave of gaps."""
    if tally.has_edges:
        return np.minimum(drawn_s, gap_s)
    before = np.arange(-1, len(gap_s) - 1)
    before[heads] = spawner[heads]
    service = BASE_S + TOKEN_S * output[before]
    return np.where(before >= 0, np.maximum(0.0, gap_s - service), 0.0)
