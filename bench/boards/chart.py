"""The chart's dashboards and alert rules, as Grafana and Prometheus read them."""

import json
from typing import Any, Final

import yaml

from bench import ROOT

DASHBOARDS: Final = {
    name: ROOT / "helm" / "mallee" / "dashboards" / f"{name}.json"
    for name in ("fleet", "router", "worker", "tenant")
}
RULES: Final = ROOT / "helm" / "mallee" / "alerts" / "mallee.yaml"


def dashboard(name: str) -> Any:
    """The model of a dashboard, as Grafana imports it."""
    return json.loads(DASHBOARDS[name].read_text(encoding="utf-8"))


def targets(board: Any) -> list[tuple[Any, Any]]:
    """Every query of a dashboard after its panel."""
    return [(panel, each) for panel in board["panels"] for each in panel.get("targets", ())]


def alerts() -> dict[str, Any]:
    """The rules by the names of their alerts, in their order."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}
