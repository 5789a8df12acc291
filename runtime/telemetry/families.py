"""Prometheus families made from the catalog: those that count themselves, and those of one scrape."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, TypeAlias, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mallee import __version__
from mallee.runtime.telemetry.catalog import Family, family
from mallee.runtime.telemetry.counting import Counted, Counter, Gauge, Histogram, Summary

Shown: TypeAlias = CounterMetricFamily | GaugeMetricFamily
M = TypeVar("M", bound=Counted)


def shown(name: str, value: float | None = None) -> Shown:
    """The counter or gauge `name` as it is at this scrape, with a value if it has no labels."""
    found = family(name)
    kinds: dict[str, type[Shown]] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    kind = kinds[found.kind]
    if value is not None:
        return kind(name, found.text, value)
    return kind(name, found.text, labels=found.label_names)


def by_label(name: str, counts: Mapping[Any, float]) -> Shown:
    """The family `name` with all values of its labels; `counts` lack what is 0.

    Their keys are the values of its one label, or tuples of those of several.
    """
    made = shown(name)
    for values in product(*(label.values for label in family(name).labels)):
        made.add_metric(values, counts.get(values if len(values) > 1 else values[0], 0))
    return made


class Families:
    """Makes families that count themselves, in one registry.

    Those with one label whose values are known show all of them from the start: a rate needs a 0 before
    its 1. Of several labels most combinations never come.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str) -> Counter:
        return self._make(Counter, name)

    def gauge(self, name: str) -> Gauge:
        return self._make(Gauge, name)

    def summary(self, name: str) -> Summary:
        return self._make(Summary, name)

    def histogram(self, name: str) -> Histogram:
        found = family(name)
        made = Histogram(
            name,
            found.text,
            found.label_names,
            buckets=found.buckets,
            registry=self._registry,
        )
        return _with_values(made, found)

    def _make(self, kind: type[M], name: str) -> M:
        found = family(name)
        made = kind(name, found.text, found.label_names, registry=self._registry)
        return _with_values(made, found)


def _with_values(made: M, found: Family) -> M:
    """`made`, with all values of its one label, if they are known."""
    if len(found.labels) == 1:
        for value in found.labels[0].values:
            made.labels(value)
    return made


class ProcessCollector(Collector):
    """The process's memory, time and files, and the version that it runs."""

    def __init__(self) -> None:
        self._process = prometheus_client.ProcessCollector(registry=None)

    def collect(self) -> Iterator[Shown]:
        info = shown("mallee_build_info")
        info.add_metric([__version__], 1)
        yield info
        for each in self._process.collect():
            (sample,) = each.samples
            yield shown(sample.name, sample.value)


class Labelled(Collector):
    """The families of a registry with labels more, and without the times at which counters were made."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for each in self._registry.collect():
            each.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in each.samples
                if not sample.name.endswith("_created")
            ]
            yield each


class FewNames:
    """The first `most` names as they are, one name for all others."""

    def __init__(self, most: int, others: str) -> None:
        self._most = most
        self._others = others
        self._names: set[str] = set()

    def shown(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._most:
            return self._others
        self._names.add(name)
        return name
