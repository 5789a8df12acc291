"""The chart's dashboards: read by Grafana's own schema, of metrics that exist, and legible."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from bench.boards.chart import DASHBOARDS, alerts, dashboard, targets
from support.promql import families_in, faults

# Grafana reads these too; its schema of dashboards leaves them out.
NOT_IN_SCHEMA = {"definition", "step", "titleFormat", "textFormat"}
WIDTH = 24


@pytest.fixture(params=DASHBOARDS)
def board(request: pytest.FixtureRequest) -> Any:
    return dashboard(request.param)


def lost(told: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths at which `read` differs from `told`."""
    if isinstance(told, dict):
        for key, value in told.items():
            if key not in read:
                yield f"{path}.{key}"
            else:
                yield from lost(value, read[key], f"{path}.{key}")
    elif isinstance(told, list):
        assert len(told) == len(read), path
        for i, each in enumerate(zip(told, read, strict=True)):
            yield from lost(*each, f"{path}[{i}]")
    elif told != read:
        yield path


def test_the_chart_holds_these_dashboards_alone() -> None:
    folder = DASHBOARDS["fleet"].parent
    assert {path.name for path in folder.iterdir()} == {p.name for p in DASHBOARDS.values()}
    uids = {name: dashboard(name)["uid"] for name in DASHBOARDS}
    assert uids == {name: f"mallee-{name}" for name in DASHBOARDS}, "alerts link to them by these"


def test_grafana_s_own_models_read_every_field(board: Any) -> None:
    """The models are generated from Grafana's schemas: an unknown or misspelt field would be gone."""
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert {path.rpartition(".")[2] for path in lost(board, read)} <= NOT_IN_SCHEMA


def test_panels_lie_beside_each_other_and_not_on_each_other(board: Any) -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert x + w <= WIDTH, panel["title"]
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_tells_its_unit_and_its_metrics(board: Any) -> None:
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            for name in families_in(target["expr"]):
                assert f"`{name}`: " in panel["description"], panel["title"]


def test_queries_name_what_processes_declare(board: Any) -> None:
    """Families, their labels, kinds and buckets; the variables of the dashboard, too."""
    expressions = [target["expr"] for _, target in targets(board)]
    assert len(expressions) > 5
    assert all(families_in(expression) for expression in expressions)
    assert [fault for each in expressions for fault in faults(each)] == []
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            families_in(variable["definition"])


def test_alerts_name_what_processes_declare() -> None:
    assert [fault for rule in alerts().values() for fault in faults(rule["expr"])] == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(mallee_workers_alive[5m]))", "is a gauge: rates"),
        ("sum(mallee_output_tokens_total)", "is a counter: rates"),
        ("sum by (colour) (rate(mallee_output_tokens_total[5m]))", "no series .* label colour"),
        ('sum(rate(mallee_output_tokens_total{mood="good"}[5m]))', "has no label mood"),
        (
            'sum(rate(mallee_time_to_first_token_seconds_bucket{le="3"}[5m]))',
            "has no bucket 3",
        ),
        ("sum(rate(mallee_output_tokens_total_bucket[5m]))", "it has no _bucket"),
        ('sum(mallee_worker_live_blocks{gateway="g0"})', "has no label gateway"),
    ],
)
def test_a_query_that_would_show_nothing_is_found(expression: str, fault: str) -> None:
    (found,) = faults(expression)
    assert re.search(fault, found)
    with pytest.raises(KeyError):
        list(faults("sum(mallee_no_such_thing)"))
