"""`mallee top`: the fleet as it is now, again and again."""

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mallee.cli.options import JsonOption
from mallee.cli.remote.service import DEFAULT_URL, UrlOption, ask, ask_text
from mallee.cli.remote.watching import IntervalOption, watch

_LABELS: Final = r'(?:[^"}]|"(?:[^"\\]|\\.)*")*'  # a path's template has braces in its quotes
_SAMPLE: Final = re.compile(rf"^(mallee_\w+?)(?:\{{({_LABELS})\}})? (\S+)$", re.MULTILINE)
_ANSWERS: Final = "mallee_http_answers_total"
_GENERATES: Final = re.compile(
    r'endpoint="/v1/(chat/completions|completions|capsules/\{[^}"]*\}/(fork|restore))"'
)
_RATES: Final = {
    "output tokens/s": "mallee_output_tokens_total",
    "prompt tokens/s": "mallee_prompt_tokens_total",
    "answers/s": _ANSWERS,
}
_GAUGES: Final = {"waiting": "mallee_requests_waiting", "capsules": "mallee_capsules"}
_BAR: Final = 10
_LOOKS: Final = {"ready": "green", "draining": "yellow", "changing": "yellow"}


class Sample(NamedTuple):
    """The fleet at one time. `counts`: metrics, summed over their labels."""

    at: float
    health: Mapping[str, Any]
    workers: list[dict[str, Any]]
    counts: Mapping[str, float]

    def gauges(self) -> dict[str, float]:
        return {name: self.counts.get(metric, 0.0) for name, metric in _GAUGES.items()}

    def rates(self, before: "Sample | None") -> dict[str, float]:
        """Of the time since `before`; empty without one. A counter that fell began anew."""
        if before is None or self.at <= before.at:
            return {}
        seconds = self.at - before.at
        grown = {
            name: self.counts.get(metric, 0.0) - before.counts.get(metric, 0.0)
            for name, metric in _RATES.items()
        }
        return {name: max(0.0, more) / seconds for name, more in grown.items()}


def add_to(cli: typer.Typer) -> None:
    cli.command()(top)


def top(
    url: UrlOption = DEFAULT_URL,
    interval_s: IntervalOption = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show workers, queues, cache and speed of a running service until Ctrl-C.

    `prefill`: prompt tokens that wait to be computed. `cached`: blocks of KV that others can share.

    Example: mallee top --url http://gateway:8000 --interval-s 5
    """
    if as_json:
        sample = take(url)
        gauges, body = sample.gauges(), {"health": sample.health, "workers": sample.workers}
        sys.stdout.write(json.dumps({**body, **gauges}) + "\n")
    elif once:
        Console().print(draw(take(url), {}))
    else:
        watch(
            lambda: take(url),
            lambda sample, before: draw(sample, sample.rates(before)),
            interval_s,
            Console(),
        )


def take(url: str) -> Sample:
    """Raises ConfigError: no service, or no operator's key."""
    health = ask("GET", url, "/health")
    workers = ask("GET", url, "/v1/router/workers")["data"]
    return Sample(time.monotonic(), health, workers, read_counts(ask_text(url, "/metrics")))


def read_counts(text: str) -> dict[str, float]:
    """Metrics summed over their labels; of the answers those alone that generate, or looks would count."""
    counts: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name != _ANSWERS or _GENERATES.search(labels):
            counts[name] = counts.get(name, 0.0) + float(value)
    return counts


def draw(sample: Sample, rates: Mapping[str, float]) -> Group:
    health = sample.health
    look = "green" if health["status"] == "ok" else "red"
    head = Text.assemble(
        ("mallee ", "bold"),
        (str(health["status"]), look),
        f"  gateway {health.get('gateway', '?')}, broker {health.get('broker', '?')},"
        f" {len(sample.workers)} workers",
    )
    told = {**sample.gauges(), **rates}
    figures = Text("  ".join(f"{name} {value:,.0f}" for name, value in told.items()))
    return Group(head, figures, _table(sample.workers))


def _table(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state", "KV in use"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "queue", "prefill", "cached", "lease"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    if any(each["device"] for each in workers):
        table.add_column("device", no_wrap=True)
    for each in sorted(workers, key=lambda each: str(each["worker"])):
        used = each["active_blocks"] / max(1, each["num_blocks"])
        state = str(each["state"])
        table.add_row(
            escape(each["worker"]),
            Text(state, style=_LOOKS.get(state, "red")),
            _bar(used),
            *(str(each[name]) for name in ("rows", "waiting", "prefill_tokens", "indexed_blocks")),
            f"{each['lease_age_s']:.1f} s",
            *(escape(each["weight_version"]), escape(each["device"]))[: len(table.columns) - 8],
        )
    return table


def _bar(share: float) -> Text:
    full = min(_BAR, round(_BAR * share))
    look = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return Text.assemble(("█" * full, look), ("░" * (_BAR - full), "dim"), f" {share:4.0%}")
