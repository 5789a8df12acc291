"""Alerts: each fires on what it is for, and only then; each has its section in the runbook."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bench.boards.prometheus import missing, promtool
from mallee.actors.telemetry.boards.alerts import GROUPS, Alert, Group
from mallee.actors.telemetry.boards.files import BOARDS
from mallee.actors.telemetry.boards.queries import families_in
from mallee.actors.telemetry.boards.rules import RUNBOOK, to_yaml

ROOT = Path(__file__).resolve().parents[4]
ALERTS: dict[str, Alert] = {alert.name: alert for group in GROUPS for alert in group.alerts}

needs_promtool = pytest.mark.skipif(missing() is not None, reason=str(missing()))

Series = dict[str, str]
"""Values by minute, or every five of them, as promtool writes them: `0+5x30` grows by 5, 30 times."""


class Case(NamedTuple):
    """Series on which an alert fires after some time, and others on which it does not."""

    fires: Series
    quiet: Series
    minutes: int = 30


ANSWERED = 'mallee_http_answers_total{job="m",endpoint="/v1/completions",status="200"}'
FAILED = 'mallee_http_answers_total{job="m",endpoint="/v1/completions",status="503"}'
DEMOTED = 'mallee_http_answers_total{job="m",endpoint="/v1/capsules/{capsule}/demote",status="%s"}'
PROBED = 'mallee_http_answers_total{job="m",endpoint="/health",status="503"}'
G0, G1 = ('job="m",gateway="g0"', 'job="m",gateway="g1"')
W0 = f'{G0},worker="w0"'


def histogram(name: str, below: str, bound: float, labels: str = G0, rate: int = 100) -> Series:
    """Buckets up to `bound`, growing by `below`, and beyond, growing by `rate`."""
    return {
        f'{name}_bucket{{{labels},le="{bound}"}}': f"0+{below}x500",
        f'{name}_bucket{{{labels},le="{10 * bound}"}}': f"0+{rate}x500",
        f'{name}_bucket{{{labels},le="+Inf"}}': f"0+{rate}x500",
        f"{name}_count{{{labels}}}": f"0+{rate}x500",
    }


FIRST, LAG = "mallee_time_to_first_token_seconds", "mallee_event_lag_seconds"
NEXT, STALL = "mallee_inter_token_latency_seconds", "mallee_branch_stall_seconds"


def counter(name: str, labels: str = G0, minutes: int = 30) -> Case:
    """An alert on the growth of a counter that should stand."""
    return Case(
        {f"{name}{{{labels}}}": f"0x{minutes - 5} 20x5"}, {f"{name}{{{labels}}}": f"7x{minutes}"}
    )


CASES: dict[str, Case] = {
    "MalleeGatewaysAbsent": Case({}, {f"mallee_workers_alive{{{G0}}}": "2x30"}),
    "MalleeWorkersGone": Case(
        {f"mallee_workers_alive{{{G0}}}": "2x10 0x20"},
        # A gateway that has just started knows no worker yet.
        {f"mallee_workers_alive{{{G0}}}": "0x30", f"mallee_workers_alive{{{G1}}}": "2x30"},
    ),
    "MalleeWorkersMissing": Case(
        {f"mallee_workers_alive{{{G0}}}": "3x30", f"mallee_workers_expected{{{G0}}}": "4x30"},
        # One that is replaced within minutes.
        {
            f"mallee_workers_alive{{{G0}}}": "4x20 3x5 4x5",
            f"mallee_workers_expected{{{G0}}}": "4x30",
        },
    ),
    "MalleeAnswersFailFast": Case(
        {ANSWERED: "0+90x100", FAILED: "0+10x100"},
        # Errors of an hour ago, and probes that are answered with 503.
        {ANSWERED: "0+90x100", FAILED: "0+10x30 300x70", PROBED: "0+100x100"},
        90,
    ),
    "MalleeAnswersFailSlow": Case(
        {ANSWERED: "0+990x500", FAILED: "0+10x500"},
        {ANSWERED: "0+9990x500", FAILED: "0+10x500"},
        480,
    ),
    "MalleeBranchesFail": Case(
        {
            f'mallee_branches_ended_total{{{G0},reason="error"}}': "0+5x30",
            f'mallee_branches_ended_total{{{G0},reason="stop"}}': "0+95x30",
        },
        {
            f'mallee_branches_ended_total{{{G0},reason="cancelled"}}': "0+50x30",
            f'mallee_branches_ended_total{{{G0},reason="stop"}}': "0+50x30",
        },
    ),
    "MalleeFirstTokensLateFast": Case(histogram(FIRST, "20", 2.0), histogram(FIRST, "40", 2.0), 90),
    "MalleeFirstTokensLateSlow": Case(
        histogram(FIRST, "60", 2.0), histogram(FIRST, "90", 2.0), 480
    ),
    "MalleeTokensSlow": Case(histogram(NEXT, "90", 0.5), histogram(NEXT, "100", 0.5)),
    "MalleeQueueGrows": Case(
        {f"mallee_requests_waiting{{{G0}}}": "0+10x30"},
        {f"mallee_requests_waiting{{{G0}}}": "300-10x30"},  # many, and they become fewer
        29,
    ),
    "MalleeRequestsRefused": Case(
        {
            f'mallee_admission_refusals_total{{{G0},reason="overloaded"}}': "0+5x30",
            ANSWERED: "0+100x30",
        },
        {
            f'mallee_admission_refusals_total{{{G0},reason="overloaded"}}': "0x30",
            ANSWERED: "0+100x30",
        },
    ),
    "MalleeBrokerDown": Case(
        {f"mallee_broker_up{{{G0}}}": "1x10 0x20", f"mallee_broker_up{{{G1}}}": "1x30"},
        {f"mallee_broker_up{{{G0}}}": "1x10 0 1x19"},
    ),
    "MalleeEventsLate": Case(histogram(LAG, "90", 1.0), histogram(LAG, "100", 1.0)),
    "MalleeEventsMissing": Case(
        {f"mallee_workers_with_event_gaps{{{G0}}}": "0x10 1x20"},
        {f"mallee_workers_with_event_gaps{{{G0}}}": "0x26 1x2 0x2"},  # a snapshot mended it
    ),
    "MalleeEventsDropped": counter("mallee_event_messages_dropped_total"),
    "MalleeGatewaysApart": Case(
        {
            **{f"mallee_broker_up{{{g}}}": "1x30" for g in (G0, G1)},
            f"mallee_other_gateways{{{G0}}}": "1x30",
            f"mallee_other_gateways{{{G1}}}": "0x30",
        },
        {
            **{f"mallee_broker_up{{{g}}}": "1x30" for g in (G0, G1)},
            **{f"mallee_other_gateways{{{g}}}": "1x30" for g in (G0, G1)},
        },
    ),
    "MalleeReplicaSkew": Case(
        {
            f"mallee_replica_skew_rows{{{G0}}}": "50x30",
            f"mallee_booked_rows{{{G0}}}": "100x30",
        },
        # All of very few.
        {f"mallee_replica_skew_rows{{{G0}}}": "4x30", f"mallee_booked_rows{{{G0}}}": "4x30"},
    ),
    "MalleeRegretHigh": Case(
        {
            f"mallee_route_regret_blocks_total{{{G0}}}": "0+50x60",
            f"mallee_route_best_overlap_blocks_total{{{G0}}}": "0+100x60",
        },
        {
            f"mallee_route_regret_blocks_total{{{G0}}}": "0+5x60",
            f"mallee_route_best_overlap_blocks_total{{{G0}}}": "0+100x60",
        },
        60,
    ),
    "MalleeIndexFull": Case(
        {f"mallee_index_evictions_total{{{G0}}}": "0+50x60"},
        {f"mallee_index_evictions_total{{{G0}}}": "9x60"},
        60,
    ),
    "MalleeBookingsExpire": Case(
        {f"mallee_expired_bookings_total{{{G0}}}": "0+5x60"},
        {f"mallee_expired_bookings_total{{{G0}}}": "0x10 3x50"},
        60,
    ),
    "MalleeCapsulesNearLimit": Case(
        {
            f'mallee_worker_capsule_bytes{{{W0},tier="0"}}': "900x30",
            f"mallee_worker_capsule_limit_bytes{{{W0}}}": "1000x30",
            f"mallee_worker_live_blocks{{{W0}}}": "90x30",
            f"mallee_worker_total_blocks{{{W0}}}": "100x30",
        },
        # Capsules that share nearly everything.
        {
            f'mallee_worker_capsule_bytes{{{W0},tier="0"}}': "9000x30",
            f"mallee_worker_capsule_limit_bytes{{{W0}}}": "1000x30",
            f"mallee_worker_live_blocks{{{W0}}}": "20x30",
            f"mallee_worker_total_blocks{{{W0}}}": "100x30",
        },
    ),
    "MalleeHostTierFull": Case(
        {
            f"mallee_worker_host_held_blocks{{{W0}}}": "95x30",
            f"mallee_worker_host_room_blocks{{{W0}}}": "5x30",
        },
        {
            f"mallee_worker_host_held_blocks{{{W0}}}": "40x30",
            f"mallee_worker_host_room_blocks{{{W0}}}": "60x30",
        },
    ),
    "MalleeDiskTierFull": Case(
        {
            f'mallee_worker_capsule_bytes{{{W0},tier="2"}}': "950x30",
            f'mallee_worker_tier_bytes{{{W0},tier="disk"}}': "960x30",
            f"mallee_worker_disk_limit_bytes{{{W0}}}": "1000x30",
        },
        # Full of cached blocks, which give way.
        {
            f'mallee_worker_capsule_bytes{{{W0},tier="2"}}': "100x30",
            f'mallee_worker_tier_bytes{{{W0},tier="disk"}}': "960x30",
            f"mallee_worker_disk_limit_bytes{{{W0}}}": "1000x30",
        },
    ),
    "MalleeCapsulesRefused": counter("mallee_worker_refused_capsules_total", W0),
    "MalleeMemoryShort": Case(
        {f"mallee_worker_preemptions_total{{{W0}}}": "0+5x30"},
        {f"mallee_worker_preemptions_total{{{W0}}}": "0x20 5x10"},
    ),
    "MalleeMemoryFaults": counter("mallee_worker_kv_faults_total", W0),
    "MalleeDemotionsRefused": Case(
        {DEMOTED % "503": "0x25 3x5"}, {DEMOTED % "200": "0+3x30", DEMOTED % "404": "0+3x30"}
    ),
    "MalleeMovesFail": counter("mallee_worker_failed_moves_total", W0),
    "MalleeLoansFail": Case(
        {f'mallee_worker_failed_loans_total{{{W0},direction="borrowed"}}': "0+5x30"},
        {f'mallee_worker_failed_loans_total{{{W0},direction="borrowed"}}': "0x20 1x10"},
    ),
    "MalleeFailovers": counter("mallee_branches_moved_total", f'{G0},reason="death"'),
    "MalleeWorkersStall": counter("mallee_branches_moved_total", f'{G0},reason="stall"'),
    "MalleePausesLong": Case(histogram(STALL, "50", 5.0), histogram(STALL, "100", 5.0)),
    "MalleeStreamsCut": Case(
        {
            'mallee_host_slow_streams_total{job="m",instance="a"}': "0x25 1x5",
            'mallee_host_silent_gateways_total{job="m",instance="a"}': "0x30",
        },
        {
            'mallee_host_slow_streams_total{job="m",instance="a"}': "1x30",
            'mallee_host_silent_gateways_total{job="m",instance="a"}': "1x30",
        },
    ),
    "MalleeRecordsStopped": Case(
        {f'mallee_session_records_stopped_total{{{G0},reason="disk_slow"}}': "0x25 1x5"},
        {f'mallee_session_records_stopped_total{{{G0},reason="session_bytes"}}': "0x25 1x5"},
    ),
    "MalleeFilesNearLimit": Case(
        {
            'process_open_fds{job="m",instance="a"}': "1000x30",
            'process_max_fds{job="m",instance="a"}': "1024x30",
        },
        {
            'process_open_fds{job="m",instance="a"}': "100x30",
            'process_max_fds{job="m",instance="a"}': "1024x30",
        },
    ),
}


def interval(minutes: int) -> str:
    """Between two samples, and two evaluations: fewer where windows are of hours."""
    return "5m" if minutes > 120 else "1m"


def unit_test(name: str, series: Series, minutes: int, firing: int) -> dict[str, Any]:
    """That `firing` alerts of that name fire after so many minutes of `series`."""
    samples = [{"labels": "{}", "value": firing}] if firing else []
    return {
        "name": f"{name}, {'fires' if firing else 'quiet'}",
        "interval": interval(minutes),
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": f"{minutes}m",
                "exp_samples": samples,
            }
        ],
    }


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "mallee.yaml"
    path.write_text(to_yaml(GROUPS))
    return path


@needs_promtool
def test_promtool_finds_no_fault_in_the_rules(rules: Path) -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", str(rules))


@needs_promtool
def test_every_alert_fires_on_what_it_is_for_and_only_then(tmp_path: Path) -> None:
    """By `promtool test rules`, which evaluates them over made series."""
    assert CASES.keys() == ALERTS.keys()
    files = []
    for name, case in CASES.items():
        rule, file = tmp_path / f"{name}.yaml", tmp_path / f"{name}-tests.yaml"
        rule.write_text(to_yaml((Group(name, (ALERTS[name],)),)))
        tests = [
            unit_test(name, case.fires, case.minutes, 1),
            unit_test(name, case.quiet, case.minutes, 0),
        ]
        head = {"rule_files": [rule.name], "evaluation_interval": interval(case.minutes)}
        file.write_text(yaml.safe_dump({**head, "tests": tests}))
        files.append(str(file))
    assert promtool("test", "rules", *files).count("SUCCESS") == len(ALERTS)


@needs_promtool
def test_a_firing_alert_tells_its_figures(rules: Path, tmp_path: Path) -> None:
    """The whole of one alert as Alertmanager gets it."""
    series = {
        f"mallee_workers_with_event_gaps{{{G0}}}": "3x30",
    }
    alert = {
        "exp_labels": {"severity": "warning", "job": "m", "gateway": "g0"},
        "exp_annotations": {
            "summary": "Gateway g0 lacks events of 3 workers, and no snapshot mended it.",
            "runbook_url": f"{RUNBOOK}#malleeeventsmissing",
            "dashboard": "mallee-router",
        },
    }
    test = {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": "MalleeEventsMissing", "exp_alerts": [alert]}
        ],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [rules.name], "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(file))


def test_alerts_name_only_what_the_catalog_has() -> None:
    for alert in ALERTS.values():
        assert list(families_in(alert.expression)), alert.name


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(ALERTS)


def test_the_runbook_tells_of_each_alert_what_the_rules_say() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = re.split(r"^##+ ", text, flags=re.MULTILINE)
    told = {section.partition("\n")[0]: section for section in sections}
    for alert in ALERTS.values():
        lasts = "at once" if alert.lasts == "0m" else f"after {alert.lasts}"
        assert f"*{alert.severity}, {lasts}" in told[alert.name], alert.name
        assert f"[{alert.board}]" in told[alert.name], alert.name


def test_every_alert_is_shown_by_a_dashboard() -> None:
    boards = {board.name: board for board in BOARDS}
    for alert in ALERTS.values():
        shown = {
            family.name
            for row in boards[alert.board].rows
            for panel in row.panels
            for query in panel.queries
            for family in families_in(query.expression)
        }
        measured = {family.name for family in families_in(alert.expression)}
        assert measured & shown, f"{alert.name}: {measured} not on {alert.board}"
