"""`mallee metrics`: the page of all metric families, as the modules that count declare them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mallee.cli.options import JsonOption
from mallee.cli.output import answer

if TYPE_CHECKING:
    from mallee.runtime.telemetry.families import Family, Label


def metrics(as_json: JsonOption = False) -> None:
    """List every metric family with its labels, as docs/metrics.md does.

    Example: mallee metrics --json
    """
    answer({"families": families()}, document().rstrip(), as_json=as_json)


def declared() -> "Mapping[str, Mapping[str, Family]]":
    """The families that each kind of process declares, by its kind and by name; first those of `every`."""
    from mallee.actors.front.picker.counts import PickerCounts
    from mallee.actors.front.proxy.counts import ProxyCounts
    from mallee.actors.hosting.meters import WorkerMetrics
    from mallee.gateway.metrics import GatewayMetrics
    from mallee.runtime.telemetry.families import Families

    gateway = GatewayMetrics()
    gateway.show_router(_nothing, _nothing)
    gateway.show_store(None)
    gateway.show_access(None)
    router = ProxyCounts()
    router.show_access(None)
    every = Families().declared
    of = {
        "gateway": gateway.registry,
        "worker": WorkerMetrics(_nothing).registry,
        "picker": PickerCounts().registry,
        "router": router.registry,
    }
    own = {
        process: {name: found for name, found in families.declared.items() if name not in every}
        for process, families in of.items()
    }
    return {"every": every, **own}


def _nothing() -> Any:
    raise AssertionError("nothing is read of a registry that is there for its declarations")


def families() -> list[dict[str, Any]]:
    """All of them, JSON-able; of a label its values, or the most different ones that it has."""
    return [
        {
            "name": family.name,
            "kind": family.kind,
            "text": family.text,
            "labels": [label._asdict() for label in family.labels],
            "buckets": family.buckets,
            "process": process,
            "area": family.area,
        }
        for process, found in declared().items()
        for family in found.values()
    ]


_HEAD = """\
# Metrics

Printed by `mallee metrics`; don't edit.

Gateways show theirs at the API's `/metrics`. With `telemetry.metrics_port` each process has `/metrics` at a
port of its own, and those of workers are nowhere else: [operate.md](operate.md#metrics) says how to scrape
them. Every sample of a gateway has the label `gateway` beside those below. Histograms end in `_bucket`,
`_count` and `_sum`, summaries in the last two.

Values of labels are those given, or at most as many as the number in brackets; workers of one process
beyond 256 are summed as `others`, and so are tenants beyond 100. Of families with one label of known values
all are there from the start, as 0. Families of what a worker does not have (tiers below the device, loans)
are not there."""


def document() -> str:
    """The page of all metrics, in Markdown."""
    areas: dict[str, dict[str, Family]] = {}
    for found in declared().values():
        for family in found.values():  # gateways and routers have those of keys
            areas.setdefault(family.area, {})[family.name] = family
    tables = (f"## {name}\n\n" + "\n".join(_table(of.values())) for name, of in areas.items())
    return "\n\n".join((_HEAD, *tables)) + "\n"


def _table(families: "Iterable[Family]") -> Iterator[str]:
    yield "| family | kind | labels | |"
    yield "|---|---|---|---|"
    for family in families:
        labels = "<br>".join(map(_label, family.labels))
        yield f"| `{family.name}` | {family.kind} | {labels} | {family.text} |"


def _label(label: "Label") -> str:
    if not label.values:
        return f"`{label.name}` ({label.most})"
    return f"`{label.name}`: " + ", ".join(
        f"`{each}`" if each else "empty" for each in label.values
    )
