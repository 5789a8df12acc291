"""The bench of an idle service: roles of processes, and a real one."""

import os

import psutil
import pytest

from bench.idle import Sample, by_role, medians, role_of, sample
from support.benches import run_bench


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:mallee:Gateway"], "gateway"),
        (["ray::ServeReplica:mallee:Worker"], "worker"),
        (["ray::ServeReplica:mallee:Broker"], "broker's supervisor"),
        (["/x/nats-server", "-c", "y"], "NATS"),
        (["ray::ServeController"], "Serve's controller"),
        (["/x/core/src/ray/raylet/raylet", "--raylet_socket_name=z"], "Ray's raylet"),
        (["/x/python", "-m", "mallee.cli", "serve"], "mallee serve"),
        (["/x/python", "-u", "/x/monitor.py"], "Ray's others"),
        ([], "Ray's others"),
    ],
)
def test_processes_have_roles_by_their_command(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_time_is_counted_by_role_and_of_new_processes_whole() -> None:
    before = {1: Sample("gateway", 1.0, 50.0), 2: Sample("worker", 5.0, 10.0)}
    after = {1: Sample("gateway", 1.5, 60.0), 3: Sample("gateway", 0.5, 40.0)}
    found = by_role(before, after, 10.0)
    assert found["gateway"] == {"count": 2, "cores": pytest.approx(0.1), "mb": 100.0}
    assert found["all"] == found["gateway"]
    assert "worker" not in found
    assert medians([found, {"all": {"count": 4, "cores": 0.3, "mb": 0.0}}])["all"]["count"] == 3


def test_a_process_is_sampled_with_its_children() -> None:
    found = sample(psutil.Process())
    assert found[os.getpid()].pss_mb > 1
    assert found[os.getpid()].cpu_s > 0


@pytest.mark.ray
@pytest.mark.alone
def test_an_idle_service_uses_a_small_part_of_a_core() -> None:
    found, _ = run_bench("idle", "--quick", "--cases", "mocked_10")
    roles = found["cases"]["mocked_10"]
    assert {"gateway", "worker", "NATS", "Serve's controller", "mallee serve"} <= set(roles)
    assert roles["gateway"]["count"] == roles["worker"]["count"] == 1
    assert (
        sum(part["count"] for name, part in roles.items() if name != "all")
        == (roles["all"]["count"])
    )
    assert 100 < roles["all"]["mb"] < 4000
