"""PromQL held against the catalog of metrics: names, labels, kinds, buckets."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from mallee.runtime.telemetry.catalog import Family, family

_SERIES: Final = re.compile(r"\b((?:(?:mallee|process)_|vllm:)\w+)(?:\{([^}]*)\})?")
_PARTS: Final = ("bucket", "sum", "count")  # of histograms and summaries
_FILTER: Final = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_BY: Final = re.compile(r"\bby \(([^)]*)\)")
# Every gateway tells of every worker: of what they say the largest counts, once.
_ONCE: Final = re.compile(r"max by \(job, [^)]*\) \((?:rate\(|increase\()?$")


class Series(NamedTuple):
    """A family in a query, the part of it that is asked for, and what its labels are compared with."""

    family: Family
    part: str
    filters: tuple[tuple[str, str], ...]
    before: str  # the text up to it


def series_in(expression: str) -> Iterator[Series]:
    """All of them. Raises KeyError for a name that the catalog has not."""
    for found in _SERIES.finditer(expression):
        name, part = found[1], ""
        try:
            known = family(name)
        except KeyError:
            name, _, part = name.rpartition("_")
            if part not in _PARTS:
                raise
            known = family(name)
        yield Series(known, part, (*_FILTER.findall(found[2] or ""),), expression[: found.start()])


def families_in(expression: str) -> dict[str, Family]:
    """The families in `expression` by their names."""
    return {each.family.name: each.family for each in series_in(expression)}


def labels_of(found: Family) -> set[str]:
    """Those of the catalog, and those that the scraper and the exposition add."""
    return {"job", "instance", "le", *found.label_names} | (
        {"gateway"} if found.process == "gateway" else set()
    )


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
        if name.startswith("mallee_worker_") and not _ONCE.search(each.before):
            yield f"{name} counts once for each gateway that tells of it"
    for found in _BY.findall(expression):
        if unknown := set(re.split(r",\s*", found)) - all_labels:
            yield f"no series of it has a label {', '.join(sorted(unknown))}"
