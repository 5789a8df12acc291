"""The chart's pickers: their settings, files, ports and rights, as the real `mallee picker` sees them."""

import asyncio
import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bench.doubles.vllm_pod import VllmPod
from mallee.actors.front.front import DRAIN_S
from mallee.actors.front.picker.config import PickerConfig
from mallee.actors.front.picker.picker import Picker
from mallee.actors.front.pods.kubernetes import ApiServer, PoolEndpoints, PoolSpec
from mallee.cli.main import cli
from mallee.cli.serving.fronts import FrontOptions, make_front_config
from support.chart import CHART, MINIMAL, PICKERS, Object, merged, objects, one, pods, rendered
from support.pickers import Proxy
from support.pool_api import PODS, POOLS, FakeApi, pod, pool
from support.waiting import until

pytestmark = pytest.mark.process

BESIDE: Mapping[str, Any] = merged(
    MINIMAL, {"picker": {"enabled": True, "pool": "theirs"}, "nats": {"tlsSecret": "nats-tls"}}
)
CLAIMED: Mapping[str, Any] = merged(
    PICKERS,
    {
        "picker": {"model": "/models/mine", "tls": {"secret": "own"}},
        "modelVolume": {"claim": "models"},
        "nats": {"enabled": False, "url": "tls://nats.example", "secret": "n", "caSecret": "ca"},
    },
)
PLAIN: Mapping[str, Any] = merged(
    PICKERS, {"picker": {"model": "", "tls": {"enabled": False}}, "nats": {"enabled": False}}
)
all_cases = pytest.mark.parametrize(
    "values", [PICKERS, BESIDE, CLAIMED, PLAIN], ids=["alone", "beside", "claimed", "plain"]
)


def spec_of(found: list[Object]) -> Object:
    spec: Object = pods(found)["picker"]["spec"]
    return spec


def container_of(found: list[Object]) -> Object:
    (container,) = spec_of(found)["containers"]
    assert isinstance(container, dict)
    return container


def parsed(container: Object) -> dict[str, Any]:
    """The options of its command, by the command's own parser."""
    program, name, *rest = container["command"]
    assert program == "mallee"
    group: Any = typer.main.get_command(cli)
    params: dict[str, Any] = (
        group.commands[name].make_context(name, [*rest, *container["args"]]).params
    )
    return params


def settings_of(found: list[Object], folder: Path, *assignments: str) -> PickerConfig:
    """The picker's settings as its command reads them, with the mounted file in `folder`."""
    config: Path = parsed(container_of(found))["config"]
    (volume,) = (name for name, path in mounts(found) if str(config.parent) == path)
    source = next(each for each in spec_of(found)["volumes"] if each["name"] == volume)
    data = one(found, "ConfigMap", source["configMap"]["name"])["data"]
    (folder / config.name).write_text(data[config.name])
    front = FrontOptions(config=folder / config.name, set_=list(assignments))
    return make_front_config(PickerConfig, "picker", front, {})


def mounts(found: list[Object]) -> Iterator[tuple[str, str]]:
    for each in container_of(found)["volumeMounts"]:
        yield each["name"], each["mountPath"]


@all_cases
def test_the_command_takes_what_the_chart_says(values: Mapping[str, Any], tmp_path: Path) -> None:
    found = objects(values)
    config = settings_of(found, tmp_path)
    assert config.pool == ("theirs" if values is BESIDE else "mallee")
    assert (config.tls_paths is None) == (values is PLAIN)
    assert (config.nats_url is None) == (values is PLAIN)
    container = container_of(found)
    with pytest.raises(Exception, match="No such option: --configs"):
        parsed({**container, "args": ["--configs", "x"]})


