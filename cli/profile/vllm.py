"""`mallee profile --engine vllm`: a running vLLM server's passes, timed from outside over HTTP.

Only prompts of token ids, random ones, so that nothing is cached but what is asked for. What a request takes
beside its pass (HTTP, processes) is told apart: a prompt whose last token alone is computed takes what a
decode of one row takes, and that.
"""

import asyncio
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np

from mallee.mocker.measure import Spreads, Sweep, around
from mallee.mocker.timing.files import GridData, TimingFile
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.errors import ConfigError

_LAG = 8  # tokens that streams may be apart when the last one has begun
_FIRST_ID = 1000  # below it tokenizers have their special tokens
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Served(NamedTuple):
    """A server, as it tells of itself."""

    model: str
    max_model_len: int
    block_size: int
    num_blocks: int
    version: str


async def served(client: httpx.AsyncClient) -> Served:
    """Ask the server of `client`. Raises ConfigError naming what it lacks."""
    try:
        models = (await client.get("/v1/models")).raise_for_status().json()
        page = (await client.get("/metrics")).raise_for_status().text
        version = (await client.get("/version")).raise_for_status().json()["version"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{client.base_url}: no vLLM server answers there ({error or type(error).__name__}):"
            " give the URL of one, without /v1"
        ) from error
    info = next((line for line in page.splitlines() if "cache_config_info{" in line), "")
    labels = dict(_LABEL.findall(info))
    if not {"block_size", "num_gpu_blocks"} <= labels.keys():
        raise ConfigError(f"{client.base_url}/metrics has no vllm:cache_config_info: is it vLLM's?")
    model = models["data"][0]
    # One block is never used: tables of rows that have none point there.
    blocks = int(labels["num_gpu_blocks"]) - 1
    size = int(labels["block_size"])
    return Served(model["id"], model["max_model_len"], size, blocks, version)


class ServedProfiler:
    """Measures the points of `sweep` on the server of `client`. One request at a time, but for decodes."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: Served,
        sweep: Sweep,
        *,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
        seed: int = 0,
    ) -> None:
        self._client = client
        self._server = server
        self._sweep = sweep
        self._clock = clock
        self.spreads = Spreads(report)
        self._drawn = np.random.default_rng(seed)
        self._nearby = {new: count() for new in sweep.new}

    async def measure(self, conditions: dict[str, str | int | float]) -> TimingFile:
        """Measure every point. Raises ConfigError if the server refuses a request."""
        sweep, begun = self._sweep, self._clock()
        await self._first_s(self._text(sweep.new[-1]))  # what comes for the first time takes longer
        await asyncio.gather(*(self._tokens(self._text(1), _LAG) for _ in range(sweep.rows[-1])))
        columns = [await self._decodes(context) for context in sweep.context]
        request_s = await self._request_s(columns[0][0])
        prefills = [await self._prefills(new, request_s) for new in sweep.new]
        return TimingFile(
            conditions={
                **conditions,
                "profile_s": round(self._clock() - begun, 1),
                "noise": self.spreads.noise,
            },
            request_s=request_s,
            jitter=self.spreads.jitter,
            model=GridData(
                Prefills(sweep.new, self._prefixes, tuple(map(tuple, prefills))),
                Decodes(sweep.rows, sweep.context, tuple(zip(*columns, strict=True))),
            ),
        )

    @property
    def _prefixes(self) -> tuple[int, ...]:
        """Whole blocks: what is behind them is not cached."""
        size = self._server.block_size
        return tuple(sorted({prefix // size * size for prefix in self._sweep.prefix}))

    async def _request_s(self, decode_s: float) -> float:
        """Seconds that a request takes beside its pass, which is that of one decode."""
        size = self._server.block_size
        text = self._text(-(-self._sweep.context[0] // size) * size + 1)
        await self._first_s(text)
        times = [await self._first_s(text) for _ in range(3 * self._sweep.repeats)]
        return max(0.0, self.spreads.middle("a request of one token", times) - decode_s)

    async def _prefills(self, new: int, request_s: float) -> list[float]:
        """Seconds of a pass over about `new` tokens behind each prefix."""
        found = []
        for prefix in self._prefixes:
            times = []
            for _ in range(self._sweep.repeats):
                head = self._text(prefix)
                if head:
                    await self._first_s(head + self._text(1))
                tail = self._text(new + around(next(self._nearby[new])))
                times.append(await self._first_s(head + tail))
            middle = self.spreads.middle(f"prefill of {new} behind {prefix}", times)
            found.append(max(1e-6, middle - request_s))
        return found

    async def _decodes(self, context: int) -> list[float]:
        """Seconds of a decode step for each number of rows, whose prompts are cached."""
        steps = self._sweep.steps
        length = max(1, context - (steps + _LAG) // 2)
        texts = [self._text(length) for _ in range(self._sweep.rows[-1])]
        for text in texts:
            await self._first_s(text)
        found = []
        for rows in self._sweep.rows:
            times = []
            for _ in range(self._sweep.repeats):
                streams = [self._tokens(text, steps + _LAG) for text in texts[:rows]]
                times.append(_step_s(await asyncio.gather(*streams)))
            found.append(self.spreads.middle(f"decode of {rows} rows at {context}", times))
        return found

    async def _first_s(self, text: list[int]) -> float:
        begun = self._clock()
        return (await self._tokens(text, 1))[0] - begun

    async def _tokens(self, text: list[int], num: int) -> list[float]:
        """The time of each of `num` tokens after `text`. Raises ConfigError if they don't come."""
        body = {
            "model": self._server.model,
            "prompt": text,
            "max_tokens": num,
            "min_tokens": num,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        times: list[float] = []
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                told = (await answer.aread()).decode(errors="replace")
                raise ConfigError(f"{answer.url} answers {answer.status_code}: {told[:500]}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = self._clock()
                    usage: Any = msgspec.json.decode(line[6:]).get("usage") or {}
                    times += [now] * (usage.get("completion_tokens", 0) - len(times))
        if len(times) != num:
            raise ConfigError(f"{self._client.base_url} drew {len(times)} tokens of {num}")
        return times

    def _text(self, num_tokens: int) -> list[int]:
        drawn: list[int] = self._drawn.integers(_FIRST_ID, 2 * _FIRST_ID, num_tokens).tolist()
        return drawn


def _step_s(streams: Sequence[Sequence[float]]) -> float:
    """Mean seconds from token to token while all streams run, of the stream in the middle."""
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    found = []
    for times in streams:
        inside = [at for at in times if begin <= at <= end]
        if len(inside) > 1 and inside[-1] > inside[0]:
            found.append((inside[-1] - inside[0]) / (len(inside) - 1))
    if not found:
        raise ConfigError(
            f"{len(streams)} requests never ran at once: the server takes fewer; give --max-rows less"
        )
    return statistics.median(found)
