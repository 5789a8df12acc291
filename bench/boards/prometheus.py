"""Debian's Prometheus and promtool, where `make prometheus` unpacked them, and a server of a test's own."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import yaml

from mallee.runtime.addresses import free_port

FOLDER: Final = Path(sys.prefix) / "prometheus"
PROMETHEUS: Final = FOLDER / "usr/bin/prometheus"
PROMTOOL: Final = FOLDER / "usr/bin/promtool"
START_S: Final = 20.0
SCRAPE_S: Final = 1


def missing() -> str | None:
    """The reason why there is no Prometheus here, or None."""
    if PROMTOOL.exists() and PROMETHEUS.exists():
        return None
    return f"no Prometheus in {FOLDER}: `make prometheus` unpacks Debian's"


def promtool(*arguments: str) -> str:
    """The output of promtool. Raises AssertionError with it if promtool finds a fault."""
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


class Sample(NamedTuple):
    """A series of an answer, at one time or over a range."""

    labels: dict[str, str]
    values: list[tuple[float, float]]


class Prometheus:
    """A running server, by its HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=20.0)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **params: str) -> Any:
        """The data of an answer. Raises AssertionError with Prometheus' own words."""
        answer = self._client.get(f"/api/v1/{path}", params=params)
        body = answer.json()
        assert body["status"] == "success", f"{params}: {body['error']}"
        return body["data"]

    def query(self, expression: str) -> list[Sample]:
        """The series of `expression` now."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", expression
        return [Sample(each["metric"], [_read(each["value"])]) for each in found["result"]]

    def query_range(self, expression: str, begin: float, end: float, step_s: float) -> list[Sample]:
        """The series of `expression` from `begin` to `end`, in seconds since the epoch."""
        found = self.get(
            "query_range", query=expression, start=str(begin), end=str(end), step=str(step_s)
        )
        return [
            Sample(each["metric"], [_read(value) for value in each["values"]])
            for each in found["result"]
        ]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").is_success
        except httpx.TransportError:
            return False


def _read(value: tuple[float, str]) -> tuple[float, float]:
    return value[0], float(value[1])


@contextmanager
def prometheus(
    scrapes: Sequence[dict[str, Any]], rules: Sequence[Path] = (), evaluates_s: int = SCRAPE_S
) -> Iterator[Prometheus]:
    """A server on loopback that scrapes by `scrapes`, Prometheus' own `scrape_configs`."""
    port = free_port()
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_S}s",
            "scrape_timeout": f"{SCRAPE_S}s",
            "evaluation_interval": f"{evaluates_s}s",
        },
        "rule_files": [str(path) for path in rules],
        "scrape_configs": list(scrapes),
    }
    with tempfile.TemporaryDirectory(prefix="mallee-prometheus-") as folder:
        file, log = Path(folder) / "prometheus.yml", Path(folder) / "log"
        file.touch(mode=0o600)  # keys are in it
        file.write_text(yaml.safe_dump(config))
        command = [PROMETHEUS, f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        server = Prometheus(port)
        try:
            deadline = time.monotonic() + START_S
            while not server.is_ready():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield server
        finally:
            server.close()
            process.terminate()
            process.wait(20)