def test_the_values_of_the_documentation_make_what_it_names(tmp_path: Path) -> None:
    text = (CHART.parents[1] / "docs" / "picker.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    found = objects(yaml.safe_load(block), name="llama")
    assert settings_of(found, tmp_path).replay_port == 5558
    made = one(found, "InferencePool")
    assert f"`{made['metadata']['name']}` is the InferencePool" in text
    assert made["spec"]["selector"]["matchLabels"] == {"app": "vllm-llama"}
    (reference,) = re.findall(r"`endpointPickerRef: (\{.*?\})`", text)
    assert yaml.safe_load(reference) == made["spec"]["endpointPickerRef"]
    assert f"`{one(found, 'Deployment')['metadata']['name']}`: a Deployment" in text


def test_settings_of_the_user_reach_the_picker_and_start_its_pods_anew(tmp_path: Path) -> None:
    settings = {"events_port": 5557, "max_rows": 7, "routing": {"policy": "random"}}
    found = objects(PICKERS, {"picker": {"settings": settings}})
    config = settings_of(found, tmp_path)
    assert (config.events_port, config.max_rows, config.routing.policy) == (5557, 7, "random")

    def template(*more: Mapping[str, Any]) -> Object:
        made: Object = pods(objects(PICKERS, *more))["picker"]
        return made

    assert pods(found)["picker"] != template()
    assert template({"picker": {"replicas": 5}}) == template()


@all_cases
def test_every_file_that_settings_name_is_there(values: Mapping[str, Any], tmp_path: Path) -> None:
    found = objects(values)
    config = settings_of(found, tmp_path)
    volumes = {each["name"]: each for each in spec_of(found)["volumes"]}
    files = set()
    for name, path in mounts(found):
        volume = volumes[name]
        sources = [volume, *volume.get("projected", {}).get("sources", ())]
        items = [item for each in sources for item in each.get("secret", {}).get("items", ())]
        files |= {f"{path}/{item['path']}" for item in items}
    needed = {config.tls_cert, config.tls_key, config.nats_credentials, config.nats_ca} - {None}
    assert needed == files
    paths = {path for _, path in mounts(found)}
    assert ("/models" in paths) == (config.model is not None)
    init = {each["name"] for each in spec_of(found).get("initContainers", ())}
    assert ("download-model" in init) == (config.model == "/models/model")
    assert ("wait-for-nats" in init) == (config.nats_url is not None)


@all_cases
def test_ports_agree(values: Mapping[str, Any], tmp_path: Path) -> None:
    """Of the settings, container, probes, Service, NetworkPolicy, and the pool's reference."""
    found = objects(values, {"picker": {"service": {"port": 9100}}})
    config = settings_of(found, tmp_path)
    listening = {
        "grpc": port_of(config.listen),
        "health": port_of(config.health_listen),
        "metrics": port_of(config.metrics_listen),
    }
    container = container_of(found)
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == listening
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == listening["health"]
    service = one(found, "Service", "mallee-picker")["spec"]
    assert {each["name"]: each["port"] for each in service["ports"]} == {
        "grpc": 9100,
        "metrics": 9090,
    }
    assert [each["targetPort"] for each in service["ports"]] == ["grpc", "metrics"]
    assert service["ports"][0]["appProtocol"] == (
        "kubernetes.io/h2c" if values is PLAIN else "http2"
    )
    assert service["selector"].items() <= pods(found)["picker"]["metadata"]["labels"].items()
    policy = one(found, "NetworkPolicy", "mallee-picker")["spec"]
    open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert open_ports == {listening["grpc"], listening["metrics"]}
    if values is not BESIDE:
        made = one(found, "InferencePool")
        assert made["metadata"]["name"] == config.pool
        assert PoolSpec.of(made) == PoolSpec({"app": "vllm"}, (8000,))
        picker = made["spec"]["endpointPickerRef"]
        assert (picker["name"], picker["port"]["number"]) == ("mallee-picker", 9100)


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def test_prometheus_finds_the_pickers_by_their_service() -> None:
    found = objects(PICKERS, {"monitoring": {"enabled": True, "labels": {"release": "p"}}})
    monitor = one(found, "ServiceMonitor")
    service = one(found, "Service", "mallee-picker")
    chosen = monitor["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= service["metadata"]["labels"].items()
    others = [
        each
        for each in objects(MINIMAL, PICKERS, {"ray": {"enabled": True}})
        if each["kind"] == "Service" and each["metadata"]["name"] != "mallee-picker"
    ]
    assert others
    assert not [each for each in others if chosen.items() <= each["metadata"]["labels"].items()]
    assert monitor["spec"]["endpoints"][0]["port"] in {p["name"] for p in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "p"


async def test_the_role_allows_what_a_picker_asks_of_kubernetes_and_nothing_else() -> None:
    """Each request of a picker that follows its pool is judged by the rules, as the API server does."""
    found = objects(PICKERS, {"picker": {"pool": "llama"}})
    unused = {
        (group, kind, verb, name)
        for rule in one(found, "Role")["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [None])
    }
    rights = set(unused)
    async with FakeApi() as api:
        api.objects[POOLS]["pool"] = pool(8000)
        api.objects[PODS]["a"] = pod("a", "10.0.0.1")
        source = PoolEndpoints(ApiServer(api.url, None, None), namespace="models", pool="llama")
        task = asyncio.create_task(source.follow(lambda endpoints: None))
        await until(lambda: api.num_watchers(POOLS) == api.num_watchers(PODS) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for path, query in api.requests:
            head, _, kind = path.rpartition("/")
            group = "" if head.startswith("/api/v1/") else head.split("/")[2]
            verb = "watch" if query.get("watch") else "list"
            field = query.get("fieldSelector", "")
            name = field.removeprefix("metadata.name%3D") if field else None
            assert (group, kind, verb, name) in rights
            unused.discard((group, kind, verb, name))
    assert unused == set()
    binding = one(found, "RoleBinding")
    account = one(found, "ServiceAccount")["metadata"]["name"]
    assert binding["roleRef"]["name"] == one(found, "Role")["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == [account]
    assert spec_of(found)["serviceAccountName"] == account


async def test_a_picker_serves_by_the_charts_settings_and_certificate(tmp_path: Path) -> None:
    """X21, part: its pool from Kubernetes, requests by TLS, probes without."""
    found = objects(PICKERS, {"picker": {"model": "", "pool": "llama"}, "nats": {"enabled": False}})
    secret = one(found, "Secret", "mallee-picker-tls")["data"]
    for name, value in secret.items():
        (tmp_path / name).write_bytes(base64.b64decode(value))
    async with FakeApi() as api, VllmPod() as server:
        address, port = server.address.split(":")
        api.objects[POOLS]["pool"] = pool(int(port))
        api.objects[PODS]["a"] = pod("a", address)
        here = [f"{key}=127.0.0.1:0" for key in ("listen", "health_listen", "metrics_listen")]
        here += [f"tls_cert={tmp_path}/tls.crt", f"tls_key={tmp_path}/tls.key"]
        config = settings_of(
            found, tmp_path, *here, "namespace=models", f"kubernetes_url={api.url}", "scrape_s=0.1"
        )
        assert config.pool == "llama"
        async with Picker(config) as picker:
            async with Proxy(picker.server.health_port) as kubelet:
                probe = container_of(found)["readinessProbe"]["grpc"]["service"]
                await until(lambda: picker.is_ready)
                assert await kubelet.health(probe) == 1
            await until(lambda: len(picker.router.workers()) == 1)
            host = f"mallee-picker.{one(found, 'RoleBinding')['subjects'][0]['namespace']}.svc"
            async with Proxy(picker.server.port, tmp_path / "tls.crt", host) as proxy:
                answer = await proxy.ask({"model": "m", "prompt": [1, 2, 3], "max_tokens": 4})
                assert answer.endpoints == (server.address,)


def test_pods_end_after_the_requests_under_way() -> None:
    """And after proxies have heard that they are going."""
    spec = spec_of(objects(PICKERS))
    wait_s = float(container_of(objects(PICKERS))["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert wait_s + DRAIN_S < spec["terminationGracePeriodSeconds"]


def test_pickers_alone_bring_nothing_of_ray() -> None:
    found = objects(PICKERS, {"monitoring": {"enabled": True}})
    kinds = {each["kind"] for each in found}
    assert not kinds & {"RayService", "ScrapeConfig", "PodMonitor", "PrometheusRule", "Pod"}
    names = {each["metadata"]["name"].removeprefix("mallee-") for each in found}
    assert names == {"mallee", "nats", "nats-servers", "picker", "picker-tls", "check"}
    assert "picker" not in pods(objects(MINIMAL))


def test_images_of_pickers_need_no_cuda() -> None:
    found = objects(BESIDE, {"workers": {"gpus": 1}})
    images = {name: pod["spec"]["containers"][0]["image"] for name, pod in pods(found).items()}
    assert images["worker"].endswith("-cuda")
    assert images["gateway"] == images["worker"]
    assert f"{images['picker']}-cuda" == images["worker"]


def test_egress_is_to_the_pools_pods() -> None:
    """Those of a pool that the chart makes; of another one the pods are not known."""

    def first(values: Mapping[str, Any]) -> Object:
        found = objects(values, {"networkPolicy": {"egress": True}})
        rule: Object = one(found, "NetworkPolicy", "mallee-picker")["spec"]["egress"][0]
        return rule

    assert first(PICKERS) == {"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}
    assert first(BESIDE) == {"to": [{"podSelector": {}}]}


def test_notes_tell_of_a_pool_that_has_to_name_the_pickers() -> None:
    def notes(values: Mapping[str, Any]) -> str:
        return next(text for path, text in rendered(values).items() if "NOTES" in path)

    said = notes(BESIDE)
    reference = said.partition("endpointPickerRef ")[2].partition("}}")[0] + "}}"
    assert yaml.safe_load(reference) == {"name": "mallee-picker", "port": {"number": 9002}}
    assert "endpointPickerRef" not in notes(PICKERS)
    assert "get rayservice" not in notes(PICKERS)
