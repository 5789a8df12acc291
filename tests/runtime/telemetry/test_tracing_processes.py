"""A service of several processes: its spans over OTLP, its logs as JSON, its metrics by service discovery."""

import asyncio
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
import yaml

from mallee.actors.mock.stack import MockStack
from mallee.gateway.access.keys import NewKey, new_key
from mallee.runtime.addresses import free_port
from mallee.runtime.telemetry.tracing import genai
from support.expositions import check_exposition
from support.mock_scene import TEXT, make_folder, mock_config
from support.otlp import Receiver, receiving
from support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.nats]

CLIENT, ROOT = new_key("acme", "client", None), new_key("root", "operator", None)
SIX = {"max_tokens": 6, "ignore_eos": True}


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


def bearer(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.token}"}


async def ask(http: httpx.AsyncClient, path: str, **body: object) -> dict[str, object]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


async def test_every_process_of_a_deployment_is_found_and_shows_what_it_declares(
    tmp_path: Path,
) -> None:
    """D22, part, D36, part: gateway and two worker processes, by service discovery."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [CLIENT.entry, ROOT.entry]}))
    config = mock_config(
        make_folder(tmp_path),
        workers=2,
        mock__engines_per_worker=2,
        mock__host_kv_tokens=4096,
        http__keys_file=str(keys),
        telemetry__metrics_port=free_port(),
    )
    async with (
        MockStack(config, port=free_port()) as stack,
        httpx.AsyncClient(base_url=stack.base_url, headers=bearer(CLIENT)) as acme,
        httpx.AsyncClient(headers=bearer(ROOT)) as root,
    ):
        await ask(acme, "/v1/completions", prompt=TEXT, n=3, **SIX)
        kept = (await ask(acme, "/v1/capsules", prompt=TEXT))["id"]
        await ask(acme, f"/v1/capsules/{kept}/fork", n=4, **SIX)
        assert (await acme.get("/v1/router/metrics-targets")).status_code == 403
        listed = await root.get(f"{stack.base_url}/v1/router/metrics-targets")
        assert listed.headers["content-type"] == "application/json"
        targets = {each["labels"]["process"]: each["targets"] for each in listed.json()}
        assert {process: len(found) for process, found in targets.items()} == {
            "gateway": 1,
            "worker": 2,
        }
        assert {each["labels"]["fleet"] for each in listed.json()} == {"test"}
        await asyncio.sleep(3 * config.lease_interval_s)
        texts = {
            address: (await root.get(f"http://{address}/metrics")).text
            for found in targets.values()
            for address in found
        }
        for address in targets["worker"]:
            lacking = check_exposition(texts[address], "worker")
            parts = ("_loan", "_memory_", "_cached_state", "_evicted_states")
            assert all(any(part in name for part in parts) for name in lacking), lacking
            ready = await root.get(f"http://{address}/health/ready")
            assert ready.json() == {"status": "ready"}
        workers = "".join(texts[address] for address in targets["worker"])
        first_tokens = [
            float(line.split()[-1])
            for line in workers.splitlines()
            if line.startswith("vllm:time_to_first_token_seconds_count")
        ]
        assert sum(first_tokens) == 3 + 4
        (gateway,) = targets["gateway"]
        assert not check_exposition(texts[gateway], "gateway")
        for line in (
            'mallee_branch_latency_seconds_count{gateway="g0",how="stay"} 4.0',
            'mallee_forked_branches_total{gateway="g0",how="stay"} 4.0',
            'mallee_branch_phase_seconds_count{gateway="g0",phase="decode"} 7.0',
            'mallee_tenant_requests_total{gateway="g0",tenant="acme"} 3.0',
            'mallee_tenant_tokens_total{gateway="g0",kind="output",tenant="acme"} 42.0',
            'mallee_tenant_first_token_seconds_count{gateway="g0",tenant="acme"} 7.0',
        ):
            assert line in texts[gateway].splitlines(), line
        through_the_api = (await root.get(f"{stack.base_url}/metrics")).text
        assert not check_exposition(through_the_api, "gateway")


def test_without_being_asked_nothing_is_made_and_nothing_imported() -> None:
    code = (
        "import sys, mallee.gateway.gateway, mallee.actors.mock.stack, mallee.actors.hosting.host;"
        "from mallee.runtime.telemetry.tracing.provider import open_tracing;"
        "assert open_tracing('gateway', 'g0', {}) is None;"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
