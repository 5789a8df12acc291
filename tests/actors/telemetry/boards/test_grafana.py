"""Dashboards as Grafana reads them: by its own schema, and by what a viewer needs of each panel."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from mallee.actors.telemetry.boards.files import BOARDS, files
from mallee.actors.telemetry.boards.grafana import to_json
from mallee.actors.telemetry.boards.panels import WHOLE, Board
from mallee.actors.telemetry.boards.queries import Scope, families_in

# Grafana reads these too; its schema of dashboards leaves them out.
NOT_IN_SCHEMA = {"definition", "step", "titleFormat", "textFormat"}
CHART = Path(__file__).resolve().parents[4] / "helm" / "mallee"
NAMES = [board.name for board in BOARDS]


@pytest.fixture(params=BOARDS, ids=NAMES)
def board(request: pytest.FixtureRequest) -> Board:
    found: Board = request.param
    return found


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


def test_grafana_s_own_models_read_every_field(board: Board) -> None:
    """The models are generated from Grafana's schemas: an unknown or misspelt field would be gone."""
    register_default_plugins()
    told = json.loads(to_json(board))
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(told)))
    assert {path.rpartition(".")[2] for path in lost(told, read)} <= NOT_IN_SCHEMA


def test_panels_lie_beside_each_other_and_not_on_each_other(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(to_json(board))["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert x + w <= WHOLE, panel["title"]
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_tells_its_unit_and_the_meaning_of_its_metrics(board: Board) -> None:
    titles = [panel.title for row in board.rows for panel in row.panels]
    assert len(set(titles)) == len(titles)
    for panel in json.loads(to_json(board))["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            for family in families_in(target["expr"]):
                assert f"`{family.name}`: {family.text}" in panel["description"], panel["title"]


def test_the_chart_holds_what_is_generated() -> None:
    """`mallee metrics --write helm/mallee` writes them again."""
    for name, text in files().items():
        assert (CHART / name).read_text() == text, name
    held = {path.name for folder in ("dashboards", "alerts") for path in (CHART / folder).iterdir()}
    assert held == {Path(name).name for name in files()}


def test_a_query_can_name_only_what_the_catalog_has() -> None:
    scope = Scope("5m")
    with pytest.raises(KeyError):
        scope.now("mallee_no_such_thing")
    with pytest.raises(AssertionError, match="is a counter, not a gauge"):
        scope.now("mallee_output_tokens_total")
    with pytest.raises(AssertionError, match="has no label colour"):
        scope.rate("mallee_output_tokens_total", "colour")
    with pytest.raises(AssertionError, match="has no label mood"):
        scope.rate("mallee_output_tokens_total", where='mood="good"')
    with pytest.raises(AssertionError, match="has no bucket 3"):
        scope.slower(3.0, "mallee_time_to_first_token_seconds")


def test_what_all_gateways_tell_of_a_worker_counts_once() -> None:
    assert Scope("5m").now("mallee_worker_live_blocks") == (
        "sum(max by (job, worker) (mallee_worker_live_blocks))"
    )
