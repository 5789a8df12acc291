"""A worker's process and its device: named by it, and pinned to the CPUs beside it, on made-up machines."""

import logging
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mallee.actors import cluster
from mallee.actors.build import Placement, place_worker
from mallee.actors.hosting.numa import Neighbours, neighbours, pin
from mallee.actors.local import check_gpus
from mallee.protocol.errors import ConfigError
from mallee.runtime.config import AppConfig

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


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], dict[int, set[int]]]:
    """Has the process use some CPUs; those that are set then, by thread. Thread 101 has ended meanwhile."""

    def allow(cpus: range) -> dict[int, set[int]]:
        pinned: dict[int, set[int]] = {}

        def set_affinity(thread: int, cpus: Collection[int]) -> None:
            if thread == 101:
                raise ProcessLookupError(thread)
            pinned[thread] = set(cpus)

        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(cpus))
        monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
        return pinned

    return allow


def test_every_thread_goes_to_the_cpus_of_the_devices_node(
    sysfs: Callable[..., Path], tasks: Path, affinity: Callable[[range], dict[int, set[int]]]
) -> None:
    """Of those that the process may use at all."""
    pinned, root = affinity(range(6)), sysfs()
    assert neighbours("0000:9B:00.0", root) == Neighbours(1, frozenset({4, 5, 6, 12}))
    assert pin(PCI, root=root, tasks=tasks) == Neighbours(1, frozenset({4, 5}))
    assert pinned == {100: {4, 5}, 107: {4, 5}}


@pytest.mark.parametrize(
    ("machine", "pci", "allowed", "near"),
    [
        ({}, "", range(16), "none that Linux lists"),
        ({}, "0000:01:00.0", range(16), "none that Linux lists"),
        ({"node": "-1"}, PCI, range(16), "none that Linux lists"),
        ({"cpus": ""}, PCI, range(16), "none that Linux lists"),
        ({"cpus": "many"}, PCI, range(16), "none that Linux lists"),
        ({}, PCI, range(4), "[4, 5, 6, 12], the process may use [0, 1, 2, 3]"),
        ({"cpus": "0-3"}, PCI, range(2), "[0, 1, 2, 3], the process may use [0, 1]"),
    ],
)
def test_where_there_is_nothing_to_choose_nothing_changes_but_a_line_of_the_log(
    sysfs: Callable[..., Path],
    tasks: Path,
    affinity: Callable[[range], dict[int, set[int]]],
    caplog: pytest.LogCaptureFixture,
    machine: dict[str, str],
    pci: str,
    allowed: range,
    near: str,
) -> None:
    pinned, root = affinity(allowed), sysfs(**machine)
    with caplog.at_level(logging.DEBUG):
        assert pin(pci, root=root, tasks=tasks) is None
    assert pinned == {}
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert f"the CPUs beside device {pci!r} are {near}" in record.getMessage()


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


def config(**engine: Any) -> AppConfig:
    return AppConfig.model_validate({"model": "m", "engine": engine})


@pytest.fixture
def two_gpus(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    affinity: Callable[[range], dict[int, set[int]]],
) -> dict[int, set[int]]:
    """A process with one of a machine's GPUs; CPUs by thread that was pinned."""
    properties = SimpleNamespace(
        name="NVIDIA H200", pci_domain_id=0, pci_bus_id=0x9B, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    folder = tmp_path / "bus/pci/devices/0000:9b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1")
    (folder / "local_cpulist").write_text("8-15")
    return affinity(range(16))


def test_a_worker_is_pinned_beside_its_gpu_and_named_by_it(
    two_gpus: dict[int, set[int]], tmp_path: Path
) -> None:
    """Ray's number of it, its place on the bus, its NUMA node; pinning can be switched off."""
    place = place_worker(config(device="cuda", pin_cpus=False), ["3"], tmp_path)
    assert place == Placement("NVIDIA H200, GPU 3, 0000:9b:00.0", None)
    assert not two_gpus
    with pytest.raises(ConfigError, match=r"has 1 CUDA device\(s\).*each worker has its own"):
        place_worker(config(device="cuda:1"), ["3"])
    place = place_worker(config(device="cuda"), ["3"], tmp_path)
    assert place == Placement("NVIDIA H200, GPU 3, 0000:9b:00.0, NUMA node 1", 8)
    assert two_gpus
    assert all(cpus == set(range(8, 16)) for cpus in two_gpus.values())


def test_a_worker_on_a_cpu_is_not_pinned_and_says_what_ray_gave_it() -> None:
    before = os.sched_getaffinity(0)
    assert place_worker(config(), []) == Placement("")
    assert place_worker(config(), ["1"]) == Placement("GPU 1")
    assert os.sched_getaffinity(0) == before


def test_more_workers_than_a_machine_has_gpus_are_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would wait for them for ever."""
    monkeypatch.setattr(cluster, "num_gpus", lambda: 2.0)
    values: dict[str, Any] = {"model": "m", "engine": {"device": "cuda"}}
    check_gpus(AppConfig.model_validate({**values, "workers": 2}))
    check_gpus(AppConfig.model_validate({**values, "workers": 4, "ray": {"worker_gpus": 0.5}}))
    check_gpus(AppConfig.model_validate({"model": "m", "workers": 9}))
    with pytest.raises(ConfigError, match=r"workers=3 ask for 3 GPUs .* Ray finds 2 on this"):
        check_gpus(AppConfig.model_validate({**values, "workers": 3}))
