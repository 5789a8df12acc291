"""A smoke over processes: one `mallee serve`, as a user starts it, for all of these tests.

They come in an order: the open service, one whose worker was killed, one that was deployed anew with keys,
and its end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import psutil
import pytest
import yaml

from mallee.client import AsyncMallee, Mallee
from mallee.client.errors import MalleeError
from mallee.gateway.access.keys import NewKey, new_key
from mallee.protocol.errors import ModelError
from mallee.runtime.addresses import free_port
from mallee.runtime.proxy.choice import haproxy_binary
from mallee.worker.model.loading.source import resolve_model
from support.browser import MISSING, WAIT_MS, browser_page
from support.chart import MINIMAL, objects, one, pods, settings
from support.mock_scene import make_folder
from support.serve_command import ServeCommand, serving
from support.waiting import wait_until

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.model,
    pytest.mark.slow,
]

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"  # of the examples
DOCUMENT = "A mallee is a tree of many trunks, which grow from one root under the ground. " * 4
SUFFIXES = ("After a fire", " Its root", " The old people")
# In float32 tokens don't depend on what is computed beside them.
SETTINGS: dict[str, Any] = {
    "model": "smollm2",
    "workers": 2,
    "engine": {"dtype": "float32", "kv_tokens": 8192, "threads": 1},
    "drain_s": 120,
    "telemetry": {"metrics_port": free_port()},
}

WAIT_S = 120.0  # a guard
until = partial(wait_until, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def service() -> Iterator[ServeCommand]:
    """Two workers of the demo's model, without keys."""
    try:
        resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    with serving(SETTINGS) as made:
        yield made


def test_haproxy_answers_and_the_service_is_well(service: ServeCommand) -> None:
    for path, status in (("health", "ok"), ("health/live", "live"), ("health/ready", "ready")):
        answer = httpx.get(f"{service.url}/{path}")
        assert (answer.status_code, answer.json()["status"]) == (200, status)
    if haproxy_binary() is None:
        pytest.skip("HAProxy does not run here")
    assert f"at {service.url}/v1 behind HAProxy" in service.said[-1]
    listening = [
        process.name()
        for process in service.family("haproxy")
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == service.port
    ]
    assert listening == ["haproxy"]


def test_no_process_of_rays_runs_that_only_waits(service: ServeCommand) -> None:
    """They took 180 MB: what scales clusters, sends logs to a driver, or shows a dashboard."""
    assert service.family("raylet")
    for part in ("autoscaler/_private/monitor.py", "log_monitor.py", "dashboard/dashboard.py"):
        assert not service.family(part)


def test_processes_are_scraped_where_the_api_says(service: ServeCommand) -> None:
    def told() -> dict[str, list[str]]:
        found = httpx.get(f"{service.url}/v1/router/metrics-targets").json()
        return {each["labels"]["process"]: each["targets"] for each in found}

    until(
        lambda: {name: len(found) for name, found in told().items()} == {"gateway": 1, "worker": 2}
    )
    for kind, family in (
        ("gateway", "mallee_branches_in_flight"),
        ("worker", "mallee_worker_live_blocks"),
    ):
        for address in told()[kind]:
            assert family in httpx.get(f"http://{address}/metrics").text


def run_first_example(page: str, service: ServeCommand) -> list[str]:
    """The lines that the first program of a page prints; only the port is another."""
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 12
    assert code.count(URL) == 1
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.replace(URL, service.url)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_readmes_example_runs_verbatim(service: ServeCommand) -> None:
    """D40, part: it prints a line an answer, and what follows."""
    lines = run_first_example("README.md", service)
    ends = [line.split() for line in lines if re.match(r"w[01] \d+ \d+ [\d.]+$", line)]
    assert len(ends) == 2
    assert len({worker for worker, *_ in ends}) == 1
    for _, cached, computed, ttft_ms in ends:
        assert int(cached) > 2000
        assert int(computed) < 30
        assert float(ttft_ms) > 0


def test_the_quickstart_ends_with_a_tree(service: ServeCommand) -> None:
    """D40, part: of the document, its three answers, and what follows each."""
    lines = run_first_example("docs/quickstart.md", service)
    with Mallee(service.url) as client:
        client.session("first").close()
    tree = lines[lines.index("session first") + 1 :]
    marks = ["└── ", "    ├── ", "    │   ", "    ├── ", "    │   ", "    └── ", "        "]
    assert len(tree) == len(marks)
    assert all(line.startswith(f"{mark}req_") for line, mark in zip(tree, marks, strict=True))


