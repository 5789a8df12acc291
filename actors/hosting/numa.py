"""Pins a worker's process to the CPUs beside its GPU, as Linux lists them.

Copies between a device and the memory of another NUMA node cross the link between sockets. A thread that runs
beside the device also takes its memory there: a page lies where it is first touched.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

SYS: Final = Path("/sys")
TASKS: Final = Path("/proc/self/task")


class Neighbours(NamedTuple):
    """The NUMA node of a device, and its CPUs."""

    node: int
    cpus: frozenset[int]


def neighbours(pci: str, root: Path = SYS) -> Neighbours | None:
    """Of the device with that PCI address; None: this machine has no such list."""
    folder = root / "bus/pci/devices" / pci.lower()
    try:
        node = int((folder / "numa_node").read_text())
        cpus = parse_cpus((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return None
    return Neighbours(node, cpus) if node >= 0 and cpus else None  # -1: of no node


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list as "0-3,8". Raises ValueError."""
    cpus = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def pin(pci: str, *, root: Path = SYS, tasks: Path = TASKS) -> Neighbours | None:
    """Keep every thread of this process to the CPUs beside the device; those it starts inherit that.

    None, and a line of the log at debug level: there is nothing to choose, and nothing was changed.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    found = neighbours(pci, root) if pci else None
    if found is None or not found.cpus & allowed or allowed <= found.cpus:
        near = "none that Linux lists" if found is None else sorted(found.cpus)
        text = "not pinned to a NUMA node: the CPUs beside device %r are %s, the process may use %s"
        log.debug(text, pci, near, sorted(allowed))
        return None
    cpus = found.cpus & allowed
    for thread in sorted(int(task.name) for task in tasks.iterdir()):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cpus)
    return Neighbours(found.node, cpus)
