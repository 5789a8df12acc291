"""Two Ray nodes and a broker: gateways reach workers of the other node over TCP. K28, part."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mallee.actors.addresses import free_port
from support.mock_scene import make_folder, mock_config

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ray,
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own pipes and sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def nodes() -> Iterator[Callable[[], None]]:
    """A cluster of two nodes that have CPUs for one worker each; called, the second is killed."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **memory}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        second = cluster.add_node(num_cpus=2, **memory)
        yield lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        ray.shutdown()
        cluster.shutdown()


def texts(answer: httpx.Response) -> tuple[str, ...]:
    assert answer.status_code == 200, answer.text
    return tuple(choice["text"] for choice in answer.json()["choices"])


async def test_workers_of_both_nodes_answer_and_one_node_may_die(
    nodes: Callable[[], None], tmp_path: Path
) -> None:
    """X4, part: what ran on the node that died goes on, token for token; both must reach the broker."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from mallee.actors.app import _made_secret, app
    from mallee.actors.bus.broker import start_broker

    broker = await start_broker(free_port())
    port = free_port()
    config = mock_config(
        make_folder(tmp_path),
        workers=2,
        ray__worker_cpus=2.0,
        mock__engines_per_worker=1,
        mock__speedup=1.0,
        nats_url=broker.url,
        routing__policy="round_robin",
        lease_period_s=0.5,
    )
    with pytest.raises(RayServeException, match="2 nodes, and without nats_url"):
        app(config.model_copy(update={"nats_url": None}))
    # Both nodes are on this machine: the proxy of the second would share the port.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(config), name="mallee", route_prefix="/")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        body = {"model": "tiny", "prompt": "a tree of many trunks", "max_tokens": 4}
        seen = set()
        while len(seen) < 2:
            answer = await client.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            seen.add(answer.json()["choices"][0]["mallee"]["worker"])
        long = {**body, "max_tokens": 200, "seed": 7, "n": 2, "ignore_eos": True}
        (undisturbed,) = {texts(await client.post("/v1/completions", json=long))}
        running = [
            asyncio.ensure_future(client.post("/v1/completions", json=long)) for _ in range(8)
        ]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(nodes)
        assert {texts(answer) for answer in await asyncio.gather(*running)} == {undisturbed}
        assert texts(await client.post("/v1/completions", json=long)) == undisturbed
    assert seen == {"w0", "w1"}
    assert _made_secret("mallee") == _made_secret("mallee") != _made_secret("another")
    serve.delete("mallee")
    await broker.stop()
