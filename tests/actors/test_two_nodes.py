"""Two Ray nodes and a broker: gateways reach workers of the other node over TCP. K28, part."""

import os
from collections.abc import Iterator
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
def nodes() -> Iterator[None]:
    """A cluster of two nodes that have CPUs for one worker each."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 100 << 20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **memory}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.add_node(num_cpus=2, **memory)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


async def test_workers_of_both_nodes_answer(nodes: None, tmp_path: Path) -> None:
    from ray import serve

    from mallee.actors.app import _made_secret, app
    from mallee.actors.bus.broker import start_broker

    broker = await start_broker(free_port())
    port = free_port()
    config = mock_config(
        make_folder(tmp_path),
        workers=2,
        ray__worker_cpus=2.0,
        mock__engines_per_worker=1,
        nats_url=broker.url,
        routing__policy="round_robin",
        lease_period_s=0.5,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(config), name="mallee", route_prefix="/")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        body = {"model": "tiny", "prompt": "a tree of many trunks", "max_tokens": 4}
        seen = set()
        while len(seen) < 2:
            answer = await client.post("/v1/completions", json={**body, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            seen.add(answer.json()["choices"][0]["mallee"]["worker"])
    assert seen == {"w0", "w1"}
    assert _made_secret("mallee") == _made_secret("mallee") != _made_secret("another")
    serve.delete("mallee")
    await broker.stop()
