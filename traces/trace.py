"""A workload as arrays, which analyses and models read a hundred times faster than single requests.

Prompts are paths of blocks of one size. A trace's ids may stand for more or fewer tokens than a block:
ids are prefix-chained, so the last id inside a block names it with all before, and an id that is
longer than a block makes several. Forks, which have no whole prompt in the trace, get the path of the
text that they go on from.
"""

from array import array
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from mallee.traces.numbers import Floats, Numbers
from mallee.traces.numbers import Int32s as Int32s
from mallee.traces.numbers import Ints as Ints
from mallee.traces.paths import Prompts
from mallee.traces.workload import NO_PARENT, Request, Workload

Rule: TypeAlias = Literal["auto", "floor", "ceil"]

NO_SESSION: Final = -1
UNNAMED: Final = 1 << 61
"""Names from here on are of partial blocks that a trace does not name."""

_CHUNK_BLOCKS: Final = 1 << 17  # that are numbered together


@dataclass(frozen=True, slots=True)
class Trace:
    """`num` requests by arrival. Lists of lists are flat with `num` + 1 starts.

    Request i has blocks `blocks[starts[i]:starts[i + 1]]`: numbers from 0 by first appearance, equal
    number equal text up to the block's end, and a block's number is above that of the block before it. With
    rule "ceil" a last partial block has a number too.
    """

    name: str
    block_size: int
    id_tokens: int  # of the ids that it was read from
    rule: Literal["floor", "ceil"]
    arrival_s: Floats
    input_tokens: Ints  # whole prompt, of a fork too
    output_tokens: Ints  # of each branch
    starts: Ints
    blocks: Int32s
    session: Int32s  # place in `sessions`, or NO_SESSION
    cls: Int32s  # place in `classes`
    wait_starts: Ints
    waits: Int32s  # numbers of requests
    tool_wait_s: Floats
    branches: Int32s
    parent: Int32s  # number of the request that this one forks, or NO_PARENT
    sessions: tuple[str, ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def depth(self) -> Ints:
        """Blocks of each request."""
        return np.diff(self.starts)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks."""
        return int(self.blocks.max(initial=-1)) + 1

    @property
    def has_forks(self) -> bool:
        return bool((self.parent != NO_PARENT).any())

    @property
    def waiters(self) -> Ints:
        """For each of `waits` the request that waits."""
        return np.repeat(np.arange(len(self)), np.diff(self.wait_starts))

    def path(self, request: int) -> Int32s:
        """The blocks of one request, from the root."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]


def trace_of(workload: Workload, *, block_size: int | None = None, rule: Rule = "auto") -> Trace:
    """All requests of `workload`. `block_size` is the workload's id size by default.

    `rule` "auto": partial last blocks have numbers if the first requests name theirs. With "ceil" on a
    workload that names whole blocks only, the rest of each prompt counts as text of its own. Raises
    ConfigError if neither size divides the other; CodecError of the workload.
    """
    size = workload.id_tokens if block_size is None else block_size
    builder = _Builder(workload, size, rule)
    for request in workload:
        builder.add(request)
    return builder.build()


def picked_lists(starts: Ints, values: Int32s, rows: Ints) -> tuple[Ints, Int32s]:
    """Lists number `rows` of those that lie in `values`, one after another, and where each starts."""
    counts = starts[rows + 1] - starts[rows]
    ends = np.cumsum(counts)
    at = np.repeat(starts[rows] - (ends - counts), counts) + np.arange(counts.sum())
    return np.append(0, ends), values[at]


class _Builder:
    """Collects requests as arrays; keeps at most a chunk of their paths."""

    def __init__(self, workload: Workload, size: int, rule: Rule) -> None:
        self._workload = workload
        self._size = size
        self._prompts = Prompts(workload.id_tokens, size, has_forks=workload.has_forks)
        self._id_tokens = workload.id_tokens
        self._names_partial = False
        self._is_ceil = None if rule == "auto" else rule == "ceil"
        self._waiting: list[
            tuple[Ints, int]
        ] = []  # paths that are not numbered yet, and their tokens
        self._num_waiting = 0
        self._unnamed = UNNAMED
        self._numbers = Numbers()
        self._blocks = np.empty(0, np.int32)
        self._num_blocks = 0
        self._depths = array("q")
        self._floats = [array("d") for _ in range(2)]
        self._ints = [array("q") for _ in range(6)]
        self._wait_counts = array("q")
        self._waits = array("q")
        self._sessions: dict[str, int] = {}
        self._classes: dict[str, int] = {}

    def add(self, request: Request) -> None:
        prompt = self._prompts.of(request)[0]
        self._waiting.append((prompt.path, prompt.tokens))
        if request.parent == NO_PARENT:
            named = len(request.ids) * self._id_tokens
            self._names_partial |= named > request.input_tokens
        self._num_waiting += len(prompt.path)
        if self._num_waiting > _CHUNK_BLOCKS:
            self._number()
        session = request.session
        for column, value in zip(
            self._ints,
            (
                prompt.tokens,
                request.output_tokens,
                self._sessions.setdefault(session, len(self._sessions)) if session else NO_SESSION,
                self._classes.setdefault(request.cls, len(self._classes)),
                request.branches,
                request.parent,
            ),
            strict=True,
        ):
            column.append(value)
        self._floats[0].append(request.arrival_s)
        self._floats[1].append(request.tool_wait_s)
        self._wait_counts.append(len(request.wait_for))
        self._waits.extend(request.wait_for)

    def _number(self) -> None:
        """Numbers the blocks of the paths that wait for it."""
        if self._is_ceil is None:
            self._is_ceil = self._names_partial
        paths = [self._cut(path, tokens) for path, tokens in self._waiting]
        self._depths.extend(len(path) for path in paths)
        if paths:
            self._add_blocks(self._numbers.of(np.concatenate(paths)))
        self._waiting = []
        self._num_waiting = 0

    def _cut(self, path: Ints, tokens: int) -> Ints:
        """`path` by the trace's rule."""
        full = tokens // self._size
        if not self._is_ceil:
            return path[:full]
        if tokens % self._size and len(path) <= full:
            self._unnamed += 1
            return np.append(path, self._unnamed - 1)
        return path

    def _add_blocks(self, more: Int32s) -> None:
        """The largest array. It grows by small steps, since the system moves pages rather than bytes."""
        end = self._num_blocks + len(more)
        if end > len(self._blocks):
            self._blocks.resize(end + end // 16, refcheck=False)
        self._blocks[self._num_blocks : end] = more
        self._num_blocks = end

    def build(self) -> Trace:
        self._number()
        self._blocks.resize(self._num_blocks, refcheck=False)
        inputs, outputs, sessions, classes, branches, parents = self._ints
        return Trace(
            name=self._workload.name,
            block_size=self._size,
            id_tokens=self._workload.id_tokens,
            rule="ceil" if self._is_ceil else "floor",
            arrival_s=np.array(self._floats[0], np.float64),
            input_tokens=np.array(inputs, np.int64),
            output_tokens=np.array(outputs, np.int64),
            starts=_starts(self._depths),
            blocks=self._blocks,
            session=np.array(sessions, np.int32),
            cls=np.array(classes, np.int32),
            wait_starts=_starts(self._wait_counts),
            waits=np.array(self._waits, np.int32),
            tool_wait_s=np.array(self._floats[1], np.float64),
            branches=np.array(branches, np.int32),
            parent=np.array(parents, np.int32),
            sessions=tuple(self._sessions),
            classes=tuple(self._classes),
        )


def _starts(counts: "array[int]") -> Ints:
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.array(counts, np.int64), out=starts[1:])
    return starts
