"""The chart's Serve config, deployed by `serve deploy` on a head with the pods' environment and resources.

Paths and addresses alone are those of this machine: all pods are one node here.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mallee.runtime.addresses import free_port
from support.chart import CHART, MINIMAL, Object, containers, groups, merged, objects, one
from support.chart_nats import Servers, running
from support.folders import short_folder
from support.mock_scene import make_folder
from support.waiting import wait_until

pytestmark = [
    *(pytest.mark.process, pytest.mark.ray, pytest.mark.nats, pytest.mark.slow),
    pytest.mark.timeout(600),
]

TIMEOUT_S = 240.0
VALUES: Mapping[str, Any] = merged(
    MINIMAL,
    {
        "workers": {"cpus": 0.1},
        "haproxy": {"enabled": False},
        "settings": {"engine": {"kind": "mock"}, "mock": {"speedup": 0}, "drain_s": 1},
    },
)


class Node:
    """A head of Ray that stands for all pods of a release."""

    def __init__(self, found: list[Object], servers: Servers, folder: Path, model: Path) -> None:
        self._folder = folder
        self._client = httpx.Client(
            verify=False
        )  # one for all questions: a new one takes long to make
        names = ("gcs", "dashboard", "agent", "http", "metrics")
        self.ports = {name: free_port() for name in names}
        self.key = self._secret(found, "mallee-operator", "key")
        for file, name, key in (
            ("nats/gateways", "mallee-nats", "gateways"),
            ("nats/workers", "mallee-nats", "workers"),
            ("link/secret", "mallee-link", "secret"),
        ):
            path = folder / "etc" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._secret(found, name, key))
        self._local = {
            "/etc/mallee/": f"{folder}/etc/",
            "/models/model": str(model),
            "nats://mallee-nats.llm.svc:4222": f"nats://127.0.0.1:{servers.clients[0]}",
            "0.0.0.0": "127.0.0.1",
            "port: 8000": f"port: {self.ports['http']}",
            "metrics_port: 9400": f"metrics_port: {self.ports['metrics']}",
        }
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **self._of_pods(found),
            "HOME": str(folder),
            "RAY_AUTH_TOKEN": self._secret(
                found, "mallee-ray-token", "auth_token"
            ),  # as KubeRay does
            "RAY_ADDRESS": f"127.0.0.1:{self.ports['gcs']}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.ports['dashboard']}",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback alone
            # Of Ray's own processes, which start slowly where the machine is busy.
            "RAY_agent_register_timeout_ms": "120000",
            "RAY_raylet_start_wait_time_s": "120",
        }
        self._head = self._start(found)

    @staticmethod
    def _secret(found: list[Object], name: str, key: str) -> str:
        return base64.b64decode(one(found, "Secret", name)["data"][key]).decode()

    def _of_pods(self, found: list[Object]) -> dict[str, str]:
        """The variables of gateways and workers."""
        made = {}
        for component, container in containers(found):
            if component in ("gateway", "worker") and container["name"].startswith("ray-"):
                for each in container["env"]:
                    source = each.get("valueFrom", {}).get("secretKeyRef")
                    made[each["name"]] = (
                        each["value"]
                        if source is None
                        else self._secret(found, source["name"], source["key"])
                    )
        return made

    def _start(self, found: list[Object]) -> "subprocess.Popen[bytes]":
        resources: dict[str, float] = {}
        for group in groups(found).values():
            for name, amount in group["resources"].items():
                if name != "CPU":
                    resources[name] = float(amount) * group["replicas"] + 1  # and one pod's more
        options = {
            "node-ip-address": "127.0.0.1",
            "port": self.ports["gcs"],
            "dashboard-port": self.ports["dashboard"],
            "dashboard-agent-listen-port": self.ports["agent"],
            "ray-client-server-port": free_port(),
            "temp-dir": self._folder / "r",
            "num-cpus": 4,
            "resources": json.dumps(resources),
            "object-store-memory": 100 << 20,
        }
        with (self._folder / "head.txt").open("w") as out:
            return subprocess.Popen(
                [_program("ray"), "start", "--head", "--block"]
                + [f"--{name}={value}" for name, value in options.items()],
                env=self._environment,
                stdout=out,
                stderr=out,
            )

    def run(self, *command: str) -> str:
        """The output of a command with the pods' environment. Fails if it does."""
        done = subprocess.run(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def deploy(self, found: list[Object]) -> None:
        config = one(found, "RayService")["spec"]["serveConfigV2"]
        for theirs, ours in self._local.items():
            config = config.replace(theirs, ours)
        file = self._folder / "serve.yaml"
        file.write_text(config)
        self.run(_program("mallee"), "check", str(file))
        self.run(_program("serve"), "deploy", str(file))

    @property
    def is_up(self) -> bool:
        """Whether Ray answers the pods' probe, which has no token, and has a dashboard to deploy by."""
        with suppress(httpx.HTTPError):
            self._client.get(f"http://127.0.0.1:{self.ports['dashboard']}/api/version", timeout=5)
            probe = f"http://127.0.0.1:{self.ports['agent']}/api/healthz"
            return self._client.get(probe, timeout=5).status_code == 200
        return False

    def ask(self, path: str, *, key: str | None = None, **body: Any) -> httpx.Response | None:
        """The answer, None if there is no gateway yet."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{self.ports['http']}{path}"
        with suppress(httpx.TransportError):
            if body:
                return self._client.post(url, headers=headers, json=body, timeout=60)
            return self._client.get(url, headers=headers, timeout=10)
        return None

    @property
    def workers(self) -> int:
        answer = self.ask("/health", key=self.key)
        if answer is None or answer.status_code != 200:
            return 0
        return len(answer.json().get("workers", ()))

    @property
    def targets(self) -> set[str]:
        """Addresses of metrics that a gateway knows."""
        answer = self.ask("/v1/router/metrics-targets", key=self.key)
        assert answer is not None
        return {target for group in answer.json() for target in group["targets"]}

    def stop(self) -> None:
        self._client.close()
        self._head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._head.wait(5)
        while mine := self._processes():  # those that die may just have started others
            for process in mine:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(mine, timeout=5)
        self._head.wait()

    def _processes(self) -> list[psutil.Process]:
        """All of the head's, which have its home."""
        mine = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") == str(self._folder):
                    mine.append(process)
        return mine


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="module")
def release() -> list[Object]:
    return objects(VALUES)


