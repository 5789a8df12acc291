"""Supervision of background tasks: a service whose task broke is not healthy."""

import asyncio
from pathlib import Path

import pytest

from mallee.actors.tasks import Tasks
from support.mock_scene import make_folder, mock_config, mocked
from support.waiting import until


async def test_a_task_that_raises_is_logged_and_noted(caplog: pytest.LogCaptureFixture) -> None:
    tasks = Tasks("a service")

    async def fail() -> None:
        raise RuntimeError("a bug")

    tasks.spawn(asyncio.sleep(60.0))
    tasks.spawn(fail())
    await until(lambda: tasks.failure is not None)
    assert "a bug" in str(tasks.failure)
    assert "a task of a service failed" in caplog.text
    await tasks.close()
    assert "a bug" in str(tasks.failure), "a cancelled task is no failure"


async def test_a_host_and_a_gateway_whose_tasks_broke_are_not_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without leases, or a gateway that believes them for ever, has to be replaced."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    async with mocked(mock_config(make_folder(tmp_path))) as scene:
        await until(lambda: len(scene.names()) == 4)
        host, gateway = scene.fleet.host, scene.gateway
        assert host.healthy()
        assert gateway.failure is None
        assert gateway.health()["status"] == "ok"
        for owner, is_sound in (
            (host, host.healthy),
            (gateway._peers, lambda: not gateway.failure),
        ):
            with monkeypatch.context() as broken:
                broken.setattr(owner._bus, "failure", RuntimeError("a bug of the bus"))
                assert not is_sound()
            assert is_sound()
        with monkeypatch.context() as broken:
            broken.setattr(host, "_publish_leases", fail)
            broken.setattr(scene.router, "expire_leases", fail)
            await until(lambda: not host.healthy() and gateway.failure is not None)
        assert gateway.health()["status"] == "degraded"
