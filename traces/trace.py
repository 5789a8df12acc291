"""A workload as arrays: what analyses and models read, a hundred times faster than request by request.

Prompts are paths of blocks of one size. A trace's ids may stand for more or fewer tokens than a block:
ids are prefix-chained, so the last id inside a block names it with all before, and an id that is
longer than a block makes several. Forks, which bring no prompt of their own, get the path of the
text that they go on from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import ConfigError
from mallee.traces.workload import NO_PARENT, Request, Workload

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Rule: TypeAlias = Literal["auto", "floor", "ceil"]

NO_SESSION: Final = -1


@dataclass(frozen=True, slots=True)
class Trace:
    """`num` requests by arrival. Lists of lists are flat with `num` + 1 starts.

    Request i has blocks `blocks[starts[i]:starts[i + 1]]`: numbers from 0 by first appearance, equal
    number equal text up to the block's end. With rule "ceil" a last partial block has a number too.
    """

    name: str
    block_size: int
    rule: Literal["floor", "ceil"]
    arrival_s: Floats
    input_tokens: Ints  # whole prompt, of a fork too
    output_tokens: Ints  # of each branch
    starts: Ints
    blocks: npt.NDArray[np.int32]
    session: npt.NDArray[np.int32]  # place in `sessions`, or NO_SESSION
    cls: npt.NDArray[np.int32]  # place in `classes`
    wait_starts: Ints
    waits: npt.NDArray[np.int32]  # numbers of requests
    tool_wait_s: Floats
    branches: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]  # number of the request that this one forks, or NO_PARENT
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

    def path(self, request: int) -> npt.NDArray[np.int32]:
        """The blocks of one request, from the root."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]


def trace_of(workload: Workload, *, block_size: int | None = None, rule: Rule = "auto") -> Trace:
    """All requests of `workload`. `block_size` is the workload's id size by default.

    `rule` "auto": partial last blocks have numbers if the workload's partial last ids do. With "ceil"
    on a workload that names whole blocks only, the rest of each prompt counts as text of its own. Raises
    ConfigError if neither size divides the other; CodecError of the workload.
    """
    size = workload.id_tokens if block_size is None else block_size
    if size < 1 or (size % workload.id_tokens and workload.id_tokens % size):
        raise ConfigError(
            f"block size {size}: give a multiple or a divisor of {workload.id_tokens}, the tokens of"
            " an id of this trace"
        )
    builder = _Builder(workload.id_tokens, size)
    for request in workload:
        builder.add(request)
    return builder.build(workload.name, rule)


