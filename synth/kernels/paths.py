"""Passes over the paths of a trace's requests, in order of arrival."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.synth.core.jit import kernel

Ints: TypeAlias = npt.NDArray[np.int64]
Small: TypeAlias = npt.NDArray[np.int32]


@kernel
def grow_tree(
    starts: Ints, blocks: Small, parents: Small, depths: Small, visits: Small, ends: Small
) -> int:
    """Parent, depth (from 1), visits of each block and how many paths end there; all begin as 0.

    A root's parent is -1. Returns the place in `blocks` that contradicts what came before, or -1.
    """
    for i in range(len(starts) - 1):
        above = np.int32(-1)
        for at in range(starts[i], starts[i + 1]):
            block = blocks[at]
            if visits[block] == 0:
                parents[block] = above
                depths[block] = at - starts[i] + 1
            elif parents[block] != above:
                return at
            visits[block] += 1
            above = block
        if above >= 0:
            ends[above] += 1
    return -1


@kernel
def reuse(starts: Ints, blocks: Small, last: Small, hits: Ints, touchers: Small) -> None:
    """Per request its leading blocks that were seen before, and who touched the deepest of them last.

    `last` [blocks] begins as -1. Who hits nothing has toucher -1.
    """
    for i in range(len(starts) - 1):
        hit = 0
        toucher = np.int32(-1)
        for at in range(starts[i], starts[i + 1]):
            block = blocks[at]
            if last[block] >= 0:
                hit += 1
                toucher = last[block]
            last[block] = i
        hits[i] = hit
        touchers[i] = toucher


@kernel
def add_at(tree: Ints, at: int, value: int) -> None:
    """Fenwick tree `tree` (from 1): `value` more at place `at` from 0."""
    at += 1
    while at < len(tree):
        tree[at] += value
        at += at & -at


@kernel
def sum_to(tree: Ints, at: int) -> int:
    """Sum of the places below `at`."""
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@kernel
def stack_distances(
    starts: Ints,
    blocks: Small,
    last: Small,
    held: Ints,
    tree: Ints,
    histogram: Ints,
    keeps_front: bool,
) -> None:
    """How often each LRU stack distance occurs, in `histogram` [blocks].

    `last` [blocks] begins as -1; `held` [requests] and `tree` [requests + 1] as 0: how many blocks
    each request was the last to touch, and their Fenwick tree. Why a whole run has one distance, and
    what `keeps_front` changes: `synth.analysis.stack`.
    """
    distinct = 0
    for i in range(len(starts) - 1):
        end = starts[i + 1]
        at = starts[i]
        while at < end and last[blocks[at]] >= 0:
            toucher = last[blocks[at]]
            first = at
            newer = distinct - sum_to(tree, toucher + 1)
            while at < end and last[blocks[at]] == toucher:
                last[blocks[at]] = i
                if keeps_front:
                    histogram[newer + at - first] += 1
                at += 1
            if not keeps_front:
                histogram[newer + held[toucher] - 1] += at - first
            held[toucher] -= at - first
            add_at(tree, toucher, first - at)
            add_at(tree, i, at - first)  # newer than all that this request goes on to
        distinct += end - at
        add_at(tree, i, end - at)
        held[i] = end - starts[i]
        while at < end:
            last[blocks[at]] = i
            at += 1


@kernel
def add_subtrees(parents: Small, sizes: Ints) -> None:
    """Sizes of all subtrees; `sizes` begins as 1. Children have higher numbers than parents."""
    for block in range(len(parents) - 1, -1, -1):
        if parents[block] >= 0:
            sizes[parents[block]] += sizes[block]
