"""Two Ray nodes and a broker: gateways reach workers of the other node over TCP. K28, part."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, get_args

import httpx
import pytest

from mallee.protocol.events import AskSnapshot, decode_snapshot, encode_host_ask, unpack_hashes
from mallee.protocol.ids import WorkerId
from mallee.protocol.subjects import BusRole, Subjects
from mallee.runtime.addresses import free_port
from mallee.runtime.bus.broker import start_broker
from mallee.runtime.bus.nats import NatsBus
from support.mock_scene import make_folder, mock_config
from support.ray_marks import PROCESS_MARKS
from support.waiting import until

pytestmark = PROCESS_MARKS

MEMORY = {"object_store_memory": 100 << 20}
PROMPT = "a tree of many trunks"
SUFFIXES = [" and rain", " after fire", " from one root", " which re-sprouts"]


class Fleet:
    """The app on nodes that have room for one worker each; the gateway is on the head."""

    def __init__(self, cluster: Any, bus: NatsBus, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.bus = bus
        self.client = client

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.client.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def complete(self, prompt: str, **body: Any) -> dict[str, Any]:
        return await self.post(
            "/v1/completions", **{"prompt": prompt, "ignore_eos": True, "seed": 7, **body}
        )

    async def fork(self, capsule: str, **body: Any) -> dict[str, Any]:
        return await self.post(
            f"/v1/capsules/{capsule}/fork", **{"ignore_eos": True, "seed": 7, **body}
        )

    async def capsules(self) -> list[str]:
        """A capsule on every worker."""
        prompts = [f"{i} trunks, one root. " * 8 for i in range(8)]
        found = await asyncio.gather(*(self.post("/v1/capsules", prompt=each) for each in prompts))
        made = {each["worker"]: each["id"] for each in found}
        assert made.keys() == (await self.workers()).keys()
        return [made[worker] for worker in sorted(made)]

    async def lives(self) -> set[tuple[str, str]]:
        """The workers with the numbers of their lives."""
        return {(each["worker"], each["incarnation"]) for each in (await self.workers()).values()}

    async def workers(self) -> dict[str, dict[str, Any]]:
        found = (await self.client.get("/v1/router/workers")).json()["data"]
        return {each["worker"]: each for each in found}

    async def until_workers(self, claim: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(60):
            while not claim(await self.workers()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def fan_outs(self, capsules: Sequence[str], tokens: int) -> list[tuple[str, ...]]:
        """The texts of fan-outs that run at once: of prompts, and of capsules with several suffixes."""
        prompts = [f"{PROMPT} {i}" for i in range(4)]
        return await asyncio.gather(
            *(texts(self.complete(prompt, n=8, max_tokens=tokens)) for prompt in prompts),
            *(texts(self.fork(each, suffixes=SUFFIXES, max_tokens=tokens)) for each in capsules),
            *(texts(self.fork(each, n=8, max_tokens=tokens)) for each in capsules),
        )

    async def check_events(self) -> None:
        """No event was lost, and the gateway's index is what the workers hold."""
        async with asyncio.timeout(20):
            while not await self._is_converged():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        metrics = (await self.client.get("/metrics")).text
        assert set(re.findall(r"^mallee_event_gaps_total\S* (\S+)", metrics, re.M)) == {"0.0"}

    async def _is_converged(self) -> bool:
        for worker, view in (await self.workers()).items():
            subject = Subjects.of("test").host(f"m{worker.removeprefix('w')}")
            asked = encode_host_ask(AskSnapshot(WorkerId(worker)))
            snapshot = decode_snapshot(await self.bus.request(subject, asked, 5.0))
            num_blocks = len(unpack_hashes(snapshot.hashes))
            held = (True, str(snapshot.incarnation), num_blocks)
            if (view["is_whole"], view["incarnation"], view["indexed_blocks"]) != held:
                return False
            if not num_blocks:
                return False
        return True


async def texts(answer: Coroutine[Any, Any, dict[str, Any]]) -> tuple[str, ...]:
    return tuple(choice["text"] for choice in (await answer)["choices"])


