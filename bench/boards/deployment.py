"""`mallee serve` with mocked workers and keys of three tenants, as Prometheus finds its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import psutil
import yaml

from mallee.gateway.access.keys import new_key
from mallee.runtime.addresses import free_port

MODEL: Final = "mallee"
TENANTS: Final = ("acme", "birch", "cedar")
START_S: Final = 120.0
STOP_S: Final = 60.0


class Deployment(NamedTuple):
    """A running service, its keys, and the process that holds it."""

    url: str
    operator: str
    tenants: dict[str, str]
    process: subprocess.Popen[bytes]

    def scrapes(self) -> list[dict[str, Any]]:
        """Prometheus' `scrape_configs`: all processes that the gateways name."""
        # Prometheus 2.42 leaves out the default type where it asks for targets.
        authorization = {"type": "Bearer", "credentials": self.operator}
        discovery = {
            "url": f"{self.url}/v1/router/metrics-targets",
            "refresh_interval": "1s",
            "authorization": authorization,
        }
        job = {"job_name": "mallee", "authorization": authorization}
        return [{**job, "http_sd_configs": [discovery]}]

    def workers(self) -> list[psutil.Process]:
        """The processes of workers."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in family if "ServeReplica:mallee:Worker" in _title(each)]

    def operate(self, method: str, path: str) -> httpx.Response:
        """An operator's request."""
        headers = {"authorization": f"Bearer {self.operator}"}
        return httpx.request(method, self.url + path, headers=headers, timeout=20.0)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


@contextmanager
def deployment(folder: Path, model: str, settings: Sequence[str] = ()) -> Iterator[Deployment]:
    """Serve `model`, mocked; `folder` takes keys and logs. Returns when every worker is there."""
    keys = {name: new_key(name, "client", name) for name in TENANTS}
    operator = new_key("operator", "operator", None)
    entries = [key.entry for key in (*keys.values(), operator)]
    file, log, port = folder / "keys.yaml", folder / "serve.log", free_port()
    file.write_text(yaml.safe_dump({"keys": entries}))
    command = [sys.executable, "-m", "mallee.cli", "serve", "--model", model, "--port", str(port)]
    command += ["--served-model-name", MODEL]
    for setting in (
        "engine.kind=mock",
        f"http.keys_file={file}",
        f"telemetry.metrics_port={free_port()}",
        *settings,
    ):
        command += ["--set", setting]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while " serves " not in " ".join(log.read_text().split()):  # its lines are broken
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        tokens = {name: key.token for name, key in keys.items()}
        yield Deployment(url, operator.token, tokens, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)
