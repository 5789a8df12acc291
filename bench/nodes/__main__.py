"""Faults of nodes and networks under clients that stream: `mallee up` with three nodes, mocked engines.

    python -m bench.nodes [--quick] [--faults "cut,node killed"]

16 clients stream all the time; every text must be that of an undisturbed answer. A fault hits a node
that has a worker and no gateway, and ends; then the service must be whole again, and forks of kept
capsules must have the texts that they had first. One hits while 128 clients come at once. Then the
deployment rolls to two gateways under the same clients, and the node of a gateway dies: its streams are cut
without an end mark and sent again. At last the workers follow a burst from one to four and back. The last
line of stdout is one JSON object.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import httpx

from bench import measure
from bench.failover.streams import client_of
from bench.nodes import faults
from bench.nodes.clients import MODEL, Load, Pinned, asks, some_more, streaming, undisturbed
from bench.nodes.cluster import Cluster, health, running, until, until_well
from mallee.testing.nodes import network

NODES = 3
WORKERS = 3
CLIENTS = 16
CROWD = 128  # with a burst
SKEW_S = 600.0
CAPSULES = 6
BACK_S = 180.0
ROLL_S = 400.0
MAX_WORKERS = 4
HOLD_S = 8.0


class Scene(NamedTuple):
    cluster: Cluster
    client: httpx.AsyncClient
    load: Load
    pinned: Pinned
    hold_s: float  # of a fault that ends


Play = Callable[[Scene], Awaitable[dict[str, Any]]]


def held(fault: Callable[[Cluster, int], AbstractContextManager[None]]) -> Play:
    """A fault of a worker's node that lasts for a while."""

    async def play(scene: Scene) -> dict[str, Any]:
        number = scene.cluster.victim()
        with fault(scene.cluster, number):
            await asyncio.sleep(scene.hold_s)
        return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}

    return play


async def nothing(scene: Scene) -> dict[str, Any]:
    await some_more(scene.load, 2)
    return {}


async def broker_killed(scene: Scene) -> dict[str, Any]:
    """Of a worker's node; the gateway may be its client too."""
    faults.kill_broker(scene.cluster, scene.cluster.victim())
    return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}


async def brokers_killed(scene: Scene) -> dict[str, Any]:
    """All but one at once."""
    for number in (2, 3):
        faults.kill_broker(scene.cluster, number)
    return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}


async def muted(scene: Scene) -> dict[str, Any]:
    """With the NATS server that all are connected to."""
    number = scene.cluster.victim()
    for node in scene.cluster.nodes:
        if node.number != number:
            faults.kill_broker(scene.cluster, node.number)
    await until_well(scene.client, WORKERS, BACK_S)
    with faults.mute(scene.cluster, number):
        await asyncio.sleep(scene.hold_s)
    return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}


async def clocks_skewed(scene: Scene) -> dict[str, Any]:
    """A worker's clock is ahead, and then a gateway's behind: each jumps, and jumps back."""
    (gateway, *_) = scene.cluster.replicas("Gateway")
    for number, seconds in ((scene.cluster.victim(), SKEW_S), (gateway, -SKEW_S)):
        with faults.skewed(scene.cluster, number, seconds):
            await asyncio.sleep(scene.hold_s)
    return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}


async def killed_under_burst(scene: Scene) -> dict[str, Any]:
    """128 clients come, and then a worker's node dies."""
    times = CROWD // CLIENTS - 1
    expected = [*scene.load.undisturbed] * times
    async with streaming(scene.client, asks(CLIENTS) * times, expected) as crowd:
        await asyncio.sleep(1.0)
        figures = await node_killed(scene)
        await some_more(crowd, 1)
    return figures | {"crowd": crowd.figures(0)}


async def node_killed(scene: Scene) -> dict[str, Any]:
    faults.kill_node(scene.cluster, scene.cluster.victim())
    await asyncio.sleep(1.0)
    return {"back_s": await until_well(scene.client, WORKERS, BACK_S)}


async def rolled(scene: Scene) -> dict[str, Any]:
    """Workers, and one gateway to two."""
    begin, before = time.monotonic(), scene.cluster.num_rolled
    scene.cluster.change(gateways=2, drain_s=4)
    await scene.cluster.until_rolled(before, ROLL_S)
    roll_s = time.monotonic() - begin
    # Old gateways drain beyond that.
    await until(lambda: sum(scene.cluster.replicas("Gateway").values()) == 2, BACK_S, "2 gateways")
    await until_well(scene.client, WORKERS, BACK_S)
    return {"roll_s": roll_s}


