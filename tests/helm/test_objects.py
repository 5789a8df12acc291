"""Every object of the chart, for each file of values: as Kubernetes and the operators' CRDs want it."""

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from mallee.runtime.config import AppConfig
from support.chart import (
    CHART,
    MINIMAL,
    PICKERS,
    Object,
    containers,
    faults,
    groups,
    merged,
    objects,
    one,
    pods,
    rendered,
    serve_config,
    settings,
    values_of,
)

pytestmark = pytest.mark.process

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = ("1.28", "1.37")  # the oldest that Chart.yaml takes, and the newest
EVERYTHING: Mapping[str, Any] = merged(
    MINIMAL,
    {
        "servedModelName": "q",
        "modelDownload": {"tokenSecret": "hub", "endpoint": "https://hub.example"},
        "modelVolume": {"storageClass": "fast"},
        "image": {"pullSecrets": ["pull"]},
        "extraVolumes": [{"name": "extra", "configMap": {"name": "mine"}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "serviceAccountName": "mine",
        "workers": {
            "runtimeClassName": "nvidia",
            "env": [{"name": "A", "value": "b"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "affinity": {"nodeAffinity": {}},
            "nodeSelector": {"e": "f"},
            "tolerations": [{"operator": "Exists"}],
            "disk": {"kind": "ephemeral", "storageClass": "fast"},
            "surge": True,
        },
        "autoscaling": {"enabled": True},
        "gcs": {"backend": "redis", "redisAddress": "redis:6379", "redisSecret": "redis"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "ingress": {"enabled": True, "host": "llm.example", "tlsSecret": "tls", "className": "x"},
        "keys": {"secret": "keys"},
        "links": {"tlsSecret": "link-tls"},
        "nats": {"tlsSecret": "nats-tls"},
        "networkPolicy": {"egress": True, "egressTo": [{"ports": [{"port": 443}]}]},
        "monitoring": {"enabled": True, "dashboards": True, "labels": {"release": "prometheus"}},
        "timeSlicing": {"replicas": 4},
        "picker": {
            "enabled": True,
            "model": "Qwen/Qwen3-8B",
            "settings": {"events_port": 5557, "replay_port": 5558},
            "inferencePool": {"create": True, "selector": {"app": "vllm"}, "targetPorts": [1, 2]},
            "service": {"port": 9100, "annotations": {"a": "b"}},
            "env": [{"name": "A", "value": "b"}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "affinity": {"nodeAffinity": {}},
            "nodeSelector": {"e": "f"},
            "tolerations": [{"operator": "Exists"}],
        },
    },
)
OUTSIDE: Mapping[str, Any] = {
    "model": "/models/mine",
    "modelVolume": {"claim": "models"},
    "nats": {"enabled": False, "url": "tls://nats.example", "secret": "nats", "caSecret": "ca"},
    "workers": {"disk": {"kind": "claim", "claim": "capsules"}},
    "gcs": {"backend": "rocksdb", "storageClass": "fast"},
    "autoscaling": {"pods": False},
    "ray": {"upgrade": "None"},
    "picker": {
        "enabled": True,
        "model": "/models/mine",
        "pool": "theirs",
        "tls": {"secret": "picker-tls"},
    },
}
PLAIN_PICKERS: Mapping[str, Any] = merged(
    PICKERS,
    {
        "nats": {"enabled": False},
        "picker": {"model": "", "tls": {"enabled": False}},
        "monitoring": {"metrics": False},
        "networkPolicy": {"egress": True, "proxies": []},
    },
)
CASES: dict[str, Mapping[str, Any]] = {
    "minimal": MINIMAL,
    "everything": EVERYTHING,
    "outside": OUTSIDE,
    **{path.name: values_of(path.name) for path in sorted(CHART.glob("values-*.yaml"))},
    "pickers": PICKERS,
    "plain pickers": PLAIN_PICKERS,
}
all_cases = pytest.mark.parametrize("case", CASES)
cases_with_ray = pytest.mark.parametrize("case", [each for each in CASES if "pickers" not in each])
CRDS = (
    "RayService",
    "ScrapeConfig",
    "PodMonitor",
    "ServiceMonitor",
    "PrometheusRule",
    "InferencePool",
)


@cache
def made(case: str) -> list[Object]:
    return objects(CASES[case])


@cache
def schema(name: str) -> Object:
    found: Object = json.loads((SCHEMAS / f"{name}.json").read_text())
    return found


@all_cases
def test_lint_finds_nothing(case: str) -> None:
    assert faults(CASES[case]) == []


@all_cases
def test_kubernetes_takes_every_object_and_pod(case: str) -> None:
    known = [each for each in made(case) if each["kind"] not in CRDS]
    known += [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods(made(case)).values()]
    assert len(known) > 6
    for version in KUBERNETES:
        for each in known:
            kubernetes_validate.validate(each, version, strict=True)


@all_cases
def test_the_operators_crds_take_every_other_object(case: str) -> None:
    for each in made(case):
        if each["kind"] in CRDS:
            jsonschema.validate(each, schema(each["kind"].lower()))


@all_cases
def test_names_are_used_once(case: str) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in made(case)]
    assert len(set(names)) == len(names)
    assert all(len(name) < 64 for _, name in names)


@all_cases
def test_every_volume_is_mounted_and_every_mount_has_one(case: str) -> None:
    for component, pod in pods(made(case)).items():
        volumes = {each["name"] for each in pod["spec"].get("volumes", ())}
        mounted = {
            mount["name"]
            for name, container in containers(made(case))
            if name == component
            for mount in container.get("volumeMounts", ())
        }
        assert mounted == volumes, component


@all_cases
def test_processes_are_no_root_and_write_to_scratch_alone(case: str) -> None:
    for component, pod in pods(made(case)).items():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"], component
        assert security["runAsUser"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        scales = CASES[case].get("autoscaling", {}).get("pods", True)
        asks = component == "picker" or (component == "head" and scales)
        assert pod["spec"]["automountServiceAccountToken"] == asks
        mine = CASES[case].get("serviceAccountName")
        of_picker = "mallee-picker" if component == "picker" else None
        account = mine if component in ("gateway", "worker") else of_picker
        assert pod["spec"].get("serviceAccountName") == account
    for component, container in containers(made(case)):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"], (component, container["name"])
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}


@all_cases
def test_every_container_says_what_it_needs(case: str) -> None:
    for component, container in containers(made(case)):
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), (component, container["name"])
        assert "memory" in resources["limits"]


@all_cases
def test_no_secret_stands_in_anything_but_a_secret(case: str) -> None:
    """Nor in serveConfigV2, commands or arguments: they are shown by Ray, and by `ps`."""
    secrets = [
        base64.b64decode(value).decode()
        for each in made(case)
        if each["kind"] == "Secret"
        for value in each["data"].values()
    ]
    passwords = {part for secret in secrets for part in secret.split(":") if len(part) > 20}
    num_made = {
        "outside": 3,  # Ray's, the links', the operator's
        "everything": 8,  # and three of NATS, the pickers' certificate and its key
        "pickers": 5,
        "plain pickers": 0,
    }
    assert len(passwords) == num_made.get(case, 6)
    others = yaml.safe_dump([each for each in made(case) if each["kind"] != "Secret"])
    assert not [each for each in passwords if each in others]


@all_cases
def test_the_release_is_spread_and_guarded(case: str) -> None:
    """Budgets by a number: Kubernetes takes `maxUnavailable` only for owners with a scale."""
    budgets = {
        each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
        for each in made(case)
        if each["kind"] == "PodDisruptionBudget"
    }
    for component, pod in pods(made(case)).items():
        if component in budgets:
            assert budgets[component]["minAvailable"] >= 1
            assert budgets[component]["selector"]["matchLabels"].items() <= (
                pod["metadata"]["labels"].items()
            )
        if component in ("gateway", "worker", "nats", "picker"):
            for spread in pod["spec"]["topologySpreadConstraints"]:
                chosen = spread["labelSelector"]["matchLabels"]
                assert chosen.items() <= pod["metadata"]["labels"].items()


@all_cases
def test_policies_choose_the_pods_of_the_release(case: str) -> None:
    found = {each["metadata"]["name"]: each["spec"] for each in made(case)
             if each["kind"] == "NetworkPolicy"}  # fmt: skip
    for component, pod in pods(made(case)).items():
        labels = pod["metadata"]["labels"]
        guards = [name for name, spec in found.items() if _chooses(spec["podSelector"], labels)]
        own = {"nats": ["mallee-nats"], "picker": ["mallee-picker"], "test": [], "check": []}
        expected = own.get(component, ["mallee-ray"])
        assert [name for name in guards if name != "mallee-autoscaler"] == expected, component


def _chooses(selector: Object, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


@cases_with_ray
def test_the_notes_say_how_to_ask(case: str) -> None:
    notes = next(text for path, text in rendered(CASES[case]).items() if "NOTES" in path)
    assert "port-forward service/mallee" in notes
    assert "get secret mallee-operator" in notes


@cases_with_ray
def test_a_worker_group_offers_what_its_workers_ask(case: str) -> None:
    """Workers land in pods of workers, as many as a pod is made for, gateways in pods of gateways."""
    config = AppConfig.model_validate(settings(made(case)))
    found = groups(made(case))
    offered = {name: group["resources"] for name, group in found.items()}
    assert offered["head"] == {"CPU": "0"}
    per_pod = int(offered["workers"]["mallee_worker"])
    assert config.ray.worker_resources == {"mallee_worker": 1}
    assert config.ray.gateway_resources == {"mallee_gateway": 1}
    assert float(offered["workers"]["CPU"]) >= per_pod * config.ray.worker_cpus
    limits = found["workers"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu", 0) >= per_pod * config.worker_gpus
    assert (config.worker_gpus > 0) == ("nvidia.com/gpu" in limits)
    deployments = {
        each["name"]: each for each in serve_config(made(case))["applications"][0]["deployments"]
    }
    assert found["workers"]["replicas"] * per_pod >= config.workers
    assert deployments["Gateway"]["num_replicas"] == config.gateways
    assert ("num_replicas" in deployments["Worker"]) == (config.autoscaling.max_workers is None)


@cases_with_ray
def test_the_service_is_the_one_that_kuberay_moves(case: str) -> None:
    spec = one(made(case), "RayService")["spec"]
    service = spec["serveService"]
    assert service["metadata"]["name"] == "mallee"
    assert service["spec"]["ports"] == [{"name": "serve", "port": 8000, "targetPort": 8000}]
    assert spec["excludeHeadPodFromServeSvc"]
