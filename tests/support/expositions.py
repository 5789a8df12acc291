"""Prometheus text against the catalog of metrics."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from mallee.runtime.telemetry.catalog import Process, exposed_by

_OWN = {"le", "quantile"}  # labels of histograms' and summaries' samples


def check_against_catalog(text: str, process: Process) -> set[str]:
    """The names of the families in `text`, of which the catalog says that `process` exposes them.

    Gateways add a label of their own.
    """
    known = {each.name: each for each in exposed_by(process)}
    more = {"gateway"} if process == "gateway" else set()
    found = {_full_name(each): each for each in text_string_to_metric_families(text)}
    for name, shown in found.items():
        assert name in known, f"{name} is not in the catalog"
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
    return set(found)


def _full_name(shown: Metric) -> str:
    return f"{shown.name}_total" if shown.type == "counter" else shown.name
