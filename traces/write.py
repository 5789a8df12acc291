"""Writes a workload as Mooncake's rows, agentic rows, aiperf's dag-jsonl, or a folder of Weka's sessions."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias, cast, get_args

import msgspec
import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.protocol.workload import WorkloadRow
from mallee.traces.files.output import whole_file
from mallee.traces.formats.agentic import class_of
from mallee.traces.formats.dag_write import write_dag
from mallee.traces.formats.weka import weka_sessions
from mallee.traces.paths import Prompts
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload
from mallee.traces.written import Written

Format: TypeAlias = Literal["mooncake", "agentic", "dag", "weka"]

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
    (`dag_write` has what is lost), and like "weka" not streamed; this writes a folder of files, one for each
    session (`weka` has what is lost). Raises ConfigError for a wrong
    option, for a workload without requests or out of order, and where the file can't be written.
    """
    if format not in get_args(Format):
        raise ConfigError(f"format={format!r}: give one of {', '.join(get_args(Format))}")
    size = workload.id_tokens if block_size is None else block_size
    prompts = Prompts(workload.id_tokens, size, has_forks=workload.has_forks)
    is_direct = size == workload.id_tokens and not workload.has_forks
    written = Written()
    if format == "weka":
        kept = _agentic(_ordered(workload), prompts, written, is_direct=is_direct)
        _write_files(weka_sessions(kept, size, written), written, Path(path))
        return written
    with whole_file(path) as file:
        if format == "dag":
            written = write_dag(_ordered(workload), workload.id_tokens, file)
        else:
            rows = _agentic if format == "agentic" else _mooncake
            _write(rows(_ordered(workload), prompts, written, is_direct=is_direct), written, file)
        if not written.requests:
            raise ConfigError(f"{workload.name}: there are no requests to write")
    return written


def _write(rows: Iterator[msgspec.Struct], written: Written, file: IO[bytes]) -> None:
    while batch := list(islice(rows, _BATCH)):
        packed = _lines.encode_lines(batch)
        file.write(packed)
        written.rows += len(batch)
        written.nbytes += len(packed)


def _write_files(sessions: Iterator[dict[str, Any]], written: Written, folder: Path) -> None:
    """Files of a new folder. Raises ConfigError if it can't be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder}: give a new folder for sessions ({error.strerror})") from error
    for number, session in enumerate(sessions):
        with whole_file(folder / f"{number:06}.json") as file:
            written.nbytes += file.write(_lines.encode(session))
        written.rows += 1


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


def _mooncake(
    requests: Iterator[Request], prompts: Prompts, written: Written, *, is_direct: bool
) -> Iterator[PlainRow]:
    """Rows of an open loop; what they lose is counted in `written`."""
    for request in requests:
        written.requests += 1
        at_ms = round(1000 * request.arrival_s, 3)
        output = request.output_tokens or 1  # others refuse 0
        is_fork = request.parent != NO_PARENT
        if is_direct and not request.num_children and not is_fork:
            row = PlainRow(at_ms, request.input_tokens, output, _ids(request.ids))
            rest = [row] * (request.branches - 1)
        else:
            row, *rest = (
                PlainRow(at_ms, max(1, each.tokens), output, each.path.tolist())
                for each in prompts.of(request, request.branches)
            )
            rest = rest or [row] * (request.branches - 1)
        yield row
        yield from rest
        written.copies += len(rest)
        written.flattened += is_fork
        written.lost_waits += len({*request.wait_for, request.parent} - {NO_PARENT})


def _agentic(
    requests: Iterator[Request], prompts: Prompts, written: Written, *, is_direct: bool
) -> Iterator[WorkloadRow]:
    """Rows that keep everything."""
    names = _Names()
    for request in requests:
        written.requests += 1
        names.add(request)
        is_fork = request.parent != NO_PARENT
        if is_direct and not request.num_children and not is_fork:
            tokens, ids = request.input_tokens, _ids(request.ids)
        else:
            prompt = prompts.of(request)[0]
            tokens, ids = prompt.tokens, prompt.path.tolist()
        waits = sorted({*request.wait_for, request.parent} - {NO_PARENT})
        derived = class_of(
            is_fork=is_fork,
            branches=request.branches,
            num_waits=len(waits),
            has_session=bool(request.session),
        )
        yield WorkloadRow(
            timestamp=round(1000 * request.arrival_s, 3),
            input_length=tokens,
            output_length=request.output_tokens,
            hash_ids=ids,  # type: ignore[arg-type]  # only tuples are read, but any sequence is written
            session_id=request.session or None,
            request_id=names[request.number],
            wait_for=tuple(names[other] for other in waits),
            tool_wait_ms=round(1000 * request.tool_wait_s, 3) if request.tool_wait_s else _NO_WAIT,
            branches=request.branches,
            prefix_reset=request.is_reset,
            fork_of=names[request.parent] if is_fork else None,
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
