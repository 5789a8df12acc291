"""PromQL held against what processes declare: names, labels, kinds, buckets."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mallee.cli.metrics import declared
from mallee.runtime.telemetry.families import Family

_SERIES: Final = re.compile(r"\b((?:(?:mallee|process)_|vllm:)\w+)(?:\{([^}]*)\})?")
_PARTS: Final = ("bucket", "sum", "count")  # of histograms and summaries
_FILTER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_BY: Final = re.compile(r"\bby \(([^)]*)\)")
_DECLARED: Final = declared()
_KNOWN: Final = {name: each for found in _DECLARED.values() for name, each in found.items()}


class Series(NamedTuple):
    """A family in a query, the part of it that is asked for, and what its labels are compared with."""

    family: Family
    part: str
    filters: tuple[tuple[str, str], ...]
    before: str  # the text up to it


def series_in(expression: str) -> Iterator[Series]:
    """All of them. Raises KeyError for a name that nothing declares."""
    for found in _SERIES.finditer(expression):
        name, part = found[1], ""
        if name not in _KNOWN and name.endswith(tuple(f"_{part}" for part in _PARTS)):
            name, _, part = name.rpartition("_")
        yield Series(
            _KNOWN[name], part, (*_FILTER.findall(found[2] or ""),), expression[: found.start()]
        )


def families_in(expression: str) -> dict[str, Family]:
    """The families in `expression` by their names."""
    return {each.family.name: each.family for each in series_in(expression)}


def labels_of(found: Family) -> set[str]:
    """Those declared, and those that the scraper and the exposition add."""
    added = {"gateway"} if found.name in _DECLARED["gateway"] else set()
    return {"job", "instance", "le", *found.label_names} | added


def faults(expression: str) -> Iterator[str]:
    """Reasons why a query would show nothing, or the wrong thing."""
    all_labels: set[str] = set()
    for each in series_in(expression):
        name, labels = each.family.name, labels_of(each.family)
        all_labels |= labels
        for label, value in each.filters:
            if label not in labels:
                yield f"{name} has no label {label}"
            if label == "le" and float(value) not in each.family.buckets:
                yield f"{name} has no bucket {value}"
        if each.part and each.family.kind not in ("histogram", "summary"):
            yield f"{name} is a {each.family.kind}: it has no _{each.part}"
        if each.before.endswith(("rate(", "increase(")) == (each.family.kind == "gauge"):
            yield f"{name} is a {each.family.kind}: rates are of counters, and gauges have none"
    for found in _BY.findall(expression):
        if unknown := set(re.split(r",\s*", found)) - all_labels:
            yield f"no series of it has a label {', '.join(sorted(unknown))}"
