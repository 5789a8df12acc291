"""Writes a workload as a trace file: Mooncake's rows, agentic rows, or aiperf's dag-jsonl."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec
import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.protocol.workload import WorkloadRow
from mallee.traces.files.output import whole_file
from mallee.traces.formats.agentic import class_of
from mallee.traces.formats.dag_write import write_dag
from mallee.traces.paths import Prompts
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload
from mallee.traces.written import Written

Format: TypeAlias = Literal["mooncake", "agentic", "dag"]
T = TypeVar("T")

_BATCH: Final = 2048
# The default itself is left out of the file, an equal number is not.
_NO_WAIT: Final = WorkloadRow(timestamp=0.0, input_length=0, output_length=0).tool_wait_ms
_lines: Final = msgspec.json.Encoder()


class PlainRow(msgspec.Struct, gc=False):
    """Mooncake's fields, all of which are always there."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def write_workload(
    workload: Workload,
    path: Path | str,
    *,
    format: str = "mooncake",
    block_size: int | None = None,
) -> Written:
    """Write all requests to `path` and count what was lost; the file is there whole or not at all.

    `.gz` and `.zst` are packed, "-" is standard output. `block_size` is what an id of the file stands
    for, by default as in the workload. Times are written to the microsecond.

    "mooncake" is an open loop: arrivals, lengths, ids; dependencies are lost, a fork is written as its
    whole prompt, branches as so many rows. "agentic" keeps all. "dag" is text for conversations
    (`dag_write` has what is lost), and the only one that is not streamed. Raises ConfigError for a wrong
    option, for a workload without requests or out of order, and where the file can't be written.
    """
    if format not in get_args(Format):
        raise ConfigError(f"format={format!r}: give one of {', '.join(get_args(Format))}")
    size = workload.id_tokens if block_size is None else block_size
    prompts = Prompts(workload.id_tokens, size, has_forks=workload.has_forks)
    is_direct = size == workload.id_tokens and not workload.has_forks
    with whole_file(path) as file:
        if format == "dag":
            written = write_dag(_ordered(workload), workload.id_tokens, file)
        elif format == "agentic":
            written = _write(_Agentic(prompts, is_direct), workload, file)
        else:
            written = _write(_Mooncake(prompts, is_direct), workload, file)
        if not written.requests:
            raise ConfigError(f"{workload.name}: there are no requests to write")
    return written


def _write(rows: "_Mooncake | _Agentic", workload: Workload, file: IO[bytes]) -> Written:
    num_rows = nbytes = 0
    encode = _lines.encode_lines
    for batch in _batches(rows.of(_ordered(workload))):
        packed = encode(batch)
        file.write(packed)
        num_rows += len(batch)
        nbytes += len(packed)
    return msgspec.structs.replace(rows.written, rows=num_rows, nbytes=nbytes)


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _BATCH)):
        yield batch


def _ordered(workload: Workload) -> Iterator[Request]:
    """The requests. Raises ConfigError if they are not in order of arrival, numbered from 0."""
    last_s = float("-inf")
    for number, request in enumerate(workload):
        if request.number != number or request.arrival_s < last_s:
            what = f"number {request.number} at {request.arrival_s} s after {last_s} s"
            raise ConfigError(
                f"{workload.name}: {what} at place {number}; number requests from 0 by arrival"
            )
        last_s = request.arrival_s
        yield request


class _Mooncake:
    """Rows of an open loop."""

    def __init__(self, prompts: Prompts, is_direct: bool) -> None:
        self.written = Written()
        self._prompts = prompts
        self._is_direct = is_direct

    def of(self, requests: Iterator[Request]) -> Iterator[PlainRow]:
        num_requests = flattened = copies = lost = 0
        for request in requests:
            num_requests += 1
            at_ms = round(1000 * request.arrival_s, 3)
            output = request.output_tokens or 1  # others refuse 0
            if self._is_direct and not request.num_children and request.parent == NO_PARENT:
                row = PlainRow(at_ms, request.input_tokens, output, _ids(request.ids))
                yield row
                rest = [row] * (request.branches - 1)
            else:
                found = self._prompts.of(request, request.branches)
                row, *rest = [
                    PlainRow(at_ms, max(1, each.tokens), output, each.path.tolist())
                    for each in found
                ]
                yield row
                rest = rest or [row] * (request.branches - 1)
            yield from rest
            copies += len(rest)
            is_fork = request.parent != NO_PARENT
            flattened += is_fork
            lost += len({*request.wait_for, request.parent} - {NO_PARENT})
        self.written = Written(
            requests=num_requests, flattened=flattened, copies=copies, lost_waits=lost
        )


class _Agentic:
    """Rows that keep everything."""

    def __init__(self, prompts: Prompts, is_direct: bool) -> None:
        self.written = Written()
        self._prompts = prompts
        self._is_direct = is_direct
        self._names = _Names()

    def of(self, requests: Iterator[Request]) -> Iterator[WorkloadRow]:
        num_requests = 0
        for request in requests:
            num_requests += 1
            self._names.add(request)
            if self._is_direct and not request.num_children and request.parent == NO_PARENT:
                yield self._row(request, request.input_tokens, _ids(request.ids))
            else:
                prompt = self._prompts.of(request)[0]
                yield self._row(request, prompt.tokens, prompt.path.tolist())
        self.written = Written(requests=num_requests)

    def _row(self, request: Request, tokens: int, ids: Sequence[int]) -> WorkloadRow:
        is_fork = request.parent != NO_PARENT
        waits = sorted({*request.wait_for, request.parent} - {NO_PARENT})
        derived = class_of(
            is_fork=is_fork,
            branches=request.branches,
            num_waits=len(waits),
            has_session=bool(request.session),
        )
        return WorkloadRow(
            timestamp=round(1000 * request.arrival_s, 3),
            input_length=tokens,
            output_length=request.output_tokens,
            hash_ids=ids,  # type: ignore[arg-type]  # only tuples are read, but any sequence is written
            session_id=request.session or None,
            request_id=self._names[request.number],
            wait_for=tuple(self._names[other] for other in waits),
            tool_wait_ms=round(1000 * request.tool_wait_s, 3) if request.tool_wait_s else _NO_WAIT,
            branches=request.branches,
            prefix_reset=request.is_reset,
            fork_of=self._names[request.parent] if is_fork else None,
            cls=None if request.cls == derived else request.cls,
        )


class _Names:
    """Names of requests by their numbers; those that have none are called by their number."""

    def __init__(self) -> None:
        self._given: dict[int, str] = {}
        self._taken: set[str] = set()

    def add(self, request: Request) -> None:
        """Raises ConfigError if the name is another's."""
        name = request.name or str(request.number)
        is_taken = name in self._taken
        if request.name:
            self._given[request.number] = name
            self._taken.add(name)
            is_short = len(name) <= len(str(request.number))  # int() refuses thousands of digits
            number = int(name) if is_short and name.isdecimal() else request.number
            is_taken |= (
                str(number) == name and number < request.number and number not in self._given
            )
        if is_taken:
            raise ConfigError(f"two requests are called {name!r}; give each a name of its own")

    def __getitem__(self, number: int) -> str:
        return self._given.get(number) or str(number)


def _ids(ids: Sequence[int]) -> Sequence[int]:
    """The same as a list, which the encoder knows."""
    if isinstance(ids, Runs):
        found: list[int] = []
        for first, count in ids.runs:
            found += range(first, first + count)
        del found[len(ids) :]
        return found
    if isinstance(ids, np.ndarray):
        return cast(list[int], ids.tolist())
    return ids if isinstance(ids, list) else list(ids)
