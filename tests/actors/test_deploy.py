"""`serve deploy` on a running cluster: scaling, rolling updates and settings that don't serve. K28, part."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from mallee.cli.main import cli
from mallee.client import Mallee
from support.mock_scene import make_folder
from support.ray_marks import PROCESS_MARKS, deploy, local_serve
from support.waiting import wait_until

pytestmark = PROCESS_MARKS


class Cluster:
    """A Ray with Serve, and what `serve deploy` does to it."""

    def __init__(self, model: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._args = {
            "model": str(model),
            "served_model_name": "m",
            "engine": {"kind": "mock"},
            "drain_s": 20,
        }

    def deploy(self, *, workers: int, **args: Any) -> None:
        deployments = [{"name": "Worker", "num_replicas": workers}]
        deploy({**self._args, **args}, deployments=deployments)

    @property
    def status(self) -> tuple[str, str]:
        """The application's status and message."""
        from ray import serve

        app = serve.status().applications["mallee"]
        return str(app.status.value), app.message

    @property
    def workers(self) -> set[str]:
        return set(self.lives)

    @property
    def lives(self) -> dict[str, str]:
        """The number of each worker's life."""
        return {each["worker"]: each["incarnation"] for each in self.health.get("workers", ())}

    @property
    def health(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return found

    def replicas(self, deployment: str) -> set[int]:
        """The processes of a deployment."""
        return {p.pid for p in processes(f"ServeReplica:mallee:{deployment}")}

    def complete(self, max_tokens: int) -> str:
        """The text of a streamed answer. Fails if it does not end as it should."""
        body = {"model": "m", "prompt": "a tree", "stream": True, "seed": 7}
        parts, is_done = [], False
        with httpx.stream(
            "POST",
            f"{self.url}/v1/completions",
            json={**body, "ignore_eos": True, "max_tokens": max_tokens},
            timeout=60,
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    parts += [choice["text"] for choice in event["choices"]]
        assert is_done, "the stream was cut"
        return "".join(parts)


def processes(part: str) -> list[psutil.Process]:
    """Running descendants of this process with `part` in their command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if part in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


until = partial(wait_until, timeout_s=90.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with local_serve() as port:
        made = Cluster(make_folder(tmp_path_factory.mktemp("model")), port)
        made.deploy(workers=2)
        until(lambda: made.status[0] == "RUNNING" and len(made.workers) == 2)
        yield made


class Clients:
    """Clients that send one stream after the other, until the block ends."""

    def __init__(self, cluster: Cluster, n: int, max_tokens: int = 150) -> None:
        self.failures: list[str] = []
        self.texts: set[str] = set()
        self.num_answers = 0
        self._cluster = cluster
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(n)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.texts.add(self._cluster.complete(self._max_tokens))
                self.num_answers += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_change_of_the_workers_number_touches_workers_only(cluster: Cluster) -> None:
    """And `/health` expects as many as there should be now."""
    before = {name: cluster.replicas(name) for name in ("Broker", "Worker", "Gateway")}
    cluster.deploy(workers=3)
    until(lambda: cluster.workers == {"w0", "w1", "w2"} and cluster.status[0] == "RUNNING")
    assert before["Worker"] < cluster.replicas("Worker")
    assert {n: cluster.replicas(n) for n in ("Broker", "Gateway")} == {
        n: before[n] for n in ("Broker", "Gateway")
    }
    with Clients(cluster, 4) as clients:
        cluster.deploy(workers=2)
        until(lambda: len(cluster.workers) == 2 and len(cluster.replicas("Worker")) == 2)
        until(lambda: cluster.health["status"] == "ok", timeout_s=20)
    assert not clients.failures
    assert cluster.replicas("Gateway") == before["Gateway"]


def test_no_stream_fails_in_a_rolling_update(cluster: Cluster) -> None:
    """Of workers, gateways and broker; names stay small and are nobody else's."""
    until(lambda: cluster.status[0] == "RUNNING")
    names = ("Broker", "Worker", "Gateway")
    before = {name: cluster.replicas(name) for name in names}
    with Clients(cluster, 16) as clients:
        until(lambda: clients.num_answers > 16)
        cluster.deploy(workers=2, drain_s=1)
        until(
            lambda: not any(before[name] & cluster.replicas(name) for name in names), timeout_s=150
        )
        until(lambda: cluster.status[0] == "RUNNING")
        seen = clients.num_answers
        until(lambda: clients.num_answers > seen + 16)
    assert clients.failures == []
    assert len(clients.texts) == 1
    assert len(cluster.workers) == 2
    assert cluster.workers < {"w0", "w1", "w2", "w3"}


def test_a_worker_drained_by_command_leaves_and_no_stream_fails(cluster: Cluster) -> None:
    """X4, part: what outlasts `drain_s` goes on elsewhere, its kept capsules are forked there, and
    Ray starts another worker."""
    until(lambda: cluster.status[0] == "RUNNING" and len(cluster.workers) == 2)
    undisturbed = {n: cluster.complete(n) for n in (150, 500)}
    with Mallee(cluster.url) as client:
        capsules = [client.prefill(f"{n} trunks of a tree from one root" * 4) for n in range(6)]

        def forks() -> list[list[str]]:
            return [
                [branch.text for branch in each.fork([" a", " b"], max_tokens=20, seed=3).wait()]
                for each in capsules
            ]

        texts, lives = forks(), cluster.lives
        assert {each.worker for each in capsules} == lives.keys()
        name = capsules[0].worker
        with Clients(cluster, 12) as short, Clients(cluster, 4, 500) as long:
            until(lambda: short.num_answers > 4)
            done = CliRunner().invoke(cli, ["workers", "drain", name, "--url", cluster.url])
            assert done.stdout == f"{name} drains\n", done.exception
            until(lambda: cluster.lives.get(name) != lives[name])
            assert forks() == texts
            until(lambda: len(cluster.workers) == 2)
            seen = short.num_answers
            until(lambda: short.num_answers > seen + 4)
        assert short.failures + long.failures == []
        assert (short.texts, long.texts) == ({undisturbed[150]}, {undisturbed[500]})
        assert len(cluster.lives.items() & lives.items()) == 1
        assert forks() == texts
    until(lambda: cluster.status[0] == "RUNNING" and cluster.health["status"] == "ok", timeout_s=20)


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ({"nats_url": "nats://127.0.0.1:1"}, "no broker at 127.0.0.1:1"),
        ({"nats_url": "nats://u:hush@127.0.0.1:1"}, "nats_url holds credentials"),
        ({"model": "/nowhere/model"}, "'/nowhere/model' is neither a directory"),
        ({"engine": {"kind": "mock", "kv_tokns": 1}}, "`engine.kv_tokns` is no setting"),
    ],
)
def test_settings_that_dont_serve_are_refused_and_the_old_ones_go_on(
    cluster: Cluster, args: dict[str, Any], cause: str
) -> None:
    before = cluster.replicas("")
    cluster.deploy(workers=2, **args)
    until(lambda: cluster.status[0] == "DEPLOY_FAILED")
    assert cause in cluster.status[1].splitlines()[-1]
    assert "hush" not in cluster.status[1]
    assert cluster.complete(4)
    assert before <= cluster.replicas("")


def test_a_broker_that_moved_is_found_again(cluster: Cluster) -> None:
    cluster.deploy(workers=2, drain_s=1)
    until(
        lambda: cluster.status[0] == "RUNNING" and cluster.health.get("status") == "ok",
        timeout_s=150,
    )
    (broker,) = processes("nats-server")
    replica = broker.parent()
    assert replica is not None
    port = listening(broker)
    replica.kill()
    with held(port):
        until(lambda: cluster.health.get("broker") == "down")
        assert cluster.complete(4)
        until(lambda: cluster.health.get("status") == "ok", timeout_s=60)
        (moved,) = processes("nats-server")
        assert listening(moved) != port


def listening(process: psutil.Process) -> int:
    (port,) = {c.laddr.port for c in process.net_connections() if c.status == "LISTEN"}
    return int(port)


@contextmanager
def held(port: int) -> Iterator[None]:
    """The port is taken until the block ends."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def is_taken() -> bool:
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                return False
            holder.listen()
            return True

        until(is_taken, timeout_s=10)
        yield
