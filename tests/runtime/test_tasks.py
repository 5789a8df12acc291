"""Supervision of background tasks: a service whose task broke is not healthy."""

import ast
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mallee.protocol.errors import InternalError
from mallee.runtime.tasks import Tasks
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.task_groups import FLIP_S, groups, running
from support.waiting import elapse, until

ROOT = Path(__file__).resolve().parent.parent.parent

# Calls by which a task or thread begins outside of a group, and why that may be.
BARE = {
    ("runtime/tasks.py", "create_task"): "the group itself",
    ("api/deltas.py", "create_task"): "its request takes in how each ends",
    ("api/sse.py", "ensure_future"): "it lives as long as the request that watches by it",
    ("api/responses/background.py", "ensure_future"): "its reader waits for it, or for its end",
    ("api/entry/idempotency.py", "ensure_future"): "its request waits for its end",
    ("api/callbacks/callbacks.py", "to_thread"): "files that are read, once",
    ("actors/mock/stack.py", "create_task"): "`wait` takes in how the server ends",
    ("actors/mock/stack.py", "to_thread"): "once, at the start, which has a limit",
    ("actors/mock/fleet.py", "to_thread"): "once, at the start",
    ("gateway/access/access.py", "to_thread"): "a file that is read",
    ("actors/app.py", "to_thread"): "calls to Ray, which end with an error when it is away",
    ("actors/build.py", "to_thread"): "once, at the start or the end",
    ("actors/build.py", "ThreadPoolExecutor"): "the gateway closes it",
    ("actors/hosting/engine.py", "to_thread"): "at the end, for a second at a time",
    ("actors/hosting/engine.py", "Thread"): "its failure is its worker's",
    ("actors/foreign/build.py", "to_thread"): "once, at the start",
    ("actors/foreign/runner.py", "to_thread"): "at the end, which has a limit",
    ("actors/kv_transfer/server.py", "ThreadPoolExecutor"): "its listener closes it",
    ("actors/hosting/orphans.py", "to_thread"): "a look at a disk; its task is the host's",
    ("actors/hosting/weights.py", "to_thread"): "its task is the host's, and takes in how it ends",
    ("gateway/recording/recorder.py", "to_thread"): "files; its task is the recorder's",
    ("actors/hosting/compiler.py", "ThreadPoolExecutor"): "the host closes it",
    ("runtime/bus/broker.py", "ThreadPoolExecutor"): "for the length of a call, which has a limit",
    ("runtime/bus/broker.py", "to_thread"): "a folder, at the start and the end, which has a limit",
    (
        "actors/front/picker/server.py",
        "to_thread",
    ): "its request waits for it, as long as a decision takes",
    ("actors/front/front.py", "to_thread"): "its request waits for it",
    ("actors/front/proxy/exchange.py", "to_thread"): "its request waits for it",
    ("actors/front/proxy/proxy.py", "to_thread"): "at the end, which has a limit",
    ("actors/front/pods/kubernetes.py", "TaskGroup"): "it ends with its owner's supervised task",
    ("actors/front/pods/kubernetes.py", "create_task"): "in that group",
    ("actors/local.py", "Thread"): "at the end, which waits for it",
}
PROCESSES = ("runtime", "gateway", "api", "actors", "testing/nodes")
SPAWNING = {
    *("create_task", "ensure_future", "to_thread", "run_coroutine_threadsafe", "TaskGroup"),
    *("ThreadPoolExecutor", "ProcessPoolExecutor", "Thread", "start_new_thread"),
}


def test_tasks_and_threads_begin_in_a_group_or_with_a_reason() -> None:
    found = set()
    for path in (path for folder in PROCESSES for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in SPAWNING):  # to parse all takes three times as long
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SPAWNING:
                found.add((path.relative_to(ROOT).as_posix(), name))
    assert found == BARE.keys()


async def test_a_task_that_raises_is_logged_by_its_name_and_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = Tasks("a service")

    async def fail() -> None:
        raise RuntimeError("a bug")

    tasks.spawn(elapse(60.0), name="a long one")
    tasks.spawn(fail())
    await until(lambda: tasks.failure is not None)
    assert "a bug" in str(tasks.failure)
    assert "a task of a service failed: " in caplog.text
    assert "fail" in caplog.text.splitlines()[0]
    await tasks.close()
    assert "a bug" in str(tasks.failure), "a cancelled task is no failure"


async def test_a_task_that_is_cancelled_by_nobody_who_may_is_a_failure() -> None:
    whole, part = Tasks("a service"), Tasks("a part of it")
    whole.include(part)
    part.cancel(part.spawn(elapse(60.0)))
    await asyncio.sleep(0)
    assert whole.failure is None
    part.spawn(elapse(60.0), name="the sweep").cancel()
    await until(lambda: whole.failure is not None)
    assert "the sweep was cancelled" in str(whole.failure)
    await part.close()


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[MockScene, list[Tasks]]]:
    with groups() as made:
        async with mocked(mock_config(folder)) as found:
            await until(lambda: not any("open" in name for name, _ in running(made)))
            yield found, made


async def test_health_says_within_two_seconds_that_a_task_was_killed(tmp_path: Path) -> None:
    """Each task of a host and a gateway, found by their groups, once; connections have no listener here."""
    folder = make_folder(tmp_path)
    async with scene(folder) as (_, made):
        names = [name for name, _ in running(made) if "connection" not in name]
    assert len(names) == 3, names  # a lease, a watch, a sweep
    for name in names:
        async with scene(folder) as (found, made):
            dict(running(made))[name].cancel()
            await until(
                lambda found=found: (  # type: ignore[misc]
                    not found.fleet.host.healthy()
                    or found.gateway.operator.health()["status"] != "ok"
                ),
                FLIP_S,
            )


async def test_a_callback_that_raises_is_a_failure_of_its_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A timer that sets itself again would be over, and nobody would know."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async with scene(make_folder(tmp_path)) as (found, _):
        gateway = found.gateway
        gateway.tasks.watch_callbacks()
        monkeypatch.setattr(gateway.shell.dispatcher, "on_time", fail)
        asyncio.get_running_loop().call_soon(gateway.shell._on_time)
        await until(lambda: gateway.operator.failure is not None, FLIP_S)
        assert gateway.operator.health()["status"] == "degraded"
        assert "a callback of gateway g0 failed" in caplog.text
        other = Tasks("another")
        other.watch_callbacks()
        asyncio.get_running_loop().call_soon(fail)  # of somebody else in this loop
        await elapse(0.01)
        assert other.failure is None
        asyncio.get_running_loop().set_exception_handler(None)


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # Ray's
async def test_a_host_and_a_gateway_whose_bus_broke_are_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray asks its replicas, and replaces one that raises."""
    from mallee.actors.app import GatewayReplica, WorkerReplica  # its imports warn

    async with mocked(mock_config(make_folder(tmp_path))) as found:
        host, gateway = found.fleet.host, found.gateway
        assert host.healthy()
        assert gateway.operator.failure is None
        assert gateway.operator.health()["status"] == "ok"
        worker: Any = SimpleNamespace(_process=SimpleNamespace(host=host))
        entry: Any = SimpleNamespace(_gateway=SimpleNamespace(gateway=gateway))
        for owner, look in (
            (host, partial(WorkerReplica.check_health, worker)),
            (gateway.shell.links, partial(GatewayReplica.check_health, entry)),
        ):
            with monkeypatch.context() as broken:
                broken.setattr(owner._bus, "failure", RuntimeError("a bug of the bus"))
                with pytest.raises(InternalError, match="failed"):
                    await look()
            await look()
