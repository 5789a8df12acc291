"""A forest with wider lists of children, or with longer programs: what knobs turn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import Knobs
from mallee.synth.programs.forest import Forest, depths
from mallee.synth.programs.orders import Order
from mallee.traces.workload import NO_PARENT


def reshaped(forest: Forest, knobs: Knobs) -> Forest:
    """`forest` with the knobs' widths, lengths of programs and tool waits; itself at their defaults.

    Raises ConfigError for a knob that would change nothing.
    """
    _check(forest, knobs)
    if knobs.fork_width is not None or knobs.agents is not None:
        forest = _widened(forest, knobs)
    if knobs.session_length != 1.0:
        forest = _lengthened(forest, knobs.session_length)
    if knobs.tool_latency != 1.0:
        more = forest.nodes.tool_wait_s * (knobs.tool_latency - 1.0)
        nodes = replace(
            forest.nodes,
            tool_wait_s=forest.nodes.tool_wait_s + more,
            gap_s=np.maximum(forest.nodes.gap_s + more, 0.0),
        )
        forest = replace(forest, nodes=nodes)
    return forest


def _check(forest: Forest, knobs: Knobs) -> None:
    """Raises ConfigError naming the knob that has nothing to turn."""
    kinds = set(forest.order.tolist())
    has_fans = bool((forest.nodes.branches > 1).any())
    if knobs.agents is not None and Order.FREE not in kinds:
        what = (
            f"agents={knobs.agents}: {forest.name} has no swarms, whose children go on side by side"
        )
        raise ConfigError(f"{what}; leave it out")
    if knobs.fork_width is not None and kinds == {Order.RECORDED} and not has_fans:
        what = f"fork_width={knobs.fork_width}: {forest.name} has no trees or fan-outs"
        raise ConfigError(f"{what}; leave it out")
    if knobs.tool_latency != 1.0 and not forest.nodes.tool_wait_s.any():
        what = f"tool_latency={knobs.tool_latency}: nothing in {forest.name} waits for tools"
        raise ConfigError(f"{what}; leave it out")


class _Copy(NamedTuple):
    """A node of the new forest."""

    source: int  # its place in the old one
    parent: int  # the place of its parent in the new program, or NO_PARENT
    waits: Sequence[int] = ()  # places in the new program; of recorded programs
    gap_s: float | None = None  # None: as it was
    part: int = 0  # nodes of different parts never belong to one batch


def _built(forest: Forest, programs: Sequence[Sequence[_Copy]]) -> Forest:
    old = forest.nodes
    sizes = np.array([len(program) for program in programs], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    copies = [copy for program in programs for copy in program]
    source = np.array([copy.source for copy in copies], np.int64)
    base = np.repeat(starts[:-1], sizes)
    local = np.array([copy.parent for copy in copies], np.int64)
    parent = np.where(local == NO_PARENT, NO_PARENT, local + base).astype(np.int32)
    gap_s = old.gap_s[source]
    for at, copy in enumerate(copies):
        if copy.gap_s is not None:
            gap_s[at] = copy.gap_s
    begins = np.diff(old.batch[source], prepend=-1) != 0
    begins |= np.diff([copy.part for copy in copies], prepend=-1) != 0
    counts = [len(copy.waits) for copy in copies]
    waits = [wait for copy in copies for wait in copy.waits]
    nodes = replace(
        old,
        parent=parent,
        depth=depths(parent),
        cls=old.cls[source],
        session=old.session[source],
        added_tokens=old.added_tokens[source],
        output_tokens=old.output_tokens[source],
        branches=old.branches[source],
        tool_wait_s=old.tool_wait_s[source],
        gap_s=gap_s,
        batch=np.cumsum(begins).astype(np.int32),
        prompt=old.prompt[source],
        wait_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        waits=(np.array(waits, np.int64) + np.repeat(base, counts)).astype(np.int32),
    )
    return replace(forest, starts=starts, nodes=nodes)


def _as_it_is(forest: Forest, program: int) -> list[_Copy]:
    nodes = forest.nodes
    begin, end = int(forest.starts[program]), int(forest.starts[program + 1])
    parents = nodes.parent[begin:end].tolist()
    edges = nodes.wait_starts[begin : end + 1].tolist()
    waits = (nodes.waits[edges[0] : edges[-1]] - begin).tolist()
    return [
        _Copy(
            begin + i,
            NO_PARENT if parents[i] == NO_PARENT else parents[i] - begin,
            waits[edges[i] - edges[0] : edges[i + 1] - edges[0]],
        )
        for i in range(end - begin)
    ]


# Wider


def _widened(forest: Forest, knobs: Knobs) -> Forest:
    programs = []
    for program, kind in enumerate(forest.order.tolist()):
        width = knobs.fork_width
        if kind == Order.FREE and knobs.agents is not None:
            width = knobs.agents
        copies = _as_it_is(forest, program)
        if width is not None and kind != Order.RECORDED:
            copies = _with_width(copies, width)
        programs.append(copies)
    found = _built(forest, programs)
    if knobs.fork_width is None:
        return found
    branches = np.where(found.nodes.branches > 1, knobs.fork_width, found.nodes.branches)
    return replace(found, nodes=replace(found.nodes, branches=branches.astype(np.int32)))


def _with_width(copies: Sequence[_Copy], width: int) -> list[_Copy]:
    """Each list of children with `width`: unexpanded ones go first, or are added once more."""
    children: dict[int, list[int]] = {}
    for at, copy in enumerate(copies):
        children.setdefault(copy.parent, []).append(at)
    # (after which old place, order there, copy of whom); the old places of parents are unique
    kept: list[tuple[int, int, int]] = [(0, 0, 0)]
    alive = {0}
    for at in range(len(copies)):
        if at not in alive or at not in children:
            continue
        mine = children[at]
        leaves = [child for child in mine if child not in children]
        drop = set([*reversed(leaves), *reversed(mine)][: max(0, len(mine) - width)])
        stay = [child for child in mine if child not in drop][:width]
        alive.update(stay)
        kept += [(child, 0, child) for child in stay]
        models = leaves or mine
        last = stay[-1]
        kept += [(last, 1 + i, models[i % len(models)]) for i in range(width - len(stay))]
    kept.sort()
    place = {after: new for new, (after, extra, _) in enumerate(kept) if not extra}
    return [
        _Copy(copies[model].source, place[copies[model].parent] if new else NO_PARENT)
        for new, (_, _, model) in enumerate(kept)
    ]


# Longer


def _lengthened(forest: Forest, by: float) -> Forest:
    """Each program `by` times as long: cut, or gone on with as others of its kind did.

    A tree goes on from the node visited last as from a root; a recorded program begins anew when its
    last request has ended.
    """
    kinds = np.stack([forest.order, forest.waits], axis=1).tolist()
    alike: dict[tuple[int, int], list[int]] = {}
    for program, (order, waits) in enumerate(kinds):
        alike.setdefault((order, waits), []).append(program)
    rank = {program: i for same in alike.values() for i, program in enumerate(same)}
    programs = []
    for program, (order, waits) in enumerate(kinds):
        same = alike[order, waits]
        copies: list[_Copy] = []
        left, part = by, 0
        while left > 1e-9:
            other = _as_it_is(forest, same[(rank[program] + part) % len(same)])
            other = other[: max(1, int(np.ceil(min(1.0, left) * len(other) - 1e-9)))]
            join = _after if order == Order.RECORDED else _below
            copies = join(forest, copies, other, part) if copies else other
            left, part = left - 1.0, part + 1
        programs.append(copies)
    return _built(forest, programs)


def _below(forest: Forest, copies: list[_Copy], more: Sequence[_Copy], part: int) -> list[_Copy]:
    """The tree `more` without its root, which the last of `copies` takes the place of."""
    last = len(copies) - 1
    return copies + [c._replace(parent=c.parent + last, part=part) for c in more[1:]]


def _after(forest: Forest, copies: list[_Copy], more: Sequence[_Copy], part: int) -> list[_Copy]:
    """The program `more`, begun when the last of `copies` has ended."""
    base, last = len(copies), copies[-1]
    since = forest.nodes.gap_s[last.source] if last.gap_s is None else last.gap_s
    return copies + [
        c._replace(
            parent=c.parent + base if c.parent != NO_PARENT else NO_PARENT,
            waits=[w + base for w in c.waits] or ([base - 1] if c.parent == NO_PARENT else []),
            gap_s=float(since + (forest.nodes.gap_s[c.source] if at else 0.0)),
            part=part,
        )
        for at, c in enumerate(more)
    ]
