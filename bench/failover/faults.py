"""Faults: processes of a running service, killed, stopped, or hanging in a forward pass."""

import os
import signal
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import psutil

HANG = "MALLEE_BENCH_HANG"
CLOCK = "MALLEE_BENCH_CLOCK"
HOOKS: Final = Path(__file__).parent / "hooks"
PARTS: Final = {
    "worker": "ServeReplica:mallee:Worker",
    "gateway": "ServeReplica:mallee:Gateway",
    "broker": "nats-server",
}


def hang_environment(order: Path) -> dict[str, str]:
    """The environment of a service whose workers can be made to hang."""
    order.touch()
    return {HANG: str(order), **_with_hooks()}


def clock_environment(error: Path) -> dict[str, str]:
    """The environment of processes whose wall clock is wrong by what `set_clock` says.

    `{net}` in the file's name stands for the number of a process's network namespace.
    """
    return {CLOCK: str(error), **_with_hooks()}


def set_clock(error: Path, seconds: float) -> None:
    with error.open("r+b" if error.exists() else "wb") as file:  # it is mapped: never cut it
        file.write(struct.pack("d", seconds))


def _with_hooks() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(HOOKS), *filter(None, [before])])}


def processes(service: int, part: str) -> list[int]:
    """Numbers of the running processes of a part of the service whose first process is `service`."""
    found = []
    for process in psutil.Process(service).children(recursive=True):
        try:
            if PARTS[part] in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue  # it has ended meanwhile
    return sorted(found)


class Fault(NamedTuple):
    """An evil that befalls one process, and its end, unless that is death."""

    part: str
    begin: Callable[[int], None]
    end: Callable[[int], None] | None = None


def faults(order: Path) -> Mapping[str, Fault]:
    """All that are tried, by name."""
    return {
        "worker killed": Fault("worker", _signal(signal.SIGKILL)),
        "worker stopped": Fault("worker", _signal(signal.SIGSTOP), _signal(signal.SIGCONT)),
        "worker hangs": Fault(
            "worker", lambda pid: _write(order, str(pid)), lambda pid: _write(order, "")
        ),
        "broker killed": Fault("broker", _signal(signal.SIGKILL)),
        "gateway killed": Fault("gateway", _signal(signal.SIGKILL)),
    }


def _signal(number: signal.Signals) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def _write(order: Path, text: str) -> None:
    order.write_text(text)