class _Builder:
    """Collects requests; numbers their blocks at the end."""

    def __init__(self, id_tokens: int, block_size: int) -> None:
        self._id_tokens = id_tokens
        self._size = block_size
        self._paths: list[npt.NDArray[np.int64]] = []
        self._requests: list[Request] = []
        self._ends: list[_Text] = []  # of forked texts: what a request's prompt and answer come to
        self._sessions: dict[str, int] = {}
        self._classes: dict[str, int] = {}
        self._fresh = -2  # ids below -1 are text that only the trace's structure names
        self._inputs: list[int] = []
        self._has_partial = False

    def add(self, request: Request) -> None:
        ids: Sequence[int] | npt.NDArray[np.int64] = request.ids
        prefix = None
        if request.parent != NO_PARENT:
            prefix = self._ends[request.parent]
        path, tokens = self._path(request, np.asarray(ids, np.int64), prefix)
        self._paths.append(path)
        self._inputs.append(tokens)
        self._requests.append(request)

    def _path(
        self, request: Request, ids: npt.NDArray[np.int64], prefix: "_Text | None"
    ) -> tuple[npt.NDArray[np.int64], int]:
        if prefix is None:
            tokens = request.input_tokens
            self._has_partial |= len(ids) > tokens // self._id_tokens
            path = _resized(ids, self._id_tokens, self._size, tokens)
            text = _Text(path[: tokens // self._size], tokens)
        else:
            text = self._longer(prefix, request.input_tokens)
            path, tokens = text.path, text.tokens
        needs_end = request.num_children > 0 or request.parent != NO_PARENT
        self._ends.append(self._longer(text, request.output_tokens) if needs_end else text)
        return path, tokens

    def _longer(self, text: "_Text", tokens: int) -> "_Text":
        """`text` with `tokens` more that nobody else has."""
        total = text.tokens + tokens
        count = total // self._size - len(text.path)
        if count <= 0:
            return _Text(text.path, total)
        fresh = np.arange(self._fresh, self._fresh - count, -1, dtype=np.int64)
        self._fresh -= count
        return _Text(np.concatenate([text.path, fresh]), total)

    def build(self, name: str, rule: Rule) -> Trace:
        requests = self._requests
        has_ceil = self._has_partial if rule == "auto" else rule == "ceil"
        sizes = np.array(self._inputs, np.int64)
        full = sizes // self._size
        paths = self._with_partials(sizes, full) if has_ceil else [
            path[:count] for path, count in zip(self._paths, full.tolist(), strict=True)
        ]  # fmt: skip
        self._paths = []
        starts = np.zeros(len(requests) + 1, np.int64)
        np.cumsum([len(path) for path in paths], out=starts[1:])
        flat = np.concatenate(paths) if paths else np.empty(0, np.int64)
        waits = [request.wait_for for request in requests]
        wait_starts = np.zeros(len(requests) + 1, np.int64)
        np.cumsum([len(each) for each in waits], out=wait_starts[1:])
        return Trace(
            name=name,
            block_size=self._size,
            rule="ceil" if has_ceil else "floor",
            arrival_s=np.array([r.arrival_s for r in requests], np.float64),
            input_tokens=sizes,
            output_tokens=np.array([r.output_tokens for r in requests], np.int64),
            starts=starts,
            blocks=_numbered(flat),
            session=np.array(
                [self._code(self._sessions, r.session) if r.session else -1 for r in requests],
                np.int32,
            ),
            cls=np.array([self._code(self._classes, r.cls) for r in requests], np.int32),
            wait_starts=wait_starts,
            waits=np.array([other for each in waits for other in each], np.int32),
            tool_wait_s=np.array([r.tool_wait_s for r in requests], np.float64),
            branches=np.array([r.branches for r in requests], np.int32),
            parent=np.array([r.parent for r in requests], np.int32),
            sessions=tuple(self._sessions),
            classes=tuple(self._classes),
        )

    def _with_partials(self, sizes: Ints, full: Ints) -> list[npt.NDArray[np.int64]]:
        paths = []
        for path, size, count in zip(self._paths, sizes.tolist(), full.tolist(), strict=True):
            if size % self._size and len(path) <= count:
                path = np.append(path[:count], self._fresh)
                self._fresh -= 1
            paths.append(path)
        return paths

    @staticmethod
    def _code(codes: dict[str, int], name: str) -> int:
        return codes.setdefault(name, len(codes))


@dataclass(frozen=True, slots=True)
class _Text:
    """Full blocks of a text, and all its tokens."""

    path: npt.NDArray[np.int64]
    tokens: int


def _resized(ids: npt.NDArray[np.int64], id_tokens: int, size: int, tokens: int) -> Ints:
    """Names of the blocks of `size` tokens of a prompt of `tokens`; a partial one if its end has an id."""
    if id_tokens == size:
        return ids
    if id_tokens > size:
        each = id_tokens // size
        blocks = (ids[:, None] * each + np.arange(each)).ravel()
        return blocks[: -(-tokens // size)]
    each = size // id_tokens
    full = ids[each - 1 :: each]
    if len(ids) % each and len(ids) * id_tokens >= tokens:  # the last id reaches the prompt's end
        return np.append(full, -ids[-1] * each - 2 - (1 << 60))  # apart from the whole block's name
    return full


def _numbered(names: Ints) -> npt.NDArray[np.int32]:
    """Numbers from 0 in the order in which names appear first."""
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return rank[inverse.reshape(-1)]
