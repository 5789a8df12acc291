"""Over Ray: a replica of which a background task ends is replaced, and requests go on."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.mock_scene import make_folder, mock_config
from support.ray_marks import PROCESS_MARKS, local_serve
from support.waiting import wait_until

pytestmark = PROCESS_MARKS


def kill(name: str, tasks: Any) -> int:
    """End one of `tasks`; the process's id."""
    (victim,) = [task for task in tasks if name in task.get_name()]
    victim.cancel()
    return os.getpid()


def killable() -> dict[str, Any]:
    """The deployments whose tasks end on command. Ray is imported here: its modules warn."""
    from mallee.actors import app

    class Worker(app.WorkerReplica):
        async def kill_task(self) -> int:
            return kill("lease", self._process.host.tasks._tasks)

    class Gateway(app.GatewayReplica):
        async def kill_task(self) -> int:
            return kill("sweep", self._gateway.gateway.shell.links._feed.tasks._tasks)

    return {
        "Worker": app.Worker.options(func_or_class=Worker),
        "Gateway": app.Gateway.options(func_or_class=Gateway),
    }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service of two gateways and two workers that can be broken."""
    with local_serve() as port, pytest.MonkeyPatch.context() as patch:
        from ray import cloudpickle, serve

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        from mallee.actors import app

        for name, deployment in killable().items():
            patch.setattr(app, name, deployment)
        config = mock_config(
            make_folder(tmp_path_factory.mktemp("model")),
            workers=2,
            gateways=2,
            lease_period_s=None,
            mock__engines_per_worker=1,
        )
        serve.run(app.build_application(config), name="mallee", route_prefix="/")
        yield f"http://127.0.0.1:{port}"


def replicas(deployment: str) -> set[int]:
    """The processes of its replicas that serve."""
    from ray import serve
    from ray.serve.context import _get_global_client

    assert serve.status().applications["mallee"]
    client: Any = _get_global_client()
    details = client.get_serve_details()["applications"]["mallee"]["deployments"][deployment]
    return {each["pid"] for each in details["replicas"] if each["state"] == "RUNNING"}


def answers(url: str) -> bool:
    """Whether a request is answered as it should be."""
    body = {"model": "tiny", "prompt": "a tree", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    return answer.status_code == 200 and bool(answer.json()["usage"]["completion_tokens"] == 4)


@pytest.mark.parametrize("deployment", ["Worker", "Gateway"])
def test_a_replica_whose_task_was_killed_is_replaced_while_requests_go_on(
    url: str, deployment: str
) -> None:
    from ray import serve

    wait_until(lambda: len(replicas(deployment)) == 2, timeout_s=60)
    handle = serve.get_deployment_handle(deployment, "mallee")
    broken = handle.kill_task.remote().result(timeout_s=30)
    begin, failed = time.monotonic(), 0
    while broken in replicas(deployment) or len(replicas(deployment)) < 2:
        failed += not answers(url)
        assert time.monotonic() - begin < 60, "the replica was not replaced"
    assert failed == 0
    assert broken not in replicas(deployment)
    assert answers(url)
