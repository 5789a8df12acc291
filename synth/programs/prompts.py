"""The whole prompts of programs: which of their blocks others have too, and for how long.

A block that only one program has is new text in every program that is generated from it. One that several
have belongs to the shared forest: if it was met over most of the trace it is *lasting* (instructions, tools)
and stays the same text for ever; else it is *passing* (a project, a task) and is the same text within one
round of generation, in which each program of the source is used once. So the shared text keeps growing
with the trace as it did in the source.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.traces.numbers import Bools, Floats, Ints
from mallee.traces.trace import Trace

LASTING, PASSING, OWN = 0, 1, 2
_LASTING_SHARE: Final = (
    0.5  # of the trace's programs between the first and the last that have a block
)


class Prompt(NamedTuple):
    """A prompt: runs (state, first, count) of shared blocks, then text that is its own."""

    runs: tuple[tuple[int, int, int], ...]
    tail_tokens: int  # after the shared blocks; below 0 if the last of them is partial
    tail_blocks: int  # that have names
    is_named: bool  # whether all blocks of the tail have names


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a trace, flat; blocks are numbered from 0 in each state, own ones in each program."""

    run_starts: Ints  # [prompts + 1]
    run_state: npt.NDArray[np.int8]
    run_first: Ints
    run_count: Ints
    shared: Ints  # [prompts] blocks of the runs
    tail_tokens: Ints
    tail_blocks: Ints
    is_named: Bools
    num_lasting: int
    num_passing: int
    num_own: Ints  # [programs]
    program: Ints  # [prompts] of the source

    def __len__(self) -> int:
        return len(self.shared)

    def stretched(
        self, *, shared: float, own: float, block_size: int, is_ceil: bool
    ) -> list[Prompt]:
        """All prompts with `shared` times the shared blocks and `own` times the text of their own."""
        parts = max(1, int(np.ceil(shared)))
        found = []
        for i in range(len(self)):
            at = slice(int(self.run_starts[i]), int(self.run_starts[i + 1]))
            states, firsts, counts = (
                x[at].tolist() for x in (self.run_state, self.run_first, self.run_count)
            )
            runs = _stretched_runs(list(zip(states, firsts, counts, strict=True)), shared, parts)
            tail = int(self.tail_tokens[i])
            tail = round(tail * own) if tail > 0 else tail
            blocks = round(int(self.tail_blocks[i]) * own)
            if self.is_named[i]:
                blocks = max(0, -(-tail // block_size) if is_ceil else tail // block_size)
            if not runs and tail < 1:
                tail = 1
            found.append(Prompt(tuple(runs), tail, blocks, bool(self.is_named[i])))
        return found


def _stretched_runs(
    runs: list[tuple[int, int, int]], by: float, parts: int
) -> list[tuple[int, int, int]]:
    """Each block becomes what lies between its edges times `by`, in whole blocks; chains stay chains."""
    if by == 1.0:
        return runs
    if by == parts:
        return [(state, first * parts, count * parts) for state, first, count in runs]
    found: list[tuple[int, int, int]] = []
    depth = 0
    for state, first, count in runs:
        edges = np.rint(np.arange(depth, depth + count + 1) * by).astype(np.int64)
        depth += count
        for block, more in enumerate(np.diff(edges).tolist()):
            if more:
                found.append((state, (first + block) * parts, more))
    return found


def learn_prompts(trace: Trace, requests: Ints, program: Ints, has_forks: Bools) -> Prompts:
    """The prompts of `requests`, which belong to `program`s (numbered by their begin).

    All of a prompt that `has_forks` counts as shared: its forks go on from it.
    """
    lengths = trace.depth[requests]
    flat = _gathered(trace, requests, lengths)
    owner = np.repeat(np.arange(len(requests)), lengths)
    num_programs = int(program.max(initial=-1)) + 1
    state, uses = _states(flat, program[owner], trace.num_blocks, num_programs)
    starts = np.zeros(len(requests) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    place = np.arange(len(flat)) - starts[owner]
    in_runs = (uses[flat] > 1) | has_forks[owner]
    shared = np.zeros(len(requests), np.int64)
    np.maximum.at(shared, owner[in_runs], place[in_runs] + 1)
    kept = place < shared[owner]
    names, num_own = _names(flat[kept], state[flat[kept]], program[owner[kept]], num_programs)
    runs = _runs(names, state[flat[kept]], owner[kept])
    tokens, size = trace.input_tokens[requests], trace.block_size
    whole = -(-tokens // size) if trace.rule == "ceil" else tokens // size
    run_starts = np.zeros(len(requests) + 1, np.int64)
    np.cumsum(np.bincount(runs.owner, minlength=len(requests)), out=run_starts[1:])
    return Prompts(
        run_starts=run_starts,
        run_state=runs.state,
        run_first=runs.first,
        run_count=runs.length,
        shared=shared,
        tail_tokens=tokens - shared * size,
        tail_blocks=lengths - shared,
        is_named=lengths >= whole,
        num_lasting=_count(names, state[flat[kept]] == LASTING),
        num_passing=_count(names, state[flat[kept]] == PASSING),
        num_own=num_own,
        program=program,
    )


class _Runs(NamedTuple):
    owner: Ints
    state: npt.NDArray[np.int8]
    first: Ints
    length: Ints


def _gathered(trace: Trace, requests: Ints, lengths: Ints) -> Ints:
    """The blocks of `requests`, one after another."""
    if not lengths.sum():
        return np.empty(0, np.int64)
    ends = np.cumsum(lengths)
    begin = np.repeat(trace.starts[requests] - (ends - lengths), lengths)
    found: Ints = trace.blocks[begin + np.arange(ends[-1])].astype(np.int64)
    return found


def _states(
    flat: Ints, program: Ints, num_blocks: int, num_programs: int
) -> tuple[npt.NDArray[np.int8], Ints]:
    """State of each block, and how many prompts have it."""
    uses = np.bincount(flat, minlength=num_blocks)
    first = np.full(num_blocks, num_programs, np.int64)
    last = np.full(num_blocks, -1, np.int64)
    np.minimum.at(first, flat, program)
    np.maximum.at(last, flat, program)
    span: Floats = (last - first + 1) / max(1, num_programs)
    state = np.where(first == last, OWN, np.where(span > _LASTING_SHARE, LASTING, PASSING))
    return state.astype(np.int8), uses


def _names(
    blocks: Ints, state: npt.NDArray[np.int8], program: Ints, num_programs: int
) -> tuple[Ints, Ints]:
    """Numbers from 0, by first appearance: in each state, own blocks in each program."""
    names = np.zeros(len(blocks), np.int64)
    num_own = np.zeros(num_programs, np.int64)
    _, first, inverse = np.unique(blocks, return_index=True, return_inverse=True)
    group = np.where(state[first] == OWN, 2 + program[first], state[first])
    order = np.lexsort((first, group))
    ranks = np.empty(len(first), np.int64)
    ranks[order] = np.arange(len(first))
    begins = np.searchsorted(group[order], np.arange(num_programs + 3))
    names[:] = (ranks - begins[group])[inverse.reshape(-1)]
    num_own[:] = np.diff(begins[2:])
    return names, num_own


def _runs(names: Ints, state: npt.NDArray[np.int8], owner: Ints) -> _Runs:
    if not len(names):
        none = np.empty(0, np.int64)
        return _Runs(none, np.empty(0, np.int8), none, none)
    breaks = (np.diff(names) != 1) | (np.diff(state) != 0) | (np.diff(owner) != 0)
    at = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    count = np.diff(np.append(at, len(names)))
    return _Runs(owner[at], state[at], names[at], count)


def _count(names: Ints, mask: Bools) -> int:
    return int(names[mask].max(initial=-1)) + 1
