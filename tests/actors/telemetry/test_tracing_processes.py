"""A service of several processes by its command, whose spans come over OTLP and whose logs are JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mallee.actors.addresses import free_port
from mallee.actors.telemetry.tracing import genai
from support.mock_scene import make_folder
from support.otlp import Receiver, receiving
from support.waiting import wait_until

pytestmark = [pytest.mark.nats, pytest.mark.slow]


class Service:
    """`mallee mock` with two processes of engines."""

    def __init__(self, url: str, log: Path) -> None:
        self.client = httpx.Client(base_url=url, timeout=60)
        self.log = log

    @property
    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            return bool(self.client.get("/health/ready").status_code == 200)
        return False

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def serving(folder: Path, receiver: Receiver, *settings: str) -> Iterator[Service]:
    port, log = free_port(), folder / "log.txt"
    command = [sys.executable, "-m", "mallee.cli", "mock", "--model", str(make_folder(folder))]
    command += ["--engines", "2", "--processes", "2", "--port", str(port), "--speedup", "0"]
    command += [*settings, "--set", "served_model_name=m"]
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **traced})
        service = Service(f"http://127.0.0.1:{port}", log)
        try:
            wait_until(lambda: service.is_up or process.poll() is not None, timeout_s=120)
            assert process.poll() is None, log.read_text()
            yield service
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            service.client.close()


def test_spans_of_all_processes_join_and_logs_name_them(tmp_path: Path) -> None:
    levels = ("--set", "telemetry.log_level=debug", "--set", "telemetry.log_format=json")
    body = {"prompt": "a tree of many trunks", "max_tokens": 6, "n": 2}
    with receiving() as receiver, serving(tmp_path, receiver, *levels) as service:
        answer = service.client.post("/v1/completions", json=body)
        capsule = service.client.post("/v1/capsules", json={"prompt": "a tree"}).json()["id"]
        fork = {"n": 2, "max_tokens": 2}
        forked = service.client.post(f"/v1/capsules/{capsule}/fork", json=fork)
        assert (answer.status_code, forked.status_code) == (200, 200)
        for path in ("/health", "/health/live", "/metrics"):
            service.client.get(path)
        records = service.records
        # The last spans go out when the processes end.
    trace = answer.headers["traceresponse"].split("-")[1]
    tree = [line.rpartition("]")[0].partition("[") for line in receiver.tree(trace)]
    assert [(name.rstrip(), process.split()[0]) for name, _, process in tree] == [
        ("POST /v1/completions", "gateway"),
        ("  prepare", "gateway"),
        ("  text_completion m", "gateway"),
        ("    queue", "gateway"),
        ("    shard", "gateway"),
        ("      engine", "worker"),
        *(
            [("    branch", "gateway"), ("      prefill", "gateway"), ("      decode", "gateway")]
            * 2
        ),
    ]
    (shard,) = (span for span in receiver.of(trace) if span.name == "shard")
    (engine,) = (span for span in receiver.of(trace) if span.name == "engine")
    assert shard.begin <= engine.begin <= engine.end <= shard.end, "of one machine's clock"
    assert engine.attributes[genai.OUTPUT_TOKENS] == 12
    (linked,) = receiver.named("fork m")
    assert linked.links == [receiver.named("prefill m")[0].span]
    assert b"trunks" not in receiver.raw

    ended = [each for each in records if " ended: " in each["message"]]
    assert {each["trace_id"] for each in ended} >= {trace}
    assert {each["process"] for each in records} == {"gateway"}, "workers have nothing to tell"
    assert not any("health" in each["message"] for each in records)
    assert "trunks" not in service.log.read_text()
