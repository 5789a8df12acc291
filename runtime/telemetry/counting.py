"""Families that count themselves, in a tenth of the time of prometheus_client's: without locks and checks.

Each is counted by one thread; a scrape may read it from another.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counted(Collector):
    """One family: its own count, or with labels one for each of their values that was asked for."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._children: dict[tuple[str, ...], Self] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, *values: str) -> Self:
        """The count of these values."""
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._labels), f"{self._name} has labels {self._labels}"
            child = self._children[values] = self._child()
        return child

    def _child(self) -> Self:
        return type(self)(self._name, self._text)

    def _counts(self) -> list[tuple[tuple[str, ...], Self]]:
        return list(self._children.items()) if self._labels else [((), self)]


class Counter(Counted):
    value: float = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._counts():
            family.add_metric(values, child.value)
        yield family


class Gauge(Counted):
    value: float = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._counts():
            family.add_metric(values, child.value)
        yield family


class Summary(Counted):
    """The number and the sum of what was observed."""

    num = 0
    sum: float = 0.0

    def observe(self, amount: float) -> None:
        self.num += 1
        self.sum += amount

    def collect(self) -> Iterator[SummaryMetricFamily]:
        family = SummaryMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in self._counts():
            family.add_metric(values, child.num, child.sum)
        yield family


class Histogram(Counted):
    """Counts by upper bounds, `buckets`."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._bounds = tuple(buckets)
        self._nums = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}  # the last one, by bucket
        super().__init__(name, text, labels, registry=registry)

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        """`exemplar`: labels of one request, as its trace."""
        at = bisect_left(self._bounds, amount)
        self._nums[at] += 1
        self._sum += amount
        if exemplar:
            self._exemplars[at] = Exemplar(dict(exemplar), amount, time.time())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for values, child in self._counts():
            nums = zip(bounds, accumulate(child._nums), strict=True)
            found = child._exemplars
            buckets = [(*each, found[at]) if at in found else each for at, each in enumerate(nums)]
            family.add_metric(values, buckets, sum_value=child._sum)
        yield family

    def _child(self) -> Self:
        return type(self)(self._name, self._text, buckets=self._bounds)
