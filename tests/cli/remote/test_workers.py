"""`mallee workers` against a running service of mocked engines."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mallee.actors.addresses import free_port
from mallee.actors.mock.stack import MockStack
from mallee.cli.main import cli
from mallee.protocol.errors import ConfigError
from support.mock_scene import make_folder, mock_config
from support.waiting import until

pytestmark = pytest.mark.nats


KEY = "a-key-of-the-operator"


async def run(stack: MockStack, *arguments: str, key: str = KEY) -> Result:
    command = ["workers", *arguments, "--url", stack.base_url]
    runner = CliRunner(env={"MALLEE_API_KEY": key})
    return await asyncio.to_thread(runner.invoke, cli, command)


async def test_workers_are_listed_and_one_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K28, part: by name, with the API key; the others go on."""
    monkeypatch.setenv("MALLEE_API_KEY", KEY)
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=3)
    async with MockStack(config, port=free_port()) as stack:
        listed = json.loads((await run(stack, "list", "--json")).stdout.splitlines()[-1])["workers"]
        assert {(each["worker"], each["state"]) for each in listed} == {
            (f"w{i}", "ready") for i in range(3)
        }
        table = (await run(stack)).stdout
        assert all(word in table for word in ("w0", "w1", "w2", "ready", "queue"))
        assert (await run(stack, "drain", "w1")).stdout == "w1 drains\n"
        await until(lambda: {view.worker for view in stack.router.all_workers()} == {"w0", "w2"})
        for arguments, key, message in (
            (("drain", "w9"), KEY, "no worker 'w9' here"),
            (("drain", "w0"), "other", "API key"),
        ):
            refused = await run(stack, *arguments, key=key)
            assert isinstance(refused.exception, ConfigError)
            assert message in str(refused.exception)


def test_a_service_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    refused = CliRunner().invoke(cli, ["workers", "list", "--url", url])
    assert isinstance(refused.exception, ConfigError)
    assert url in str(refused.exception)
