"""Processes that a bench starts: until the end of a block, once they answer."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

START_S: Final = 60.0


@contextmanager
def running(
    command: list[str], log: Path, env: Mapping[str, str] | None = None, *, stop_s: float = 10
) -> Iterator[subprocess.Popen[bytes]]:
    """`command`, until the end of the block; what it says goes to `log`.

    `env` is added to this process's. After `stop_s` it is killed.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(
    url: str,
    process: subprocess.Popen[bytes],
    log: Path,
    timeout_s: float = START_S,
    *,
    model: str = "m",
    headers: Mapping[str, str] | None = None,
) -> None:
    """Returns once a completion is answered. Raises RuntimeError with what the process said."""
    body = json.dumps({"model": model, "prompt": "Are you there yet?", "max_tokens": 8}).encode()
    sent = {"content-type": "application/json", **(headers or {})}
    wait_for_page(f"{url}/v1/completions", process, log, timeout_s, body=body, headers=sent)


def wait_for_page(
    url: str,
    process: subprocess.Popen[bytes],
    log: Path,
    timeout_s: float,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Returns once `url` can be read, or takes `body`. Raises RuntimeError as `wait_for`."""
    request = urllib.request.Request(url, body, dict(headers or {}))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"nothing answers at {url}: {log.read_text()[-2000:]}")
