"""Dashboards as Grafana's JSON: schema 39, which Grafana 10.4 and later read."""

import json
from collections.abc import Iterator
from string import ascii_uppercase
from typing import Any, Final

from mallee.actors.telemetry.boards.panels import WHOLE, Board, Kind, Panel, Row, Variable
from mallee.actors.telemetry.boards.queries import families_in

SCHEMA: Final = 39
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
TAG: Final = "mallee"
_HEIGHTS: Final[dict[Kind, int]] = {"stat": 4, "lines": 8, "areas": 8, "bars": 8}
_TYPES: Final[dict[Kind, str]] = {
    "stat": "stat",
    "lines": "timeseries",
    "areas": "timeseries",
    "bars": "bargauge",
}
_FIRING: Final = 'ALERTS{alertname=~"Mallee.*",alertstate="firing",job=~"$job|"}'


def to_json(board: Board) -> str:
    """The dashboard's file."""
    return json.dumps(_dashboard(board), indent=1, ensure_ascii=False) + "\n"


def _dashboard(board: Board) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": f"Mallee / {board.title}",
        "description": board.text,
        "tags": [TAG],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *map(_variable, board.variables)]},
        "annotations": {"list": [_alerts()]},
        "links": [_links()],
        "panels": list(_panels(board.rows)),
    }


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
    }


def _variable(variable: Variable) -> dict[str, Any]:
    """A choice of several values, all at first; those of the metric within the chosen jobs."""
    inside = "" if variable.label == "job" else '{job=~"$job"}'
    query = f"label_values({variable.metric}{inside}, {variable.label})"
    return {
        "name": variable.label,
        "label": variable.title,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": variable.label},
        "definition": query,
        "refresh": 2,
        "sort": 7,  # by their text, numbers in it as numbers
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "hide": 0,
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": _FIRING,
        "step": "60s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}}",
    }


def _links() -> dict[str, Any]:
    return {
        "title": "Mallee",
        "type": "dashboards",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _panels(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    """The panels of each row below its title, from left to right and in as many lines as they need."""
    top, number = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": WHOLE, "x": 0, "y": top},
        }
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > WHOLE:
                top, left, height = top + height, 0, 0
            number += 1
            place = {"h": _HEIGHTS[panel.kind], "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left, height = left + panel.width, max(height, _HEIGHTS[panel.kind])
        top += height


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": _TYPES[panel.kind],
        "title": panel.title,
        "description": description(panel),
        "datasource": SOURCE,
        "targets": [_target(panel, number) for number in range(len(panel.queries))],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def description(panel: Panel) -> str:
    """The panel's own text, and the catalog's of each metric in it."""
    lines = [panel.text] if panel.text else []
    families = dict.fromkeys(
        family for query in panel.queries for family in families_in(query.expression)
    )
    lines += [f"`{family.name}`: {family.text}" for family in families]
    return "\n\n".join(lines)


def _target(panel: Panel, number: int) -> dict[str, Any]:
    query = panel.queries[number]
    is_now = panel.kind in ("stat", "bars")
    return {
        "refId": ascii_uppercase[number],
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "editorMode": "code",
        "instant": is_now and panel.kind == "bars",
        "range": panel.kind != "bars",
        "exemplar": "histogram_quantile" in query.expression and not is_now,
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": _steps(panel)},
        "color": {"mode": "thresholds" if panel.kind in ("stat", "bars") else "palette-classic"},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind in ("lines", "areas"):
        stacks = panel.kind == "areas"
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if stacks else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if stacks else "none"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    return defaults


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.limits is None:
        return [{"color": "green", "value": None}]
    warning, critical = panel.limits.warning, panel.limits.critical
    if panel.limits.below:
        return [
            {"color": "red", "value": None},
            {"color": "orange", "value": critical},
            {"color": "green", "value": warning},
        ]
    return [
        {"color": "green", "value": None},
        {"color": "orange", "value": warning},
        {"color": "red", "value": critical},
    ]


def _options(panel: Panel) -> dict[str, Any]:
    last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {
            "reduceOptions": last,
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
        }
    if panel.kind == "bars":
        return {
            "reduceOptions": last,
            "displayMode": "gradient",
            "orientation": "horizontal",
            "showUnfilled": True,
        }
    return {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "max"],
            "sortBy": "Max",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
