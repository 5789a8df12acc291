"""Scrapes of every process once a second, as Prometheus makes them, and what must hold of their series."""

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import httpx

from mallee.cli.metrics import declared
from mallee.runtime.telemetry.families import Family

PERIOD_S: Final = 1.0
SCRAPE_S: Final = 1.0  # for which one may take: the next one comes
LATE_S: Final = 60.0
_SERIES: Final = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OWN: Final = frozenset(("le", "quantile"))
_START: Final = "process_start_time_seconds"
# Of a gateway, a worker and its host.
AT_REST: Final = frozenset(
    (
        *("mallee_branches_in_flight", "mallee_requests_waiting", "mallee_booked_requests"),
        *("mallee_booked_rows", "mallee_remote_requests", "mallee_store_waiting_writes"),
        *("mallee_worker_running_branches", "mallee_worker_waiting_branches"),
        *("mallee_engine_open_requests", "mallee_keys_refused", "mallee_worker_open_loans"),
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    )
)


class Life(NamedTuple):
    """One life of a process: the place of its metrics, and its start."""

    target: str
    start: float


class Scraper:
    """Scrapes what the gateways at `urls` name, with an operator's `key`. Belongs to one event loop."""

    def __init__(self, urls: Sequence[str], key: str, secrets: Sequence[str]) -> None:
        self.num_scrapes = 0
        self.faults: list[str] = []
        self.num_series = 0  # different ones of all lives
        self.most_series = 0  # of one process at a time
        self.has_seen_refused_keys = False
        self._urls = urls
        self._secrets = secrets
        self._targets: dict[str, float] = {}  # when each was named last
        self._lives: dict[str, Life] = {}  # the last one of each target
        self._counts: dict[Life, dict[str, float]] = {}
        self._values: dict[tuple[str, str], set[str]] = defaultdict(set)  # by family and label
        self._series: set[str] = set()
        self._families = {n: each for found in declared().values() for n, each in found.items()}
        self._http = httpx.AsyncClient(
            timeout=SCRAPE_S, trust_env=False, headers={"authorization": f"Bearer {key}"}
        )

    async def run(self) -> None:
        """Scrape until it is cancelled."""
        while True:
            begin = time.monotonic()
            await self.scrape()
            await asyncio.sleep(max(0.0, begin + PERIOD_S - time.monotonic()))

    async def scrape(self) -> dict[str, dict[str, float]]:
        """The series of each process that answers."""
        await asyncio.gather(*map(self._discover, self._urls))
        known = [each for each, at in self._targets.items() if time.monotonic() - at < LATE_S]
        texts = await asyncio.gather(*(self._get(f"http://{each}/metrics") for each in known))
        return {
            target: self._take(target, answer.text)
            for target, answer in zip(known, texts, strict=True)
            if answer is not None
        }

    async def close(self) -> None:
        await self._http.aclose()

    async def _discover(self, url: str) -> None:
        answer = await self._get(f"{url}/v1/router/metrics-targets")
        for group in () if answer is None else answer.json():
            for target in group["targets"]:
                self._targets[target] = time.monotonic()

    async def _get(self, url: str) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            answer = await self._http.get(url)
            if answer.status_code == 200:
                return answer
            if answer.status_code < 500:
                self._fail(f"{url}: {answer.status_code}")
        return None

    def _take(self, target: str, text: str) -> dict[str, float]:
        """Take in an exposition; the values of its series."""
        self.num_scrapes += 1
        if any(secret in text for secret in self._secrets):
            self._fail(f"{target}: a secret is in its metrics")
        values = {series: float(value) for series, value in _samples(text)}
        # Without a descriptor left a process can't read of itself.
        starts = (value for series, value in values.items() if series.startswith(_START))
        if (start := next(starts, None)) is not None:
            self._lives[target] = Life(target, start)
        if (life := self._lives.get(target)) is None:
            return values
        before, counts = self._counts.get(life, {}), dict[str, float]()
        for series, value in values.items():
            name, family = self._family(series)
            if family.kind != "gauge":
                counts[series] = value
            if series not in self._series:
                self._add(series, name, family)
            if name == "mallee_keys_refused" and value:
                self.has_seen_refused_keys = True
        for series, count in before.items():
            is_there = series in counts or not series.startswith("process_")
            if is_there and counts.get(series, -1.0) < count:
                self._fail(f"{life}: {series} went from {count} to {counts.get(series)}")
        self._counts[life] = counts
        self.most_series = max(self.most_series, len(values))
        return values

    def _family(self, series: str) -> tuple[str, Family]:
        name = series.partition("{")[0]
        for known in (name, *(name.removesuffix(each) for each in ("_bucket", "_count", "_sum"))):
            if (found := self._families.get(known)) is not None:
                return name, found
        raise AssertionError(f"{name} is not declared")

    def _add(self, series: str, name: str, family: Family) -> None:
        self._series.add(series)
        self.num_series += 1
        found = _SERIES.fullmatch(series)
        assert found is not None, series
        bounds = {label.name: label.most or len(label.values) for label in family.labels}
        for label, value in _LABEL.findall(found["labels"] or ""):
            seen = self._values[family.name, label]
            seen.add(value)
            most = 2 if label == "gateway" else bounds.get(label, len(family.buckets) + 1)
            if len(seen) > most and label not in _OWN:
                self._fail(f"{name}: {label} has {len(seen)} values, of at most {most}: {value}")

    def _fail(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)


def busy(found: dict[str, dict[str, float]]) -> list[str]:
    """The gauges of a service at rest that are not 0."""
    return [
        f"{target}: {series} {value:g}"
        for target, values in found.items()
        for series, value in values.items()
        if value and series.partition("{")[0] in AT_REST
    ]


def _samples(text: str) -> Iterator[tuple[str, str]]:
    """Series, as they are written, and their values."""
    for line in text.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            yield series, value
