"""The prefix tree of a trace: its blocks, each below the block that comes before it in prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import CodecError
from mallee.synth.core.jit import kernel
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.trace import Trace
from mallee.traces.workload import Workload

ROOT = -1
"""Parent of a first block of prompts."""
SHARED_USES: Final = 2
"""A block that is used less often belongs to one request."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """By block number of the trace, so that parents have lower numbers than children.

    `depths` counts from 1. `visits` are requests whose prompt has the block, `ends` those whose last
    block it is; every visit goes on to a child or ends, so visits = sum of the children's + ends.
    """

    parents: Int32s  # ROOT of a root
    depths: Int32s
    visits: Int32s
    ends: Int32s
    children: Int32s  # how many

    @staticmethod
    def of(trace: Trace) -> "PrefixTree":
        """Raises CodecError naming the block, both parents and both requests if it is no tree."""
        num = trace.num_blocks
        parents, depths, visits, ends = (np.zeros(num, np.int32) for _ in range(4))
        bad = grow_tree(trace.starts, trace.blocks, parents, depths, visits, ends)
        if bad >= 0:
            raise _two_parents(trace, int(bad), int(parents[trace.blocks[bad]]))
        children = np.bincount(parents[parents != ROOT], minlength=num).astype(np.int32)
        return PrefixTree(parents, depths, visits, ends, children)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def roots(self) -> Ints:
        """Blocks that prompts begin with."""
        return np.flatnonzero(self.parents == ROOT)

    @property
    def branch_nodes(self) -> Ints:
        """Blocks with at least two children."""
        return np.flatnonzero(self.children >= 2)


class Chains(NamedTuple):
    """Shared blocks with unary chains merged: runs of them with nothing else between.

    A block that is used as often as the one before it goes on from it. Parents have lower numbers.
    """

    of_block: Int32s  # -1: not shared; so is the last place, which stands for `ROOT`
    above: Int32s
    blocks: Int32s  # how many
    uses: Ints


def chains(parents: Int32s, uses: Ints | Int32s) -> Chains:
    """`uses` of each block."""
    of_block = _number_chains(parents, uses)
    shared = np.flatnonzero(of_block[:-1] >= 0)
    _, first, blocks = np.unique(of_block[shared], return_index=True, return_counts=True)
    begins = shared[first]
    return Chains(
        of_block,
        of_block[parents[begins]],
        blocks.astype(np.int32),
        uses[begins].astype(np.int64),
    )


@kernel
def _number_chains(parents: Int32s, uses: Ints | Int32s) -> Int32s:
    of_block = np.full(len(parents) + 1, -1, np.int32)
    num = 0
    for block in range(len(parents)):  # a parent's number is lower
        above = parents[block]
        if uses[block] < SHARED_USES:
            continue
        if above >= 0 and uses[above] == uses[block]:
            of_block[block] = of_block[above]
        else:
            of_block[block] = num
            num += 1
    return of_block


def require_tree(workload: Workload, trace: Trace) -> None:
    """Raises CodecError if `trace`, of `workload`, is no prefix tree, by the file's own ids."""
    try:
        PrefixTree.of(trace)
    except CodecError as error:
        if workload.has_forks:
            raise
        first, second = error.fields["requests"]
        ids = {
            request.number: request.ids for request in workload if request.number in (first, second)
        }
        raise _no_tree(
            trace,
            first,
            second,
            block=_id_at(workload, trace, ids[first], error.fields["depths"][0]),
            above=_id_at(workload, trace, ids[first], error.fields["depths"][0] - 1),
            other=_id_at(workload, trace, ids[second], error.fields["depths"][1] - 1),
            depths=error.fields["depths"],
            word="hash id",
        ) from error


def _id_at(workload: Workload, trace: Trace, ids: Sequence[int], depth: int) -> int | None:
    """The id that names the block at `depth` from 1, None for depth 0."""
    if not depth:
        return None
    return ids[min(len(ids), -(-depth * trace.block_size // workload.id_tokens)) - 1]


def _two_parents(trace: Trace, place: int, parent: int) -> CodecError:
    """The error for a block that follows another one at `place` of `trace.blocks` than before."""
    block = int(trace.blocks[place])
    request, depth = _place(trace, place)
    first, earlier = _place(trace, int(np.flatnonzero(trace.blocks[:place] == block)[0]))
    return _no_tree(
        trace,
        first,
        request,
        block=block,
        above=None if parent == ROOT else parent,
        other=None if depth == 1 else int(trace.blocks[place - 1]),
        depths=[earlier, depth],
        word="block",
    )


def _place(trace: Trace, place: int) -> tuple[int, int]:
    """Request and depth, from 1, of a place in `trace.blocks`."""
    request = int(np.searchsorted(trace.starts, place, side="right")) - 1
    return request, place - int(trace.starts[request]) + 1


def _no_tree(
    trace: Trace,
    first: int,
    second: int,
    *,
    block: int | None,
    above: int | None,
    other: int | None,
    depths: list[int],
    word: str,
) -> CodecError:
    parents = ["nothing" if each is None else f"{word} {each}" for each in (above, other)]
    return CodecError(
        f"{trace.name}: not a prefix tree: {word} {block} comes after {parents[0]} in request {first}"
        f" (as its block {depths[0]}), but after {parents[1]} in request {second} (block"
        f" {depths[1]}); an id has to name a block together with all before it. If ids stand for"
        f" another number of tokens than {trace.block_size}, give --id-tokens or --block-size",
        block=block,
        parents=[above, other],
        requests=[first, second],
        depths=depths,
    )


# Passes over the paths of a trace's requests, in order of arrival.


@kernel
def grow_tree(
    starts: Ints, blocks: Int32s, parents: Int32s, depths: Int32s, visits: Int32s, ends: Int32s
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
