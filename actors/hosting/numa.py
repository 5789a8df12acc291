"""Pins a worker's process to the CPUs beside its GPU, as Linux lists them.

Copies between a device and the memory of another NUMA node cross the link between sockets. A thread that runs
beside the device also takes its memory there: a page lies where it is first touched.
"""

import logging
import os
from collections.abc import Callable, Collection
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


def pin(
    pci: str,
    *,
    root: Path = SYS,
    tasks: Path = TASKS,
    allowed: Collection[int] | None = None,
    set_affinity: Callable[[int, Collection[int]], None] | None = None,
) -> Neighbours | None:
    """Keep every thread of this process to the CPUs beside the device; those it starts inherit that.

    None, and a line of the log at debug level: there is nothing to choose, and nothing was changed. `allowed`
    are the CPUs that the process may use, `set_affinity(thread, cpus)` sets them: Linux's own by default.
    """
    may = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    found = neighbours(pci, root) if pci else None
    if found is None or not found.cpus & may or may <= found.cpus:
        log.debug("not pinned to a NUMA node: %s", _reason(pci, found, may))
        return None
    cpus = found.cpus & may
    for thread in sorted(int(task.name) for task in tasks.iterdir()):
        try:
            (set_affinity or os.sched_setaffinity)(thread, cpus)
        except ProcessLookupError:
            continue  # it has ended
    return Neighbours(found.node, cpus)


def _reason(pci: str, found: Neighbours | None, may: frozenset[int]) -> str:
    if not pci:
        return "the device has no PCI address"
    if found is None:
        return f"{pci} has no NUMA node"
    if may <= found.cpus:
        return f"the process may use no others than those beside {pci}"
    return f"none of the CPUs beside {pci} may be used by this process"
