"""Alerts: each fires on what it is for, and only then; each has its section in the runbook."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from bench import ROOT
from bench.boards.chart import RULES, alerts, dashboard, targets
from bench.boards.prometheus import missing, promtool
from support.promql import families_in

ALERTS = alerts()

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
A = 'job="m",instance="a"'
W0 = f'{A},worker="w0"'
OVERLOADED = f'{G0},reason="overloaded"'


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


def of(labels: str = G0, **values: str) -> Series:
    """Our families with those labels, without "mallee_" before their names."""
    return {f"mallee_{name}{{{labels}}}": told for name, told in values.items()}


def ended(reason: str, told: str) -> Series:
    return of(f'{G0},reason="{reason}"', branches_ended_total=told)


def on_disk(capsules: str) -> Series:
    """A disk that is nearly full."""
    return {
        **of(f'{W0},tier="2"', worker_capsule_bytes=capsules),
        **of(f'{W0},tier="disk"', worker_tier_bytes="960x30"),
        **of(W0, worker_disk_limit_bytes="1000x30"),
    }


def backends(endpoint: str = "a", **states: str) -> Series:
    """The knowledge that a router has of one backend."""
    return {
        f'mallee_router_cache_knowledge{{{A},endpoint="{endpoint}",state="{state}"}}': told
        for state, told in states.items()
    }


def files(num: str) -> Series:
    return {f"process_open_fds{{{A}}}": num, f"process_max_fds{{{A}}}": "1024x30"}


CASES: dict[str, Case] = {
    "MalleeGatewaysAbsent": Case({}, of(workers_alive="2x30")),
    "MalleeWorkersGone": Case(
        of(workers_alive="2x10 0x20"),
        # A gateway that has just started knows no worker yet.
        of(workers_alive="0x30") | of(G1, workers_alive="2x30"),
    ),
    "MalleeWorkersMissing": Case(
        of(workers_alive="3x30", workers_expected="4x30"),
        # One that is replaced within minutes.
        of(workers_alive="4x20 3x5 4x5", workers_expected="4x30"),
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
        ended("error", "0+5x30") | ended("stop", "0+95x30"),
        ended("cancelled", "0+50x30") | ended("stop", "0+50x30"),
    ),
    "MalleeFirstTokensLateFast": Case(histogram(FIRST, "20", 2.0), histogram(FIRST, "40", 2.0), 90),
    "MalleeFirstTokensLateSlow": Case(
        histogram(FIRST, "60", 2.0), histogram(FIRST, "90", 2.0), 480
    ),
    "MalleeTokensSlow": Case(histogram(NEXT, "90", 0.5), histogram(NEXT, "100", 0.5)),
    "MalleeQueueGrows": Case(
        of(requests_waiting="0+10x30"),
        of(requests_waiting="300-10x30"),  # many, and they become fewer
        29,
    ),
    "MalleeRequestsRefused": Case(
        of(OVERLOADED, admission_refusals_total="0+5x30") | {ANSWERED: "0+100x30"},
        of(OVERLOADED, admission_refusals_total="0x30") | {ANSWERED: "0+100x30"},
    ),
    "MalleeBrokerDown": Case(
        of(broker_up="1x10 0x20") | of(G1, broker_up="1x30"), of(broker_up="1x10 0 1x19")
    ),
    "MalleeStoreBehind": Case(
        of(store_waiting_writes="0x10 2000x20"),
        # A broker that was away for a moment.
        of(store_waiting_writes="0x10 2000 0x19"),
    ),
    "MalleeEventsLate": Case(histogram(LAG, "90", 1.0), histogram(LAG, "100", 1.0)),
    "MalleeEventsMissing": Case(
        of(workers_with_event_gaps="0x10 1x20"),
        of(workers_with_event_gaps="0x26 1x2 0x2"),  # a snapshot mended it
    ),
    "MalleeEventsDropped": counter("mallee_event_messages_dropped_total"),
    "MalleeGatewaysApart": Case(
        of(broker_up="1x30", other_gateways="1x30")
        | of(G1, broker_up="1x30", other_gateways="0x30"),
        of(broker_up="1x30", other_gateways="1x30")
        | of(G1, broker_up="1x30", other_gateways="1x30"),
    ),
    "MalleeReplicaSkew": Case(
        of(replica_skew_rows="50x30", booked_rows="100x30"),
        # All of very few.
        of(replica_skew_rows="4x30", booked_rows="4x30"),
    ),
    "MalleeRegretHigh": Case(
        of(route_regret_blocks_total="0+50x60", route_best_overlap_blocks_total="0+100x60"),
        of(route_regret_blocks_total="0+5x60", route_best_overlap_blocks_total="0+100x60"),
        60,
    ),
    "MalleeIndexFull": Case(
        of(index_evictions_total="0+50x60"), of(index_evictions_total="9x60"), 60
    ),
    "MalleeBookingsExpire": Case(
        of(expired_bookings_total="0+5x60"), of(expired_bookings_total="0x10 3x50"), 60
    ),
    "MalleeCapsulesNearLimit": Case(
        {
            **of(f'{W0},tier="0"', worker_capsule_bytes="900x30"),
            **of(W0, worker_capsule_limit_bytes="1000x30"),
            **of(W0, worker_live_blocks="90x30", worker_total_blocks="100x30"),
        },
        # Capsules that share nearly everything.
        {
            **of(f'{W0},tier="0"', worker_capsule_bytes="9000x30"),
            **of(W0, worker_capsule_limit_bytes="1000x30"),
            **of(W0, worker_live_blocks="20x30", worker_total_blocks="100x30"),
        },
    ),
    "MalleeHostTierFull": Case(
        of(W0, worker_host_held_blocks="95x30", worker_host_room_blocks="5x30"),
        of(W0, worker_host_held_blocks="40x30", worker_host_room_blocks="60x30"),
    ),
    # Cached blocks give way.
    "MalleeDiskTierFull": Case(on_disk("950x30"), on_disk("100x30")),
    "MalleeCapsulesRefused": counter("mallee_worker_refused_capsules_total", W0),
    "MalleeMemoryShort": Case(
        of(W0, worker_preemptions_total="0+5x30"), of(W0, worker_preemptions_total="0x20 5x10")
    ),
    "MalleeMemoryFaults": counter("mallee_worker_kv_faults_total", W0),
    "MalleeDemotionsRefused": Case(
        {DEMOTED % "503": "0x25 3x5"}, {DEMOTED % "200": "0+3x30", DEMOTED % "404": "0+3x30"}
    ),
    "MalleeMovesFail": counter("mallee_worker_failed_moves_total", W0),
    "MalleeLoansFail": Case(
        of(f'{W0},direction="borrowed"', worker_failed_loans_total="0+5x30"),
        of(f'{W0},direction="borrowed"', worker_failed_loans_total="0x20 1x10"),
    ),
    "MalleeFailovers": counter("mallee_branches_moved_total", f'{G0},reason="death"'),
    "MalleeWorkersStall": counter("mallee_branches_moved_total", f'{G0},reason="stall"'),
    "MalleePausesLong": Case(histogram(STALL, "50", 5.0), histogram(STALL, "100", 5.0)),
    "MalleeStreamsCut": Case(
        of(A, host_slow_streams_total="0x25 1x5", host_silent_gateways_total="0x30"),
        of(A, host_slow_streams_total="1x30", host_silent_gateways_total="1x30"),
    ),
    "MalleeRecordsStopped": Case(
        of(f'{G0},reason="disk_slow"', session_records_stopped_total="0x25 1x5"),
        of(f'{G0},reason="session_bytes"', session_records_stopped_total="0x25 1x5"),
    ),
    "MalleeFilesNearLimit": Case(files("1000x30"), files("100x30")),
    "MalleeKeysRefused": Case(
        of(keys_refused="0x10 1x20") | of(G1, keys_refused="0x30"), of(keys_refused="0x30")
    ),
    # The time of these tests begins at the epoch; 0: nothing expires.
    "MalleeExpiresSoon": Case(
        of(f'{G0},of="key"', expiry_timestamp_seconds="500000x30"),
        of(f'{G0},of="key"', expiry_timestamp_seconds="700000x30")
        | of(f'{G0},of="certificate"', expiry_timestamp_seconds="0x30"),
    ),
    # One of two is left; a series ends with its state.
    "MalleeBackendsGone": Case(
        backends(exact="1x10 _x20", blind="_x10 1x20"),
        backends(blind="1x30") | backends("b", predicted="1x30"),
    ),
    "MalleeBackendAway": Case(
        backends(exact="1x10 _x20", blind="_x10 1x20") | backends("b", exact="1x30"),
        backends(exact="1x10 _x4 1x16", blind="_x10 1x4 _x16"),  # it was restarted
    ),
    "MalleeBackendPredicted": Case(
        backends(exact="1x10 _x20", predicted="_x10 1x20") | backends("b", exact="1x30"),
        backends(predicted="1x30") | backends("b", predicted="1x30"),  # none has events
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


@needs_promtool
def test_promtool_finds_no_fault_in_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))


@needs_promtool
def test_every_alert_fires_on_what_it_is_for_and_only_then(tmp_path: Path) -> None:
    """By `promtool test rules`, which evaluates them over made series."""
    assert CASES.keys() == ALERTS.keys()
    files = []
    for name, case in CASES.items():
        rule, file = tmp_path / f"{name}.yaml", tmp_path / f"{name}-tests.yaml"
        rule.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": [ALERTS[name]]}]}))
        tests = [
            unit_test(name, case.fires, case.minutes, 1),
            unit_test(name, case.quiet, case.minutes, 0),
        ]
        head = {"rule_files": [rule.name], "evaluation_interval": interval(case.minutes)}
        file.write_text(yaml.safe_dump({**head, "tests": tests}))
        files.append(str(file))
    assert promtool("test", "rules", *files).count("SUCCESS") == len(ALERTS)


def test_the_runbook_tells_of_each_alert_and_no_other_what_the_rules_say() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(ALERTS)
    sections = re.split(r"^##+ ", text, flags=re.MULTILINE)
    told = {section.partition("\n")[0]: section for section in sections}
    for name, alert in ALERTS.items():
        lasts = f"after {alert['for']}" if alert["for"] != "0m" else "at once"
        assert f"*{alert['labels']['severity']}, {lasts}" in told[name], name
        assert f"[{board_of(alert)}]" in told[name], name
        assert alert["annotations"]["runbook_url"].endswith(f"/docs/runbook.md#{name.lower()}")


def board_of(alert: Any) -> str:
    return str(alert["annotations"]["dashboard"]).removeprefix("mallee-")


def test_every_alert_is_shown_by_a_dashboard() -> None:
    for name, alert in ALERTS.items():
        queries = [target["expr"] for _, target in targets(dashboard(board_of(alert)))]
        shown = {family for query in queries for family in families_in(query)}
        measured = families_in(alert["expr"])
        assert measured.keys() & shown, f"{name}: {[*measured]} not on {board_of(alert)}"