def alive_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two nodes, a worker on each."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_MODE", "disabled")
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster
        from ray.serve.exceptions import RayServeException

        from mallee.actors.app import app

        broker = await start_broker(free_port(), fleet="test")
        bus = NatsBus(broker.access("gateway"), fleet="test", name="test")
        folder = tmp_path_factory.mktemp("credentials")
        for role in get_args(BusRole):
            (folder / role).write_text(broker.passwords.login(role))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 3, "include_dashboard": False, **MEMORY},
        )
        port = free_port()
        config = mock_config(
            make_folder(tmp_path_factory.mktemp("model")),
            workers=2,
            ray__worker_cpus=2.0,
            mock__engines_per_worker=1,
            mock__speedup=1.0,
            nats_url=broker.url,
            nats_credentials=str(folder / "gateway"),
            nats_worker_credentials=str(folder / "worker"),
            lease_period_s=0.5,
            drain_s=1.0,
        )
        try:
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.add_node(num_cpus=2, **MEMORY)
            with pytest.raises(RayServeException, match="2 nodes, and without nats_url"):
                app(config.model_copy(update={"nats_url": None}))
            await bus.connect()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                made = Fleet(cluster, bus, client)
                # All nodes are on this machine: the proxies of the others would share the port.
                serve.start(
                    proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port}
                )
                await asyncio.to_thread(serve.run, app(config), name="mallee", route_prefix="/")
                await made.until_workers(lambda workers: workers.keys() == {"w0", "w1"})
                yield made
            serve.delete("mallee")
        finally:
            ray.shutdown()
            cluster.shutdown()
            await bus.close()
            await broker.stop()


async def test_fan_outs_run_on_both_nodes_and_no_event_is_lost(fleet: Fleet) -> None:
    """K28, part, X29, part: prompts with n=8 and forks with several suffixes; the index is what is held."""
    capsules = await fleet.capsules()
    first = await fleet.fan_outs(capsules, 60)
    assert {len(each) for each in first} == {4, 8}
    for _ in range(4):
        assert await fleet.fan_outs(capsules, 60) == first
    prompts = [f"{i} {PROMPT * 9}" for i in range(40)]  # more than fits
    answers = await asyncio.gather(*(fleet.complete(each, n=8, max_tokens=4) for each in prompts))
    seen = {choice["mallee"]["worker"] for answer in answers for choice in answer["choices"]}
    await fleet.check_events()
    assert seen == {"w0", "w1"}


async def test_a_node_is_drained_under_fan_outs(fleet: Fleet) -> None:
    """K28, part: by `ray drain-node`: Ray starts its worker on another node, and no request is lost."""
    capsules = await fleet.capsules()
    undisturbed = await fleet.fan_outs(capsules, 200)
    (old,) = fleet.cluster.worker_nodes
    fleet.cluster.add_node(num_cpus=2, **MEMORY)
    lives = await fleet.lives()
    is_over, num_rounds = False, 0

    async def ask() -> None:
        nonlocal num_rounds
        while not is_over:
            assert await fleet.fan_outs(capsules, 200) == undisturbed
            num_rounds += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(2):
            clients.create_task(ask())
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", fleet.cluster.address, "--node-id", old.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        draining = await asyncio.create_subprocess_exec(*command)
        assert await draining.wait() == 0
        async with asyncio.timeout(60):
            while old.node_id in alive_nodes():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        seen = num_rounds
        await until(lambda: num_rounds > seen + 2, 30)
        is_over = True
    now = await fleet.lives()
    assert (len(now), len(now & lives)) == (2, 1)
    await fleet.check_events()
    fleet.cluster.remove_node(old, allow_graceful=False)  # what is left of it


async def test_a_node_dies_under_fan_outs(fleet: Fleet) -> None:
    """X4, part: what ran on it goes on, token for token."""
    capsules = await fleet.capsules()
    undisturbed = await fleet.fan_outs(capsules, 200)
    (node,) = fleet.cluster.worker_nodes
    running = asyncio.ensure_future(fleet.fan_outs(capsules, 200))
    await fleet.until_workers(lambda found: all(each["rows"] > 8 for each in found.values()))
    await asyncio.sleep(0.3)  # some way into them
    assert not running.done()
    await asyncio.to_thread(fleet.cluster.remove_node, node, allow_graceful=False)
    assert await running == undisturbed
    assert len(await fleet.workers()) == 1
    assert await fleet.fan_outs(capsules, 200) == undisturbed
    await fleet.check_events()
