"""A worker's process and its device: named, and pinned beside it."""

import os
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mallee.actors import cluster
from mallee.actors.build import Place, settle
from mallee.actors.config import AppConfig
from mallee.actors.local import check_gpus
from mallee.protocol.errors import ConfigError


def config(**engine: Any) -> AppConfig:
    return AppConfig.model_validate({"model": "m", "engine": engine})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[int, set[int]]:
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
    pinned: dict[int, set[int]] = {}

    def set_affinity(thread: int, cpus: Collection[int]) -> None:
        pinned[thread] = set(cpus)

    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    return pinned


def test_a_worker_is_pinned_beside_its_gpu_and_named_by_it(
    two_gpus: dict[int, set[int]], tmp_path: Path
) -> None:
    """Ray's number of it, its place on the bus, its NUMA node."""
    place = settle(config(device="cuda"), ["3"], tmp_path)
    assert place == Place("NVIDIA H200, GPU 3, 0000:9b:00.0, NUMA node 1", 8)
    assert two_gpus
    assert all(cpus == set(range(8, 16)) for cpus in two_gpus.values())


def test_pinning_can_be_switched_off(two_gpus: dict[int, set[int]], tmp_path: Path) -> None:
    place = settle(config(device="cuda", pin_cpus=False), ["3"], tmp_path)
    assert place == Place("NVIDIA H200, GPU 3, 0000:9b:00.0", None)
    assert not two_gpus


def test_a_device_that_ray_did_not_give_is_refused(two_gpus: dict[int, set[int]]) -> None:
    with pytest.raises(ConfigError, match=r"has 1 CUDA device\(s\).*each worker has its own"):
        settle(config(device="cuda:1"), ["3"])


def test_a_worker_on_a_cpu_is_not_pinned_and_says_what_ray_gave_it() -> None:
    before = os.sched_getaffinity(0)
    assert settle(config(), []) == Place("")
    assert settle(config(), ["1"]) == Place("GPU 1")
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