async def gateways_node_killed(scene: Scene) -> dict[str, Any]:
    begin = time.monotonic()
    faults.kill_node(scene.cluster, scene.cluster.gateways_node())
    killed_at, since = time.monotonic(), len(scene.load.answers)
    await asyncio.sleep(1.0)
    back_s = time.monotonic() - begin + await until_well(scene.client, WORKERS, BACK_S)
    cut = [e.seen.ended - killed_at for e in scene.load.answers[since:] if not e.seen.is_whole]
    return {"back_s": back_s, "cut_s_max": max(cut, default=0.0), "streams": CLIENTS}


PLAYS: dict[str, Play] = {
    "none": nothing,
    "NATS server killed": broker_killed,
    "two of three NATS servers killed": brokers_killed,
    "slow link": held(faults.slow),
    "cut": held(faults.cut),
    "deaf": held(faults.deaf),
    "mute": muted,
    "clocks ten minutes wrong": clocks_skewed,
    "node killed": node_killed,
    "node killed under 128 clients": killed_under_burst,
    "rolling upgrade": rolled,
    "gateway's node killed": gateways_node_killed,
}
QUICK = (
    "none",
    "NATS server killed",
    "cut",
    "mute",
    "node killed",
    "rolling upgrade",
    "gateway's node killed",
)


async def play_all(cluster: Cluster, names: list[str], hold_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with client_of(cluster.url) as client:
        await until_well(client, WORKERS, BACK_S)
        pinned = Pinned(client)
        await pinned.make(CAPSULES)
        asked = asks(CLIENTS)
        async with streaming(client, asked, await undisturbed(client, asked)) as load:
            scene = Scene(cluster, client, load, pinned, hold_s)
            for name in names:
                found[name] = await _played(scene, name)
                sys.stderr.write(f"{name}: {json.dumps(measure.rounded(found[name]))}\n")
    return found


async def _played(scene: Scene, name: str) -> dict[str, Any]:
    await some_more(scene.load, 1)  # streams that this fault meets
    since = len(scene.load.answers)
    figures = await PLAYS[name](scene)
    await some_more(scene.load, 1)
    figures |= {"capsules": len(scene.pinned.ids), "equal_capsules": await scene.pinned.num_equal()}
    return scene.load.figures(since) | figures


async def burst(cluster: Cluster) -> dict[str, Any]:
    """One worker to four under a burst, and back to one after it."""
    async with client_of(cluster.url) as client:
        await until_well(client, 1, BACK_S)
        pinned = Pinned(client)
        await pinned.make(CAPSULES)
        most = 0
        asked = asks(2 * CLIENTS)
        expected = await undisturbed(client, asked)
        async with streaming(client, asked[:1], expected[:1]) as quiet:
            begin = time.monotonic()
            async with streaming(client, asked, expected) as load:
                await until_well(client, MAX_WORKERS, ROLL_S)
                up_s = time.monotonic() - begin
                await some_more(load, 1)
                most = len((await health(client)).get("workers", ()))
            equal = await pinned.num_equal()
            begin = time.monotonic()
            await until_well(client, 1, ROLL_S)
            down_s = time.monotonic() - begin
            await some_more(quiet, 1)
        figures = {
            key: load.figures(0)[key] + quiet.figures(0)[key] for key in ("requests", "failed")
        }
        return figures | {
            "wrong": load.figures(0)["wrong"] + quiet.figures(0)["wrong"],
            "errors": load.figures(0)["errors"] + quiet.figures(0)["errors"],
            **{"up_s": up_s, "down_s": down_s, "workers_max": most, "capsules": len(pinned.ids)},
            "equal_capsules_up": equal,
            "equal_capsules": await pinned.num_equal(),
        }


def settings(**more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",  # its tokenizer alone
        "served_model_name": MODEL,
        "engine": {"kind": "mock", "kv_tokens": 65536},
        "mock": {"engines_per_worker": 1, "speedup": 1.0},
        "gateways": 1,
        "drain_s": 3,
        **more,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--faults", default="")
    given = parser.parse_args()
    if os.geteuid() != 0 or (cause := network.obstacle()) is not None:
        sys.exit(f"needs root and network namespaces: {cause if os.geteuid() == 0 else 'no root'}")
    names = given.faults.split(",") if given.faults else list(QUICK if given.quick else PLAYS)
    begin = time.monotonic()
    with running(settings(), "--nodes", str(NODES)) as cluster:
        found: dict[str, Any] = {"start_s": time.monotonic() - begin}
        found |= measure.run_async(play_all(cluster, names, 5.0 if given.quick else HOLD_S))
    if not (given.quick or given.faults):
        scaling = {"max_workers": MAX_WORKERS, "lower_after_s": 3.0}
        more = {"autoscaling": scaling, "workers": 1, "scheduler": {"max_rows": 8}}
        with running(settings(**more), "--nodes", str(NODES)) as cluster:
            found["burst"] = measure.run_async(burst(cluster))
    found["machine"] = measure.machine()
    sys.stdout.write(json.dumps(measure.rounded(found)) + "\n")


if __name__ == "__main__":
    main()
