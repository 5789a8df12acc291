"""Metric families: declared where they are counted, in a registry that remembers what docs and tests ask.

A module that counts declares name, text and labels in an area of its process's `Families`. Values of labels
are few: reasons and stages of ours, workers and tenants up to a bound; never a client's text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client import generate_latest as plain
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.registry import Collector

from mallee import __version__
from mallee.runtime.telemetry.counting import Counted, Counter, Gauge, Histogram, Summary

Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]
M = TypeVar("M", bound=Counted[Any])

MOST_WORKERS: Final = 256
"""Workers with time series of their own. A fleet of a thousand would have a hundred thousand."""
OTHERS: Final = "others"
"""The label of all beyond a bound."""

# From a fork's first token on a loaded CPU (1 ms) to a cold, long prompt.
FIRST_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
BETWEEN_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
WHOLE_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text"
_EOF: Final = b"# EOF\n"


class Label(NamedTuple):
    """A label: all its values, or how many different ones there are at most."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 0


class Family(NamedTuple):
    """A declared family. Its kind follows from its name where it is read at each scrape."""

    name: str  # in full: of a counter with `_total`, of a histogram without `_bucket`
    text: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram
    area: str = ""
    is_summary: bool = False

    @property
    def kind(self) -> Kind:
        if self.is_summary:
            return "summary"
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    def shown(self) -> CounterMetricFamily | GaugeMetricFamily:
        """The counter or gauge at this scrape, without values yet."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return kind(self.name, self.text, labels=self.label_names)


class Reading(NamedTuple):
    """A counter or gauge that is read from a state at each scrape: the path of an attribute, or a function.

    With labels that gives a mapping from values of its one label, or tuples of several; it lacks what is 0.
    Of several states the sum is shown; with `per`, by the sum of those.
    """

    name: str
    text: str
    read: str | Callable[[Any], Any]
    labels: tuple[Label, ...] = ()
    per: str = ""

    def samples(self, groups: "Groups") -> Iterator[tuple[tuple[str, ...], float]]:
        """Values of labels, of the groups and its own, and the number for them."""
        read = attrgetter(self.read) if isinstance(self.read, str) else self.read
        per = attrgetter(self.per) if self.per else None
        own = [*product(*(label.values for label in self.labels))]
        for values, states in groups:
            if self.labels:
                counts = [read(state) for state in states]
                for key in own:
                    found = (each.get(key if len(key) > 1 else key[0], 0) for each in counts)
                    yield (*values, *key), sum(found)
                continue
            total, num = sum(map(read, states)), sum(map(per, states)) if per else 1
            yield values, total / num if num else 0.0


Groups: TypeAlias = Sequence[tuple[tuple[str, ...], Sequence[Any]]]
"""States, and the values of labels that those of a group are shown under together."""


class Families(CollectorRegistry):
    """The registry of one process, or of one gateway, with its declarations."""

    def __init__(self) -> None:
        super().__init__()
        self.declared: dict[str, Family] = {}
        self.area("Processes").collect_by(_collect_process, _PROCESS)

    def area(self, title: str) -> "Area":
        """The declarations of one subject; docs list them under its title."""
        return Area(self, title)


class Area:
    """Declares families of one subject, and makes what counts them.

    Those with one label whose values are known show all of them from the start: a rate needs a 0 before
    its 1. Of several labels most combinations never come.
    """

    def __init__(self, families: Families, title: str) -> None:
        self._families = families
        self._title = title

    def declare(self, family: Family) -> Family:
        """Note a family that a collector of the caller's shows. Each name once."""
        assert family.name not in self._families.declared, f"{family.name} is declared twice"
        family = family._replace(area=self._title)
        self._families.declared[family.name] = family
        return family

    def counter(self, name: str, text: str, *labels: Label) -> Counter:
        return self._make(Counter, Family(name, text, labels))

    def gauge(self, name: str, text: str, *labels: Label) -> Gauge:
        return self._make(Gauge, Family(name, text, labels))

    def summary(self, name: str, text: str, *labels: Label) -> Summary:
        return self._make(Summary, Family(name, text, labels, is_summary=True))

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: Label
    ) -> Histogram:
        family = Family(name, text, labels, buckets)
        return self._make(partial(Histogram, buckets=buckets), family)

    def _make(self, kind: Callable[..., M], family: Family) -> M:
        self.declare(family)
        made = kind(family.name, family.text, family.label_names, registry=self._families)
        if len(family.labels) == 1:
            for value in family.labels[0].values:
                made.labels(value)
        return made

    def readings(self, source: Callable[[], Any], readings: Sequence[Reading]) -> None:
        """Show what `readings` find in the state that `source` gives at each scrape."""
        self.grouped(lambda: [((), (source(),))], readings, ())

    def grouped(
        self, source: Callable[[], Groups], readings: Sequence[Reading], labels: tuple[Label, ...]
    ) -> None:
        """Show what `readings` find in each group; nothing without any."""
        families = [Family(each.name, each.text, (*labels, *each.labels)) for each in readings]

        def collect() -> Iterator[Metric]:
            groups = source()
            for family, reading in zip(families, readings, strict=True) if groups else ():
                shown = family.shown()
                for values, number in reading.samples(groups):
                    shown.add_metric(values, number)
                yield shown

        self.collect_by(collect, families)

    def collect_by(
        self, collect: Callable[[], Iterator[Metric]], families: Sequence[Family]
    ) -> None:
        """Show what `collect` yields at each scrape: of `families` alone."""
        for family in families:
            self.declare(family)
        self._families.register(_Collector(collect))


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


