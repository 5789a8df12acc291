"""Serve's config and the accounts of NATS in the chart, as Mallee's own commands see them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.actors.config import AppConfig
from mallee.cli.main import cli
from support.chart import (
    ACCOUNTS,
    CHART,
    MINIMAL,
    accounts,
    containers,
    objects,
    one,
    pods,
    serve_config,
    settings,
    values_of,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own schemas
]

FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))


@pytest.mark.parametrize("file", FILES)
def test_mallee_check_takes_the_config_that_kuberay_deploys(file: str, tmp_path: Path) -> None:
    found = objects(values_of(file))
    path = tmp_path / "serve.yaml"
    path.write_text(one(found, "RayService")["spec"]["serveConfigV2"])
    done = CliRunner().invoke(cli, ["check", str(path)])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("file", FILES)
def test_every_file_that_settings_name_is_mounted(file: str) -> None:
    values = {"keys": {"secret": "keys"}, "links": {"tlsSecret": "tls"}, "nats": {"tlsSecret": "n"}}
    found = objects(values_of(file), values)
    made = settings(found)
    needed = [made["nats_credentials"], made["nats_worker_credentials"], made["nats_ca"]]
    needed += [made["http"]["keys_file"], *(v for k, v in made["links"].items() if k != "tcp")]
    needed.append(made["model"])
    for component, container in containers(found):
        if component in ("gateway", "worker") and container["name"].startswith("ray-"):
            mounts = [each["mountPath"] for each in container["volumeMounts"]]
            for path in needed:
                assert any(path.startswith(f"{mount}/") for mount in mounts), path


def test_settings_of_the_user_win_over_those_that_the_chart_only_proposes() -> None:
    given = {"imports": {"spool_gib": 7}, "engine": {"kv_gib": 3.5}, "drain_s": 5}
    config = AppConfig.model_validate(settings(objects(MINIMAL, {"settings": given})))
    assert (config.imports.spool_gib, config.engine.kv_gib, config.drain_s) == (7, 3.5, 5)
    assert config.imports.max_gib == 2


@pytest.mark.parametrize("drain_s", [0, 30, 600])
def test_a_pod_has_time_to_drain(drain_s: int) -> None:
    """Serve gives replicas `drain_s` and ten seconds; the node's deadline and the pod's come after."""
    found = objects(MINIMAL, {"settings": {"drain_s": drain_s}})
    for component in ("gateway", "worker"):
        spec = pods(found)[component]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert drain_s + 10 < int(command[-1]) < spec["terminationGracePeriodSeconds"]


def test_thousand_engines_are_a_thousand() -> None:
    config = AppConfig.model_validate(settings(objects(values_of("values-mock-1000.yaml"))))
    assert (config.is_mocked, config.num_workers) == (True, 1000)


def test_a_spark_has_its_kv_sized_without_nvml_and_its_object_store_capped() -> None:
    found = objects(values_of("values-dgx-spark.yaml"))
    config = AppConfig.model_validate(settings(found))
    assert config.kv_nbytes is None
    assert config.num_blocks is None
    assert config.engine.host_gib == 0  # the same memory
    cluster = one(found, "RayService")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert int(group["rayStartParams"]["object-store-memory"]) <= 128 << 20
        assert group["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    (worker,) = pods(found)["worker"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert worker["resources"]["limits"]["memory"] == "96Gi"
    assert config.engine.device_share is not None
    taken = config.engine.device_share * 119  # GiB that Linux tells of 128 GB
    assert taken + 16 < 96, "weights and KV count in the pod's memory, beside its processes"


def test_a_fixed_number_of_pods_is_told_to_kuberay_by_a_changed_pod() -> None:
    """KubeRay takes no other `replicas` into a cluster that runs."""

    def annotation(values: Mapping[str, Any]) -> dict[str, str]:
        found: dict[str, str] = pods(objects(MINIMAL, values))["worker"]["metadata"].get(
            "annotations", {}
        )
        return found

    fixed = {"autoscaling": {"pods": False}}
    assert annotation(fixed) == {"mallee/pods": "2"}
    assert annotation({}) == {}
    spec = one(objects(MINIMAL, fixed), "RayService")["spec"]["rayClusterConfig"]
    assert "enableInTreeAutoscaling" not in spec
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_the_autoscaler_may_give_back_pods_of_workers_and_not_those_of_gateways() -> None:
    found = objects(MINIMAL, {"autoscaling": {"enabled": True, "minWorkers": 1, "maxWorkers": 6}})
    spec = one(found, "RayService")["spec"]["rayClusterConfig"]
    gateways, workers = spec["workerGroupSpecs"]
    assert (gateways["minReplicas"], gateways["replicas"]) == (2, 2)
    assert (workers["minReplicas"], workers["replicas"], workers["maxReplicas"]) == (0, 2, 64)
    assert settings(found)["autoscaling"]["max_workers"] == 6
    deployments = serve_config(found)["applications"][0]["deployments"]
    assert "num_replicas" not in deployments[0]


def test_accounts_of_nats_are_those_that_mallee_prints() -> None:
    done = CliRunner().invoke(cli, ["settings", "--nats-permissions", "FLEET"])
    assert done.exit_code == 0
    printed = done.stdout.replace("mallee.FLEET.", "mallee.*.")
    assert ACCOUNTS.read_text() == accounts(), "python tests/support/chart.py writes it"
    conf = one(objects(MINIMAL), "ConfigMap", "mallee-nats")["data"]["nats.conf"]
    assert printed in conf
