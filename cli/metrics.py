"""`mallee metrics`: the page of all metric families."""

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from mallee.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from mallee.runtime.telemetry.catalog import Family, Label


def add_to(cli: typer.Typer) -> None:
    cli.command("metrics")(print_metrics)


def print_metrics(as_json: JsonOption = False) -> None:
    """List every metric family with its labels, as docs/metrics.md does.

    Example: mallee metrics --json
    """
    if as_json:
        print_json({"families": families()})
    else:
        sys.stdout.write(document())


def families() -> list[dict[str, Any]]:
    """All of them, JSON-able; of a label its values, or the most different ones that it has."""
    from mallee.runtime.telemetry.catalog import FAMILIES

    return [
        {**family._asdict(), "labels": [label._asdict() for label in family.labels]}
        for family in FAMILIES
    ]


_HEAD = """\
# Metrics

Printed by `mallee metrics`; don't edit.

Gateways show theirs at the API's `/metrics`, and with `telemetry.metrics_port` at a port of each process, as
worker processes do: [operate.md](operate.md#metrics) says how to scrape them. Every sample of a gateway has
the label `gateway` beside those below. Histograms end in `_bucket`, `_count` and `_sum`, summaries in the
last two.

Values of labels are those given, or at most as many as the number in brackets; workers beyond 256 are summed
as `others`, and so are tenants beyond 100. Of families with one label of known values all are there from the
start, as 0."""


def document() -> str:
    """The page of all metrics, in Markdown."""
    from mallee.runtime.telemetry.catalog import FAMILIES

    parts = [_HEAD]
    for area, families in groupby(FAMILIES, key=lambda family: family.area):
        parts += [f"## {area}", "\n".join(_table(list(families)))]
    return "\n\n".join(parts) + "\n"


def _table(families: "list[Family]") -> Iterator[str]:
    yield "| family | kind, unit | labels | |"
    yield "|---|---|---|---|"
    for family in families:
        kind = f"{family.kind}, {family.unit}" if family.unit else family.kind
        labels = "<br>".join(map(_label, family.labels))
        when = f" Only if {family.when}." if family.when else ""
        yield f"| `{family.name}` | {kind} | {labels} | {family.text}{when} |"


def _label(label: "Label") -> str:
    if not label.values:
        return f"`{label.name}` ({label.most})"
    return f"`{label.name}`: " + ", ".join(
        f"`{each}`" if each else "empty" for each in label.values
    )
