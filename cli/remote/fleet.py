"""The fleet at one time: workers, queues, cache and counters of a running service, and their table."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mallee.cli.output import grid
from mallee.client import Mallee
from mallee.protocol.api.operator import Worker, WorkerUse

_LABELS: Final = r'(?:[^"}]|"(?:[^"\\]|\\.)*")*'  # a path's template has braces in its quotes
_SAMPLE: Final = re.compile(rf"^(mallee_\w+?)(?:\{{({_LABELS})\}})? (\S+)$", re.MULTILINE)
_GATEWAY: Final = re.compile(r'[{,]gateway="((?:[^"\\]|\\.)*)"')
_ANSWERS: Final = "mallee_http_answers_total"
_GENERATES: Final = re.compile(
    r'endpoint="/v1/(chat/completions|completions|capsules/\{[^}"]*\}/(fork|restore))"'
)
_RATES: Final = {
    "output tokens/s": "mallee_output_tokens_total",
    "prompt tokens/s": "mallee_prompt_tokens_total",
    "answers/s": _ANSWERS,
}
_SAME: Final = {"mallee_router_requests_total": _ANSWERS}  # of a router before others' engines
_GAUGES: Final = {"waiting": "mallee_requests_waiting", "capsules": "mallee_capsules"}
_BAR: Final = 10
_LOOKS: Final = {
    **{"ready": "green", "draining": "yellow", "changing": "yellow"},
    **{"exact": "green", "predicted": "yellow"},
}


class Metrics:
    """A gateway's text for Prometheus, by family.

    Of the answers it has those alone that generate text: looks at the service would count as well.
    """

    __slots__ = ("_totals", "gateway")

    def __init__(self, text: str) -> None:
        self._totals: dict[str, float] = {}
        for name, labels, value in _SAMPLE.findall(text):
            if name != _ANSWERS or _GENERATES.search(labels):
                family = _SAME.get(name, name)
                self._totals[family] = self._totals.get(family, 0.0) + float(value)
        found = _GATEWAY.search(text)
        self.gateway = "" if found is None else found[1]

    def total(self, family: str) -> float:
        """Summed over all labels; 0 of one that the service doesn't have."""
        return self._totals.get(family, 0.0)


class Sample(NamedTuple):
    """The fleet at one time: a service's account of itself, its workers by name, and its metrics."""

    at: float
    health: Mapping[str, Any]
    workers: Sequence[Worker]
    metrics: Metrics

    @classmethod
    def of(
        cls, at: float, health: Mapping[str, Any], workers: Sequence[Worker], metrics: str
    ) -> "Sample":
        return cls(at, health, sorted(workers, key=lambda each: each.worker), Metrics(metrics))

    def gauges(self) -> dict[str, float]:
        return {name: self.metrics.total(metric) for name, metric in _GAUGES.items()}

    def rates(self, before: "Sample | None") -> dict[str, float]:
        """Of the time since `before`; empty without one, or if another gateway answered it."""
        return {
            name: rate
            for name, metric in _RATES.items()
            if (rate := self.rate(metric, before)) is not None
        }

    def rate(self, metric: str, before: "Sample | None") -> float | None:
        """A counter's growth in a second. One that fell began anew."""
        return self.growth(lambda sample: sample.metrics.total(metric), before)

    def use(self, count: Callable[[WorkerUse], int]) -> float:
        """Summed over the workers that say."""
        return sum(count(each.use) for each in self.workers if each.use is not None)

    def growth(self, total: Callable[["Sample"], float], before: "Sample | None") -> float | None:
        """As `rate`."""
        if before is None or self.at <= before.at:
            return None
        if before.metrics.gateway != self.metrics.gateway:
            return None
        return max(0.0, total(self) - total(before)) / (self.at - before.at)


def take(client: Mallee) -> Sample:
    """Raises ConnectionFailed, Forbidden without an operator's key."""
    health, workers = client.health(), client.workers()
    return Sample.of(time.monotonic(), health, workers, client.metrics())


# Drawing


def draw(sample: Sample, rates: Mapping[str, float]) -> Group:
    figures = {**sample.gauges(), **rates}
    return Group(head(sample.health), figures_line(figures), _table(sample.workers))


def head(health: Mapping[str, Any]) -> Text:
    """The service's state in a line."""
    status = str(health.get("status", "?"))
    told = [f"{name} {health[name]}" for name in ("gateway", "broker", "store") if name in health]
    told += [f"{num} {state}" for state, num in health.get("backends", {}).items()]
    if "workers" in health:  # which others than operators aren't told
        told.append(f"{len(health['workers'])} workers")
    return Text.assemble(
        ("mallee ", "bold"), (status, "green" if status == "ok" else "red"), f"  {', '.join(told)}"
    )


def figures_line(figures: Mapping[str, float]) -> Text:
    return Text("  ".join(f"{name} {value:,.0f}" for name, value in figures.items()))


def used(worker: Worker) -> float:
    """The share of its KV that branches and capsules have."""
    return worker.active_blocks / max(1, worker.num_blocks)


COLUMNS: Final = (
    *("worker", "state", "KV in use", "rows", "queue", "prefill", "cached", "lease", "weights"),
    *("device", "cache"),
)
NUMBERS: Final = frozenset(COLUMNS[3:8])
"""Columns that stand to the right."""


def cells(worker: Worker) -> tuple[Text, ...]:
    """The worker's, of `COLUMNS`."""
    return (
        Text(worker.worker),
        Text(worker.state, style=_LOOKS.get(worker.state, "red")),
        bar(used(worker)),
        *(Text(str(each)) for each in (worker.rows, worker.waiting, worker.prefill_tokens)),
        Text(str(worker.indexed_blocks)),
        Text(f"{worker.lease_age_s:.1f} s"),
        Text(worker.weight_version),
        Text(worker.device),
        _known(worker),
    )


def _known(worker: Worker) -> Text:
    """A router's knowledge of a backend's cache, and the share of prompts that the backend found there."""
    if not worker.cache:
        return Text()
    use = worker.use
    total = 0 if use is None else use.cached_tokens + use.prefill_tokens
    found = "" if use is None or not total else f" {use.cached_tokens / total:.0%} found"
    reason = f": {worker.cache_reason}" if worker.cache_reason else ""
    return Text(f"{worker.cache.upper()}{found}{reason}", style=_LOOKS.get(worker.cache, "red"))


def _table(workers: Sequence[Worker]) -> Table:
    rows = [cells(each) for each in workers]
    # The last columns, from the device on, are left out where they are empty.
    is_shown = [at < 9 or any(row[at].plain for row in rows) for at in range(len(COLUMNS))]
    names = tuple(compress(COLUMNS, is_shown))
    return grid(names, (tuple(compress(row, is_shown)) for row in rows), right=NUMBERS, whole=names)


def bar(share: float) -> Text:
    full = min(_BAR, round(_BAR * share))
    look = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * full, look), ("░" * (_BAR - full), "dim"), f" {share:4.0%}")