_PROCESS: Final = (
    Family("mallee_build_info", "1; the version is in the label.", (Label("version", most=1),)),
    Family("process_resident_memory_bytes", "Memory of the process, shared pages too."),
    Family("process_cpu_seconds_total", "CPU time of the process."),
    Family("process_open_fds", "Open files and sockets."),
    Family("process_max_fds", "The most that it may open."),
    Family("process_start_time_seconds", "Start of the process, since the epoch."),
    Family("process_virtual_memory_bytes", "Address space of the process."),
)
_PROCESS_COLLECTOR: Final = prometheus_client.ProcessCollector(registry=None)


def _collect_process() -> Iterator[Metric]:
    """The process's memory, time and files, and the version that it runs."""
    info, *others = _PROCESS
    version = info.shown()
    version.add_metric([__version__], 1)
    yield version
    values = {each.samples[0].name: each.samples[0].value for each in _PROCESS_COLLECTOR.collect()}
    for family in (each for each in others if each.name in values):
        shown = family.shown()
        shown.add_metric((), values[family.name])
        yield shown


class FewNames:
    """The first `most` names as they are, one name for all others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._names: set[str] = set()

    def shown(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._most:
            return OTHERS
        self._names.add(name)
        return name


def content_type(accept: str) -> str:
    """The type of `exposition`."""
    return f"{OPENMETRICS}; version=1.0.0; charset=utf-8" if OPENMETRICS in accept else CONTENT_TYPE


class _One(NamedTuple):
    """A registry of one family."""

    family: Metric

    def collect(self) -> tuple[Metric]:
        return (self.family,)


def exposition(
    registry: CollectorRegistry, accept: str, labels: Mapping[str, str] | None = None
) -> Iterator[bytes]:
    """Prometheus's text, family by family, or where the header `accept` names it OpenMetrics, which alone
    has exemplars; each sample with `labels` more.
    """
    is_open = OPENMETRICS in accept
    # Without `escaping` OpenMetrics makes `vllm_` of `vllm:`.
    write: Any = partial(openmetrics, escaping="allow-utf-8") if is_open else plain
    for family in registry.collect():
        if labels:
            family.samples = [
                each._replace(labels={**each.labels, **labels}) for each in family.samples
            ]
        yield write(_One(family)).removesuffix(_EOF)
    if is_open:
        yield _EOF
