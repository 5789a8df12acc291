"""A running service of mocked engines, and the program `mallee` that asks it."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from mallee.client import ConnectionFailed, Mallee
from mallee.runtime.addresses import free_port
from support.mock_scene import make_folder
from support.waiting import wait_until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `mallee mock` with two engines."""
    folder = make_folder(tmp_path_factory.mktemp("model"))
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "mock", "--engines", "2", "--speedup", "0"]
    command += ["--model", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            with Mallee(f"http://127.0.0.1:{port}") as client:
                wait_until(lambda: client_says_ok(client), timeout_s=60)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def client_says_ok(client: Mallee) -> bool:
    try:
        return bool(client.health()["status"] == "ok")
    except ConnectionFailed:
        return False