@pytest.fixture(scope="module")
def node(release: list[Object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    files = tmp_path_factory.mktemp("files")
    model = make_folder(tmp_path_factory.mktemp("model"))
    with short_folder() as folder, running(release, files) as servers:
        made = Node(release, servers, Path(folder), model)
        try:
            wait_until(lambda: made.is_up, timeout_s=TIMEOUT_S)
            made.deploy(release)
            wait_until(lambda: made.workers == 2, timeout_s=TIMEOUT_S)
            yield made
        finally:
            made.stop()


def test_it_serves_who_has_the_operators_key(node: Node) -> None:
    readiness, models = node.ask("/health/ready"), node.ask("/v1/models")
    assert readiness is not None
    assert models is not None
    assert (readiness.status_code, models.status_code) == (200, 401)
    body = {"model": MINIMAL["model"], "prompt": "a tree", "max_tokens": 4}
    answer = node.ask("/v1/completions", key=node.key, **body)
    assert answer is not None
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_prometheus_finds_all_processes_and_scrapes_them_with_the_key(node: Node) -> None:
    wait_until(lambda: len(node.targets) == 4, timeout_s=30)  # two gateways, two workers
    bearer = {"Authorization": f"Bearer {node.key}"}
    for target in node.targets:
        assert httpx.get(f"http://{target}/metrics").status_code == 401
        assert "mallee_" in httpx.get(f"http://{target}/metrics", headers=bearer).text


def test_another_number_of_workers_is_an_update_of_this_cluster(
    node: Node, release: list[Object]
) -> None:
    more = objects(VALUES, {"workers": {"replicas": 3}})
    for each in more:  # as `helm upgrade` does
        if each["kind"] == "Secret":
            each["data"] = one(release, "Secret", each["metadata"]["name"])["data"]
    node.deploy(more)
    wait_until(lambda: node.workers == 3, timeout_s=TIMEOUT_S)


def test_a_pod_that_ends_has_its_node_drained_first(node: Node) -> None:
    """By its preStop hook, which ends in time though here is no other node."""
    begin = time.monotonic()
    node.run(sys.executable, str(CHART / "files" / "leave.py"), "20")
    assert time.monotonic() - begin < 60
    said = node.run(
        sys.executable,
        "-c",
        "from ray._raylet import GcsClient; import os;"
        " print(len(GcsClient(address=os.environ['RAY_ADDRESS']).get_draining_nodes()))",
    )
    assert said.splitlines()[-1] == "1"
