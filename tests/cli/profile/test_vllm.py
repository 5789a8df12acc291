"""`mallee profile --engine vllm`: a server that takes time by a law comes back as it; what is refused."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.mocker import fidelity_vllm as fidelity
from mallee.cli.main import cli
from mallee.cli.profile.command import _save
from mallee.cli.profile.vllm import ServedProfiler, served
from mallee.mocker.measure import Spreads, Sweep, busy_cores
from mallee.mocker.timing.files import GridData, TimingFile, read_timing
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.errors import ConfigError

SIZE = 32
REQUEST_S = 0.007
SWEEP = Sweep((16, 64, 256), (0, 100, 256), (1, 2, 8), (64, 256), repeats=2, steps=4)
CONFIG = 'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="513"} 1.0\n'


def prefill_s(new: int, prefix: int) -> float:
    return 0.01 + 2e-4 * new + 1e-6 * new * prefix


def decode_s(rows: int, context: float) -> float:
    return 0.01 + 1e-3 * rows + 1e-6 * rows * context


class Group:
    """Requests that came at one instant, and the times of the steps that they share."""

    def __init__(self, begin: float) -> None:
        self.rows = 0
        self.times = [begin]
        self.chunks: list[tuple[int, int]] = []

    def time(self, step: int, context: int) -> float:
        while len(self.times) <= step:
            if len(self.times) == 1:
                seconds = REQUEST_S + sum(
                    decode_s(1, prefix + 1) if new == 1 and prefix else prefill_s(new, prefix)
                    for new, prefix in self.chunks
                )
            else:
                seconds = decode_s(self.rows, context)
            self.times.append(self.times[-1] + seconds)
        return self.times[step]


class Server:
    """Answers as vLLM does, in a time of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cached: set[tuple[int, ...]] = set()
        self.page = CONFIG
        self.group: Group | None = None
        self.status = 200

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 2048}]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.page)
        if self.status != 200:
            return httpx.Response(self.status, text="no such model")
        return httpx.Response(200, content=self.stream(json.loads(request.content)))

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        assert body["ignore_eos"]
        text, num = body["prompt"], body["max_tokens"]
        group = self.group = self.group or Group(self.now)
        group.rows += 1
        full = range(SIZE, len(text), SIZE)
        prefix = max((end for end in full if tuple(text[:end]) in self.cached), default=0)
        self.cached |= {tuple(text[:end]) for end in (*full, len(text) // SIZE * SIZE)}
        group.chunks.append((len(text) - prefix, prefix))
        for _ in range(20):  # until all that come now are here
            await asyncio.sleep(0)
        self.group = None
        for k in range(1, num + 1):
            self.now = max(self.now, group.time(k, len(text) + k - 1))
            yield f'data: {{"usage": {{"completion_tokens": {k}}}}}\n\n'.encode()
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"


async def measured(server: Server, sweep: Sweep = SWEEP) -> tuple[TimingFile, ServedProfiler]:
    transport = httpx.MockTransport(server.answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as client:
        told = await served(client)
        assert told == ("m", 2048, SIZE, 512, "0.32.0")
        profiler = ServedProfiler(client, told, sweep, clock=lambda: server.now)
        return await profiler.measure({"model": "m"}), profiler


async def test_the_law_of_a_server_comes_back_point_by_point() -> None:
    """X22, part: prefills behind cached prefixes, decodes of rows, and what a request takes beside."""
    found, profiler = await measured(Server())
    timing = found.timing()
    assert timing.request_s == pytest.approx(REQUEST_S, abs=2e-4)
    for new in SWEEP.new:
        for prefix in (0, 96, 256):  # whole blocks
            assert timing.step_s([(new, prefix)], 0, 0) == pytest.approx(
                prefill_s(new, prefix), rel=0.03
            )
    for rows in SWEEP.rows:
        for context in SWEEP.context:
            told = timing.step_s([], rows, rows * context)
            assert told == pytest.approx(decode_s(rows, context), rel=0.02)
    assert profiler.spreads.noise < 0.05


async def test_a_server_that_is_not_vllms_or_refuses_is_named() -> None:
    server = Server()
    server.page = "up 1\n"
    with pytest.raises(ConfigError, match="has no vllm:cache_config_info"):
        await measured(server)
    server = Server()
    server.status = 404
    with pytest.raises(ConfigError, match="answers 404: no such model"):
        await measured(server)


def test_an_address_where_nothing_answers_is_named(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    arguments = ["profile", "http://127.0.0.1:9", "--engine", "vllm", "--to", str(out)]
    answer = CliRunner().invoke(cli, arguments)
    assert "127.0.0.1:9: no vLLM server answers there" in str(answer.exception)
    answer = CliRunner().invoke(cli, [*arguments, "--random-weights"])
    assert "without --trace or --random-weights" in str(answer.exception)


def test_noise_is_how_far_one_time_in_ten_is_off() -> None:
    spreads = Spreads()
    for _ in range(9):
        spreads.middle("point", [1.0] * 9 + [1.5] * 2)
    assert spreads.noise == pytest.approx(0.5)
    assert spreads.jitter == 0.0


def test_a_busy_machine_is_refused_unless_forced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is loaded; noisy times are refused when they are there."""
    monkeypatch.setattr("mallee.mocker.measure.busy_cores", lambda: 1e3)
    out = tmp_path / "t.json"
    for arguments in (["no/such"], ["http://127.0.0.1:9", "--engine", "vllm"]):
        command = ["profile", *arguments, "--to", str(out)]
        told = str(CliRunner().invoke(cli, command).exception)
        assert "other work uses 1000.0 of" in told
        assert "give --force" in told
        assert "other work" not in str(CliRunner().invoke(cli, [*command, "--force"]).exception)
    model = GridData(
        Prefills((1, 2), (0,), ((1.0,), (2.0,))), Decodes((1, 2), (1,), ((1.0,), (2.0,)))
    )
    noisy = TimingFile(conditions={"noise": 0.4}, model=model)
    with pytest.raises(ConfigError, match="is more than 40% off the median of its point"):
        _save(noisy, out, Console(), force=False)
    assert not out.exists()
    assert _save(noisy, out, Console(), force=True)["noise"] == 0.4
    assert read_timing(out).conditions == {"noise": 0.4}


def test_busy_cores_are_read_while_the_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    pages: Iterator[str] = iter(
        f"cpu {100 + busy} 0 50 9000 7 0 3 0 0 0\ncpu0 ...\n" for busy in (0, ticks)
    )
    slept: list[float] = []
    monkeypatch.setattr("mallee.mocker.measure.time.sleep", slept.append)
    assert busy_cores(0.5, lambda: next(pages)) == 2.0
    assert slept == [0.5]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(
    "MALLEE_VLLM_PYTHON" not in os.environ, reason="MALLEE_VLLM_PYTHON names no Python"
)
async def test_a_replay_foretells_a_live_vllm(tmp_path: Path) -> None:
    """X22, part: a few seconds of questions, forks and answers gone on with: the cache hits are the same."""
    requests = fidelity.scene(1.4, 3, seconds=8.0, rate=1.0)
    with fidelity.server(os.environ["MALLEE_VLLM_PYTHON"], tmp_path) as url:
        timing = await asyncio.to_thread(fidelity.profiled, url, tmp_path)
        lives, preemptions = await fidelity.played(url, requests)
    real = fidelity.real_figures(lives, preemptions)
    told = fidelity.told_figures(fidelity.told(requests, timing))
    assert len(lives) == len(requests)
    assert told.hit_rate == pytest.approx(real.hit_rate, abs=0.05)
    assert timing.conditions["kv_tokens"] == fidelity.NUM_BLOCKS * SIZE
    assert timing.timing().step_s([(512, 0)], 0, 0) > timing.timing().step_s([(16, 0)], 0, 0)