def test_a_fork_lands_on_its_parents_worker_and_computes_its_suffix_alone(
    service: ServeCommand,
) -> None:
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        made = client.post("/v1/capsules", json={"prompt": DOCUMENT}).json()
        body = {"suffixes": [[10, 11, 12], [20, 21]], "max_tokens": 2, "ignore_eos": True}
        answer = client.post(f"/v1/capsules/{made['id']}/fork", json=body).json()
    found = [choice["mallee"] for choice in answer["choices"]]
    assert [each["worker"] for each in found] == [made["worker"]] * 2
    assert [each["cached_tokens"] for each in found] == [made["tokens"]] * 2
    assert [each["prefill_tokens"] for each in found] == [3, 2]


def test_clients_of_openai_and_anthropic_get_answers(service: ServeCommand) -> None:
    asked: Any = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name a tree."}],
        "max_tokens": 4,
    }
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as theirs:
        assert theirs.chat.completions.create(**asked).choices[0].message.content
        chunks = list(theirs.chat.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    with anthropic.Anthropic(base_url=service.url, api_key="none") as other:
        (block,) = other.messages.create(**asked).content
    assert block.type == "text"
    assert block.text


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
async def test_the_page_shows_branches_that_run(service: ServeCommand) -> None:
    from playwright.async_api import expect

    async with AsyncMallee(service.url, timeout=WAIT_S) as client:
        session = client.session("grove")
        answer = await session.complete(DOCUMENT, max_tokens=4, ignore_eos=True)
        forked = answer.fork(SUFFIXES, max_tokens=2000, ignore_eos=True)  # they end by the hang-up
        async with browser_page() as page, forked:
            await anext(forked.events())
            await page.goto(f"{service.url}/ui")
            await page.locator(".row.session", has_text="grove").wait_for()
            live = page.locator(".node.live")
            await expect(live).to_have_count(len(SUFFIXES), timeout=WAIT_MS)
            await page.locator(f'.node[data-name="{answer.capsule}"]').click()
            await page.locator("#details pre.text", has_text="many trunks").wait_for()
            await forked.close()
            await expect(live).to_have_count(0, timeout=WAIT_MS)


def test_streams_go_on_with_the_same_tokens_when_their_worker_is_killed(
    service: ServeCommand,
) -> None:
    options: Any = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with Mallee(service.url, timeout=WAIT_S) as client, client.prefill(DOCUMENT) as capsule:
        undisturbed = [each.text for each in capsule.fork(SUFFIXES, **options).wait()]
        replica = worker_process(service, capsule.worker)
        branches = capsule.fork(SUFFIXES, **options)
        next(branches.events())
        replica.kill()
        ends = branches.wait()
        assert [each.text for each in ends] == undisturbed
        assert capsule.worker not in {each.worker for each in ends}, "they had ended before"
        until(lambda: {each["worker"] for each in client.health()["workers"]} == {"w0", "w1"})


def worker_process(service: ServeCommand, name: str) -> psutil.Process:
    """The process of that worker: it listens on the socket of the worker's address."""
    workers = httpx.get(f"{service.url}/v1/router/workers").json()["data"]
    (address,) = (each["address"] for each in workers if each["worker"] == name)
    path = address.partition("unix:")[2]
    (found,) = (
        process
        for process in service.family("ServeReplica:mallee:Worker")
        if any(each.laddr == path for each in process.net_connections("unix"))
    )
    return found


class Keyed(NamedTuple):
    """The service, deployed anew with keys, and the stream that ran meanwhile."""

    acme: NewKey
    evil: NewKey
    root: NewKey
    stream: "Stream"
    stored: str  # a response of before the update


class Stream:
    """A stream that is read until it has gone on for long enough."""

    def __init__(self, url: str) -> None:
        self.num_events = 0
        self.end: str | None = None  # why it ended before
        self._url = url
        self._is_enough = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        options: Any = {"max_tokens": 7000, "ignore_eos": True}
        with (
            Mallee(self._url, max_retries=0, timeout=WAIT_S) as client,
            client.stream(DOCUMENT, **options) as branches,
        ):
            try:
                for event in branches.events():
                    self.num_events += 1
                    self.end = event.finish_reason
                    if self._is_enough.is_set():
                        return
            except MalleeError as error:
                self.end = repr(error)

    def __enter__(self) -> "Stream":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_enough.set()
        self._thread.join()

    def go_on(self) -> None:
        """Wait for two more events, or the end."""
        seen = self.num_events
        until(lambda: self.num_events >= seen + 2 or self.end is not None)


# `serve deploy` sends the same to the dashboard, which `mallee serve` has not.
_DEPLOY = """
import json, sys, ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

ray.init(address=sys.argv[1])
app = {"name": "mallee", "route_prefix": "/", "import_path": "mallee.actors.app:app"}
config = {"applications": [{**app, "args": json.loads(sys.argv[2])}]}
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
"""


@pytest.fixture(scope="module")
def keyed(service: ServeCommand, tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    """Two tenants and an operator, who have keys by an update under a stream."""
    keys = (
        new_key("acme", "client", None),
        new_key("evil", "client", None),
        new_key("root", "operator", None),
    )
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": [key.entry for key in keys]}))
    (raylet,) = (each for each in service.family() if each.name() == "raylet")
    (ray_address,) = set(re.findall(r"--gcs-address=(\S+)", " ".join(raylet.cmdline())))
    before = service.family("ServeReplica:mallee:")
    body = {"input": "Hello", "max_output_tokens": 2}
    asked = {"json": body, "headers": {"x-tenant-id": "root"}, "timeout": WAIT_S}
    stored = httpx.post(f"{service.url}/v1/responses", **asked).json()["id"]
    with Stream(service.url) as stream:
        stream.go_on()
        args = {**SETTINGS, "workers": 1, "http": {"keys_file": str(file)}}
        command = [sys.executable, "-c", _DEPLOY, ray_address, json.dumps(args)]
        subprocess.run(command, env=raylet.environ(), check=True, capture_output=True)
        until(lambda: httpx.get(f"{service.url}/v1/models").status_code == 401)
        stream.go_on()
    _, left = psutil.wait_procs(before, timeout=WAIT_S)
    assert left == []
    return Keyed(*keys, stream, stored)


def test_an_update_replaces_every_process_and_cuts_no_stream(
    service: ServeCommand, keyed: Keyed
) -> None:
    assert keyed.stream.end is None
    with Mallee(service.url, api_key=keyed.root.token) as client:
        until(lambda: client.health()["status"] == "ok")
        assert len(client.health()["workers"]) == 1
    told = httpx.get(
        f"{service.url}/v1/responses/{keyed.stored}",
        headers={"authorization": f"Bearer {keyed.root.token}"},
        timeout=WAIT_S,
    )
    assert told.status_code == 200, (
        "it was stored at a gateway that is gone, by a broker that is gone"
    )
    assert len(service.family("ServeReplica:mallee:")) == 3  # broker, worker, gateway


def test_a_tenants_capsule_is_not_there_for_another(service: ServeCommand, keyed: Keyed) -> None:
    def asking(key: NewKey) -> httpx.Client:
        headers = {"authorization": f"Bearer {key.token}"}
        return httpx.Client(base_url=service.url, headers=headers, timeout=WAIT_S)

    with asking(keyed.acme) as acme, asking(keyed.evil) as evil:
        path = f"/v1/capsules/{acme.post('/v1/capsules', json={'prompt': DOCUMENT}).json()['id']}"
        fork = {"n": 1, "max_tokens": 2}
        for answer in (
            evil.get(path),
            evil.get(f"{path}/text"),
            evil.post(f"{path}/fork", json=fork),
            evil.delete(path),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                404,
                "capsule_not_found",
            )
        assert evil.get("/v1/capsules").json()["data"] == []
        assert acme.post(f"{path}/fork", json=fork).status_code == 200


def test_ctrl_c_ends_the_service_and_all_its_processes(service: ServeCommand) -> None:
    family = service.family()
    assert {"raylet", "nats-server"} <= {process.name() for process in family}
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.process.wait(WAIT_S) == 0
    assert psutil.wait_procs(family, timeout=WAIT_S)[1] == []


def test_mocked_engines_join_over_nats_and_answer(tmp_path: Path) -> None:
    arguments = ("--engines", "4", "--speedup", "0")
    with ServeCommand("mock", *arguments, "--model", str(make_folder(tmp_path))) as mock:
        with httpx.Client(base_url=mock.url, timeout=WAIT_S) as client:
            assert client.get("/health/ready").status_code == 200
            assert len(client.get("/health").json()["workers"]) == 4
            body = {"prompt": "a tree", "max_tokens": 5, "ignore_eos": True}
            usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 5
        assert len(mock.family("nats-server")) == 1
        assert mock.stop() == 0


def test_the_chart_renders_what_kubernetes_and_mallee_take() -> None:
    pytest.importorskip("helm_python", reason="no wheel of helm-python-sdk for this platform")
    import jsonschema
    import kubernetes_validate

    from mallee.runtime.config import AppConfig

    found = objects(MINIMAL)
    service = one(found, "RayService")
    schema = ROOT / "tests" / "helm" / "schemas" / "rayservice.json"
    jsonschema.validate(service, json.loads(schema.read_text()))
    known = [each for each in found if each is not service]
    known += [{"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods(found).values()]
    for each in known:
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert AppConfig.model_validate(settings(found)).served_model_name == MINIMAL["model"]
