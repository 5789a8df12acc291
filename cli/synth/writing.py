"""Writing of generated traces: a progress bar, open loops, the file's digest."""

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.traces.workload import Workload
    from mallee.traces.written import Written

STDOUT: Final = Path("-")
_ALSO_STDOUT: Final = (Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1"))
_QUIET_S: Final = 2.0  # what takes less shows no progress


def plain_out(out: Path) -> Path:
    """`STDOUT` for each of its names: nothing else may be written there then."""
    return STDOUT if out in _ALSO_STDOUT else out


def write(
    workload: "Workload",
    out: Path,
    requests: int,
    format: str,
    block_size: int | None,
    *,
    is_open: bool,
) -> "Written":
    """Raises ConfigError: forks and `is_open`, or as the writer does."""
    from mallee.traces.write import write_workload

    if is_open and format == "agentic":
        workload = _opened(workload)
    with _progress(workload, requests) as shown:
        return write_workload(shown, out, format=format, block_size=block_size)


def _opened(workload: "Workload") -> "Workload":
    """The same arrivals without waits. Raises ConfigError for forks."""
    from msgspec.structs import replace as changed

    if workload.has_forks:
        raise ConfigError("--open-loop: forks wait for their parents; add --format mooncake")
    return replace(
        workload,
        read=lambda: (changed(each, wait_for=(), tool_wait_s=0.0) for each in workload),
    )


@contextmanager
def _progress(workload: "Workload", requests: int) -> Iterator["Workload"]:
    """`workload`, with a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield workload
        return
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("generating", total=requests)
    quiet_until = time.monotonic() + _QUIET_S

    def read() -> Iterator[Any]:
        is_shown = False
        for number, request in enumerate(workload):
            if not number % 1024:
                if not is_shown and time.monotonic() > quiet_until:
                    bar.start()
                    is_shown = True
                bar.update(task, completed=number)
            yield request

    try:
        yield replace(workload, read=read)
    finally:
        bar.stop()


def digest(out: Path) -> str | None:
    """SHA-256 of the file; None for a stream."""
    if out == STDOUT or not out.is_file():
        return None
    with out.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
