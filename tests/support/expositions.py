"""Prometheus text against what a process's modules declare."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from mallee.cli.metrics import declared

_OWN = {"le", "quantile"}  # labels of histograms' and summaries' samples


def check_exposition(text: str, process: str) -> set[str]:
    """The families that `process` declares and `text` lacks; it has no other, and each as declared.

    Gateways add a label of their own.
    """
    known = {**declared()["every"], **declared()[process]}
    more = {"gateway"} if process == "gateway" else set()
    found = {_full_name(each): each for each in text_string_to_metric_families(text)}
    for name, shown in found.items():
        assert name in known, f"{name} is not declared"
        expected = known[name]
        assert shown.type == expected.kind, name
        assert shown.documentation == expected.text, name
        values: dict[str, set[str]] = {label.name: set() for label in expected.labels}
        for sample in shown.samples:
            own = {n: v for n, v in sample.labels.items() if n not in _OWN}
            assert own.keys() == values.keys() | more, f"labels of {sample}"
            for label in values:
                values[label].add(own[label])
        for label in expected.labels:
            seen = values[label.name]
            if label.values:
                assert seen <= set(label.values), f"{name}: {label.name}"
            else:
                assert len(seen) <= label.most, f"{name}: {label.name}"
    return known.keys() - found.keys()


def _full_name(shown: Metric) -> str:
    return f"{shown.name}_total" if shown.type == "counter" else shown.name
