"""Pinning to the CPUs beside a device, on a made-up machine."""

import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from mallee.actors.hosting.numa import Neighbours, neighbours, pin

PCI = "0000:9b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Callable[..., Path]:
    """A folder as /sys has it, with one device."""

    def make(node: str = "1", cpus: str = "4-6,12", pci: str = PCI) -> Path:
        folder = tmp_path / "bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "local_cpulist").write_text(f"{cpus}\n")
        return tmp_path

    return make


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A process of three threads."""
    folder = tmp_path / "task"
    for thread in (100, 101, 107):
        (folder / str(thread)).mkdir(parents=True)
    return folder


class Affinity:
    """Takes down what is set; thread 101 has ended meanwhile."""

    def __init__(self) -> None:
        self.cpus: dict[int, set[int]] = {}

    def __call__(self, thread: int, cpus: Collection[int]) -> None:
        if thread == 101:
            raise ProcessLookupError(thread)
        self.cpus[thread] = set(cpus)


def test_every_thread_goes_to_the_cpus_of_the_devices_node(
    sysfs: Callable[..., Path], tasks: Path
) -> None:
    """Of those that the process may use at all."""
    seen = Affinity()
    root = sysfs()
    assert neighbours("0000:9B:00.0", root) == Neighbours(1, frozenset({4, 5, 6, 12}))
    found = pin(PCI, root=root, tasks=tasks, allowed=range(6), set_affinity=seen)
    assert found == Neighbours(1, frozenset({4, 5}))
    assert seen.cpus == {100: {4, 5}, 107: {4, 5}}


@pytest.mark.parametrize(
    ("machine", "pci", "allowed", "reason"),
    [
        ({}, "", range(16), "no PCI address"),
        ({}, "0000:01:00.0", range(16), "0000:01:00.0 has no NUMA node"),
        ({"node": "-1"}, PCI, range(16), "has no NUMA node"),
        ({"cpus": ""}, PCI, range(16), "has no NUMA node"),
        ({"cpus": "many"}, PCI, range(16), "has no NUMA node"),
        ({}, PCI, range(4), "none of the CPUs"),
        ({"cpus": "0-15"}, PCI, range(8), "may use no others"),
    ],
)
def test_where_there_is_nothing_to_choose_nothing_changes_but_a_line_of_the_log(
    sysfs: Callable[..., Path],
    tasks: Path,
    caplog: pytest.LogCaptureFixture,
    machine: dict[str, str],
    pci: str,
    allowed: range,
    reason: str,
) -> None:
    seen, root = Affinity(), sysfs(**machine)
    with caplog.at_level(logging.DEBUG):
        assert pin(pci, root=root, tasks=tasks, allowed=allowed, set_affinity=seen) is None
    assert seen.cpus == {}
    (record,) = caplog.records
    assert (record.levelno, reason in record.getMessage()) == (logging.DEBUG, True)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two CPUs",
)
def test_threads_that_run_and_those_to_come_are_pinned_for_real(
    sysfs: Callable[..., Path],
) -> None:
    before = os.sched_getaffinity(0)
    chosen = min(before)
    stop, ids = threading.Event(), list[int]()

    def wait() -> None:
        ids.append(threading.get_native_id())
        stop.wait(30)

    running = threading.Thread(target=wait)
    running.start()
    try:
        pin(PCI, root=sysfs(cpus=str(chosen)))
        later = threading.Thread(target=wait)
        later.start()
        assert {os.sched_getaffinity(0).pop()} == {chosen}
        while len(ids) < 2:
            stop.wait(0.01)
        assert [os.sched_getaffinity(thread) for thread in ids] == [{chosen}, {chosen}]
    finally:
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), before)
        stop.set()
        running.join()
        later.join()
