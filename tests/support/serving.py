"""The whole service over Ray, in a process of its own.

Ray keeps its first token for the rest of a process, so that two services of one process can't have
different ones.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mallee.actors.addresses import free_port
from mallee.actors.config import AppConfig

_STACK = """
import sys
from mallee.actors.config import AppConfig
from mallee.actors.local import LocalStack

with LocalStack(AppConfig.model_validate_json(sys.argv[1]), port=int(sys.argv[2])):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def serving(config: AppConfig) -> Iterator[str]:
    """The URL of a local stack as `mallee serve` starts it, until the block ends."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _STACK, config.model_dump_json(), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert any(line == b"ready\n" for line in process.stdout), "the app did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
