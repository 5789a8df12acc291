"""Alerts as a file of Prometheus rules, which promtool checks and a PrometheusRule holds."""

from typing import Any, Final

import yaml

from mallee.actors.telemetry.boards.alerts import Alert, Group

_VALUES: Final = {
    "number": '{{ $value | printf "%.0f" }}',
    "share": "{{ $value | humanizePercentage }}",
    "time": "{{ $value | humanizeDuration }}",
}
_LABELS: Final = {
    name: f"{{{{ $labels.{name} }}}}" for name in ("gateway", "instance", "tier", "worker")
}
RUNBOOK: Final = "https://github.com/mallee-llm/mallee/blob/main/docs/runbook.md"


def to_yaml(groups: tuple[Group, ...]) -> str:
    """The file of rules."""
    body = {"groups": [{"name": each.name, "rules": [*map(_rule, each.alerts)]} for each in groups]}
    return yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=10_000)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary.format(**_VALUES, **_LABELS),
            "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
            "dashboard": f"mallee-{alert.board}",
        },
    }
