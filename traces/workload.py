"""Requests to a fleet, in one form for all kinds of trace files.

A `Workload` is read again from its file each time it is iterated, request by request, so that a trace
need not fit into memory. Times are seconds since the first request.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, overload

import msgspec
import numpy as np
import numpy.typing as npt

NO_PARENT = -1
_FEW_IDS: Final = 8
_LONG_IDS: Final = 32


class Runs(Sequence[int]):
    """Ids `first, first + 1, ..` of several runs, one after another; long prompts in a few numbers.

    `np.asarray(runs)` gives them all. `length` cuts the last run.
    """

    __slots__ = ("_length", "_runs")

    def __init__(self, runs: Sequence[tuple[int, int]], length: int | None = None) -> None:
        """`runs` are (first, how many). Raises ValueError if they hold fewer than `length` ids."""
        total = sum(count for _, count in runs)
        self._length = total if length is None else length
        if not 0 <= self._length <= total or any(count < 0 for _, count in runs):
            raise ValueError(f"runs of {total} ids don't make {length}")
        self._runs = tuple(runs)

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, how many), the last perhaps longer than what is left of it."""
        return self._runs

    def array(self) -> npt.NDArray[np.int64]:
        """All ids."""
        if len(self._runs) == 1:
            first = self._runs[0][0]
            return np.arange(first, first + self._length, dtype=np.int64)
        parts = [np.arange(first, first + count, dtype=np.int64) for first, count in self._runs]
        whole = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return whole[: self._length]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.array() if dtype is None else self.array().astype(dtype, copy=False)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self.array()[index].tolist())
        at = range(self._length)[index]
        for first, count in self._runs:
            if at < count:
                return first + at
            at -= count
        raise AssertionError("the runs hold as many ids as the length says")

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs({list(self._runs)}, {self._length})"


def compact(ids: list[int]) -> Sequence[int]:
    """The same ids, copied: few as a list, many as runs, or as machine words if runs are short."""
    if len(ids) < _FEW_IDS:
        return list(ids)
    if len(ids) < _LONG_IDS:
        return array("q", ids)
    breaks = np.flatnonzero(np.diff(np.asarray(ids)) != 1) + 1
    if len(breaks) > len(ids) // 4:
        return array("q", ids)
    begins = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(ids)]
    return Runs([(ids[a], b - a) for a, b in zip(begins, ends, strict=True)])


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. Without `parent` it has its whole prompt; with one it forks that one's end.

    `ids` name the prompt's text from the first token on, `Workload.id_tokens` tokens each (the last
    may be partial), prefix-chained: equal id, equal text up to there. Tokens beyond them are text of
    its own. Where dependencies count, a request that waits starts `tool_wait_s` after the last
    it waits for has ended, at any `arrival_s`; in an open loop it starts at `arrival_s` (the recorded
    time) in any case. A fork always waits for its parent.
    """

    number: int  # place in the workload, from 0
    arrival_s: float
    ids: Sequence[int]  # () for a fork
    input_tokens: int  # whole prompt; of a fork what it adds to its parent's text (0: nothing)
    output_tokens: int  # of each branch; 0: only the prompt is computed, for forks of it to come
    session: str = ""  # "": none
    cls: str = "request"  # kind of request, for reports per class
    wait_for: tuple[int, ...] = ()  # numbers of earlier requests
    tool_wait_s: float = 0.0
    branches: int = 1  # answers to the one prompt; of a fork: forks, each with text of its own
    parent: int = NO_PARENT  # number of the request whose end (prompt + answer) this one forks
    num_children: int = 0  # requests that will fork this one: keep its capsule for so many
    name: str = ""  # the trace's own id of it
    is_reset: bool = False  # its session's context was dropped: it goes on from no earlier request


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival; those that depend on others come after them."""

    name: str
    id_tokens: int  # tokens that an id stands for
    read: Callable[[], Iterator[Request]]
    kind: str = "requests"  # of file: mooncake, agentic, bailian, sessions, trees, dag, azure
    note: str = ""  # what was assumed in reading it; for reports
    has_forks: bool = False  # whether requests fork what others left

    def __iter__(self) -> Iterator[Request]:
        """Raises CodecError with file, line number and field at the first bad line."""
        return self.read()
