"""The whole prompts of programs: which of their blocks others have too, and for how long.

A block that only one program has is new text in every program that is generated from it. One that several
have belongs to the shared forest: if it was met over most of the trace it is *lasting* (instructions, tools)
and stays the same text for ever; else it is *passing* (a project, a task) and is the same text within one
round of generation, in which each program of the source is used once. So the shared text keeps growing
with the trace as it did in the source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.synth.core.knobs import Knobs
from mallee.traces.numbers import Bools, Ints
from mallee.traces.trace import Trace, picked_lists
from mallee.traces.workload import Runs

LASTING, PASSING, OWN = 0, 1, 2
_LASTING_SHARE: Final = 0.5  # of the programs between the first and the last that have a block


class Run(NamedTuple):
    """Blocks `first`, `first + 1`, .. of a state."""

    state: int
    first: int
    num: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a trace, flat; blocks are numbered from 0 in each state, own ones in each program."""

    run_starts: Ints  # [prompts + 1]
    run_state: npt.NDArray[np.int8]
    run_first: Ints
    run_count: Ints
    tail_tokens: Ints  # after the runs; below 0 if the last block of them is partial
    is_named: Bools  # whether the tail has ids
    num_blocks: Ints  # lasting, passing, then each program's own
    program: Ints  # of each prompt

    def runs(self, prompt: int) -> list[Run]:
        """The runs of one prompt."""
        at = slice(self.run_starts[prompt], self.run_starts[prompt + 1])
        columns = (self.run_state, self.run_first, self.run_count)
        return list(map(Run, *(column[at].tolist() for column in columns)))

    def turns(self, num_programs: int, rng: np.random.Generator) -> Ints:
        """Programs in a new order; those that share passing text stay as far apart as they were."""
        passing = np.flatnonzero(self.run_state == PASSING)
        prompt = np.searchsorted(self.run_starts, passing, side="right") - 1
        program, first = np.unique(self.program[prompt], return_index=True)
        cluster = np.arange(num_programs) + self.num_blocks[PASSING]
        cluster[program] = self.run_first[passing[first]]
        shift = rng.random(num_programs + self.num_blocks[PASSING])[cluster]
        return np.argsort((np.arange(num_programs) / num_programs + shift) % 1.0, kind="stable")


def learn_prompts(trace: Trace, requests: Ints, program: Ints, has_forks: Bools) -> Prompts:
    """The prompts of `requests`, which belong to `program`s (numbered by their begin, in order).

    All of a prompt that `has_forks` counts as shared: its forks go on from it.
    """
    starts, blocks = picked_lists(trace.starts, trace.blocks, requests)
    owner = np.repeat(np.arange(len(requests)), np.diff(starts))
    num_programs = int(program.max(initial=-1)) + 1
    _, begin, at = np.unique(blocks, return_index=True, return_inverse=True)
    first, last = program[owner[begin]], np.zeros(len(begin), np.int64)
    last[at] = program[owner]
    is_lasting = last - first + 1 > _LASTING_SHARE * num_programs
    state = np.where(first == last, OWN, np.where(is_lasting, LASTING, PASSING)).astype(np.int8)
    group = np.where(state == OWN, OWN + first, state)
    is_kept = (np.bincount(at, minlength=len(begin)) > 1) | has_forks[owner[begin]]
    by_group = np.lexsort((begin, group))
    by_group = by_group[is_kept[by_group]]
    num = np.bincount(group[is_kept], minlength=OWN + num_programs)
    number = np.zeros(len(begin), np.int64)
    number[by_group] = np.arange(len(by_group)) - np.repeat(np.cumsum(num) - num, num)
    kept = is_kept[at]
    owner, at = owner[kept], at[kept]
    columns = np.stack([owner, state[at], number[at] - np.arange(len(at))])
    runs = np.flatnonzero(np.diff(columns, prepend=-1).any(0))
    tokens, size = trace.input_tokens[requests], trace.block_size
    whole = -(-tokens // size) if trace.rule == "ceil" else tokens // size
    return Prompts(
        run_starts=np.searchsorted(owner[runs], np.arange(len(requests) + 1)),
        run_state=state[at[runs]],
        run_first=number[at[runs]],
        run_count=np.diff(runs, append=len(at)),
        tail_tokens=tokens - size * np.bincount(owner, minlength=len(requests)),
        is_named=trace.depth[requests] >= whole,
        num_blocks=num,
        program=program,
    )


class Names:
    """Gives out ids from 0 on, so that equal id means equal text up to there."""

    def __init__(self, num_blocks: Ints, block_size: int, knobs: Knobs, *, is_ceil: bool) -> None:
        """`num_blocks`: those that are lasting, and those that are passing."""
        self._block_size = block_size
        self._is_ceil = is_ceil
        self._num = num_blocks[:OWN].tolist()
        self._stretch = knobs.prefix_len
        self._parts = max(1, int(np.ceil(knobs.prefix_len)))  # ids that a block may need
        self._families = knobs.prefix_root
        self._bases: dict[tuple[int, int], int] = {}  # by state and family
        self._next = 0

    def new_round(self) -> None:
        """Passing text is new from now on."""
        self._bases = {key: base for key, base in self._bases.items() if key[0] == LASTING}

    def program(self, rank: int, num_own: int) -> tuple[int, int, int]:
        """Bases of the ids of a new program by state: `rank` decides its family."""
        family = rank % self._families
        for state, count in enumerate(self._num):
            if (state, family) not in self._bases:
                self._bases[state, family] = self._take(count * self._parts)
        own = self._take(num_own * self._parts)
        return self._bases[LASTING, family], self._bases[PASSING, family], own

    def prompt(
        self, bases: tuple[int, int, int], runs: Sequence[Run], tail_tokens: int, *, is_named: bool
    ) -> tuple[Runs, int]:
        """Ids and tokens of a prompt: runs, stretched, then text of its own, which may have ids."""
        found = [(bases[run.state] + run.first, run.num) for run in self._stretched(runs)]
        tokens = self._block_size * sum(count for _, count in found) + tail_tokens
        tail = (
            -(-tail_tokens // self._block_size)
            if self._is_ceil
            else tail_tokens // self._block_size
        )
        if is_named and tail > 0:
            found.append((self._take(tail), tail))
        return Runs(found), max(1, tokens)

    def _stretched(self, runs: Sequence[Run]) -> list[Run]:
        """Each block becomes what lies between its edges, stretched, in whole blocks: chains stay chains."""
        parts = self._parts
        if self._stretch == parts:
            return [Run(state, first * parts, count * parts) for state, first, count in runs]
        found: list[Run] = []
        depth = 0
        for state, first, count in runs:
            edges = np.rint(np.arange(depth, depth + count + 1) * self._stretch).astype(np.int64)
            depth += count
            for block, more in enumerate(np.diff(edges).tolist(), first):
                found.append(Run(state, block * parts, more))
        return [run for run in found if run.num]

    def _take(self, count: int) -> int:
        """The first of `count` new ids."""
        first = self._next
        self._next += count
        return first
