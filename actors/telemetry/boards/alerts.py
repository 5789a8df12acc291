"""Alerts on symptoms that clients feel, and on causes that somebody has to look at before they do.

docs/runbook.md has a section for each. Goals are held by burn rates: an alert fires when the errors of a
short and of a long window would both spend the month's budget too soon.
Source: Site Reliability Workbook, chapter 5, Multiwindow, Multi-Burn-Rate Alerts.
"""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.actors.telemetry.boards import measures
from mallee.actors.telemetry.boards.goals import (
    ANSWERED,
    FIRST_TOKEN_S,
    FIRST_TOKEN_SHARE,
    FULL,
    IN_USE,
    KEPT,
    LAG_S,
    NEXT_TOKEN_S,
    REGRET,
    SERVED,
    SKEW,
    STALL_S,
    WAITING,
)
from mallee.actors.telemetry.boards.queries import Scope, share

Severity: TypeAlias = Literal["critical", "warning"]
"""`critical`: wake somebody. `warning`: look today."""
BoardName: TypeAlias = Literal["fleet", "router", "worker", "tenant"]


class Condition(NamedTuple):
    """A measure, by PromQL, and the bound that it should not pass."""

    measure: str
    sign: Literal["<", ">"]
    bound: float

    @property
    def expression(self) -> str:
        return f"({self.measure}) {self.sign} {self.bound:.4g}"


class Alert(NamedTuple):
    """One alert: it fires when all conditions hold for `lasts` on end. `board` shows its cause."""

    name: str
    severity: Severity
    lasts: str
    board: BoardName
    summary: str  # with `{number}`, `{share}` or `{time}` for the first measure, and labels of it
    conditions: tuple[Condition, ...]

    @property
    def expression(self) -> str:
        return "\nand\n".join(condition.expression for condition in self.conditions)


class Group(NamedTuple):
    """Alerts that are looked at together."""

    name: str
    alerts: tuple[Alert, ...]


def _over(span: str) -> Scope:
    """Rates over `span`; every alert names its job."""
    return Scope(span, keeps=("job",))


_FEW: Final = _over("5m")
_MORE: Final = _over("10m")
_FIRST: Final = "mallee_time_to_first_token_seconds"
_MOVED: Final = "mallee_branches_moved_total"
_DEMOTED: Final = 'endpoint=~".*/demote"'
_REFUSED: Final = f'{_DEMOTED},status=~"5.."'
_ANY_DEMOTIONS: Final = _MORE.growth(measures.ANSWERS, where=_DEMOTED)
# How many times faster than the budget of 30 days allows, and the windows in which that shows.
_FAST: Final = (14.4, "1h", "5m")  # 2 % of the budget in an hour
_SLOW: Final = (6.0, "6h", "30m")  # 5 % of it in six


def _late(scope: Scope) -> str:
    """Share of first tokens that came too late."""
    return scope.slower(FIRST_TOKEN_S, _FIRST)


def _more_than(bound: float, *expressions: str) -> tuple[Condition, ...]:
    return tuple(Condition(each, ">", bound) for each in expressions)


def _fewer_than(bound: float, measure: str) -> tuple[Condition, ...]:
    return (Condition(measure, "<", bound),)


def _burns(
    budget: float, rate: tuple[float, str, str], errors: Callable[[Scope], str]
) -> tuple[Condition, ...]:
    times, *windows = rate
    return _more_than(times * budget, *(errors(_over(window)) for window in windows))


def _crowded(bound: float, kept: str, used: str) -> tuple[Condition, ...]:
    """Capsules that would take too much if they shared nothing, and share little."""
    return (*_more_than(bound, kept), *_more_than(IN_USE, used))


_AVAILABILITY: Final = Group(
    "mallee-availability",
    (
        Alert(
            *("MalleeGatewaysAbsent", "critical", "2m", "fleet"),
            "Prometheus reaches no gateway.",
            _more_than(0, "absent(mallee_workers_alive)"),
        ),
        Alert(
            *("MalleeWorkersGone", "critical", "1m", "fleet"),
            "No worker has a lease: requests wait, and are refused after a minute.",
            _fewer_than(1, _FEW.now("mallee_workers_alive", how="max")),
        ),
        Alert(
            *("MalleeWorkersMissing", "warning", "10m", "fleet"),
            "{number} workers of those that should run have no lease.",
            _more_than(0, measures.missing(_FEW)),
        ),
        Alert(
            *("MalleeAnswersFailFast", "critical", "2m", "fleet"),
            f"{{share}} of answers are server errors: a goal of"
            f" {ANSWERED:.1%} loses its month within two days.",
            _burns(1 - ANSWERED, _FAST, measures.failing),
        ),
        Alert(
            *("MalleeAnswersFailSlow", "warning", "15m", "fleet"),
            f"{{share}} of answers are server errors: a goal of"
            f" {ANSWERED:.1%} loses its month within five days.",
            _burns(1 - ANSWERED, _SLOW, measures.failing),
        ),
        Alert(
            *("MalleeBranchesFail", "warning", "10m", "fleet"),
            "{share} of branches end with an error after they began.",
            _more_than(
                0.01,
                share(
                    _FEW.rate("mallee_branches_ended_total", where='reason="error"'),
                    _FEW.rate("mallee_branches_ended_total"),
                ),
            ),
        ),
    ),
)

_LATENCY: Final = Group(
    "mallee-latency",
    (
        Alert(
            *("MalleeFirstTokensLateFast", "critical", "2m", "fleet"),
            f"{{share}} of first tokens take more than {FIRST_TOKEN_S:g} s.",
            _burns(1 - FIRST_TOKEN_SHARE, _FAST, _late),
        ),
        Alert(
            *("MalleeFirstTokensLateSlow", "warning", "15m", "fleet"),
            f"{{share}} of first tokens take more than {FIRST_TOKEN_S:g} s.",
            _burns(1 - FIRST_TOKEN_SHARE, _SLOW, _late),
        ),
        Alert(
            *("MalleeTokensSlow", "warning", "15m", "fleet"),
            "The slowest hundredth of tokens comes {time} after the one before.",
            _more_than(NEXT_TOKEN_S, _FEW.quantile(0.99, "mallee_inter_token_latency_seconds")),
        ),
    ),
)

_QUEUES: Final = Group(
    "mallee-waiting",
    (
        Alert(
            *("MalleeQueueGrows", "warning", "5m", "fleet"),
            "{number} requests wait for a worker with room, and they become more.",
            (
                Condition(_FEW.now("mallee_requests_waiting"), ">", WAITING),
                Condition(f"deriv({_FEW.now('mallee_requests_waiting')}[10m:30s])", ">", 0),
            ),
        ),
        Alert(
            *("MalleeRequestsRefused", "warning", "5m", "fleet"),
            "{share} of requests find no worker with room in time.",
            _more_than(
                0.01,
                share(
                    _FEW.rate("mallee_admission_refusals_total"),
                    _FEW.rate(measures.ANSWERS, where=SERVED),
                ),
            ),
        ),
    ),
)

_ROUTING: Final = Group(
    "mallee-routing",
    (
        Alert(
            *("MalleeBrokerDown", "critical", "2m", "router"),
            "Gateway {gateway} does not reach the broker.",
            _fewer_than(1, _FEW.now("mallee_broker_up", "gateway", how="min")),
        ),
        Alert(
            *("MalleeEventsLate", "warning", "10m", "router"),
            "Gateway {gateway} takes in events {time} late.",
            _more_than(LAG_S, _FEW.quantile(0.99, "mallee_event_lag_seconds", "gateway")),
        ),
        Alert(
            *("MalleeEventsMissing", "warning", "5m", "router"),
            "Gateway {gateway} lacks events of {number} workers, and no snapshot mended it.",
            _more_than(0, _FEW.now("mallee_workers_with_event_gaps", "gateway", how="max")),
        ),
        Alert(
            *("MalleeEventsDropped", "warning", "0m", "router"),
            "Gateway {gateway} dropped messages of the broker for lack of room.",
            _more_than(0, _MORE.growth("mallee_event_messages_dropped_total", "gateway")),
        ),
        Alert(
            *("MalleeGatewaysApart", "warning", "5m", "router"),
            "A gateway does not hear of {number} others: they place requests on each other.",
            _more_than(
                0,
                f"count by (job) ({_FEW.now('mallee_broker_up', 'gateway', how='max')}) - 1"
                f" - {_FEW.now('mallee_other_gateways', how='min')}",
            ),
        ),
        Alert(
            *("MalleeReplicaSkew", "warning", "15m", "router"),
            "Gateway {gateway} is wrong about {share} of running rows.",
            (
                Condition(
                    f"{_FEW.now('mallee_replica_skew_rows', 'gateway')}"
                    f" / clamp_min({_FEW.now('mallee_booked_rows', 'gateway')}, 1)",
                    ">",
                    SKEW,
                ),
                Condition(_FEW.now("mallee_replica_skew_rows", "gateway"), ">", 16),
            ),
        ),
        Alert(
            *("MalleeRegretHigh", "warning", "30m", "router"),
            "{share} of the prompt blocks that some worker has are computed again.",
            _more_than(REGRET, measures.regret(_MORE)),
        ),
        Alert(
            *("MalleeIndexFull", "warning", "30m", "router"),
            "Gateway {gateway} forgets blocks for the byte limit of its index.",
            _more_than(0, _MORE.growth("mallee_index_evictions_total", "gateway")),
        ),
        Alert(
            *("MalleeBookingsExpire", "warning", "15m", "router"),
            "Gateway {gateway} lost {number} bookings: their ends never came.",
            _more_than(10, _MORE.growth("mallee_expired_bookings_total", "gateway")),
        ),
    ),
)

_MEMORY: Final = Group(
    "mallee-memory",
    (
        Alert(
            *("MalleeCapsulesNearLimit", "warning", "10m", "worker"),
            "Capsules take {share} of their room on {worker}, if they share nothing.",
            _crowded(KEPT, measures.kept_on_device(_FEW), measures.in_use(_FEW)),
        ),
        Alert(
            *("MalleeCapsulesRefused", "warning", "0m", "worker"),
            "{number} capsules found no room on {worker}.",
            _more_than(0, _MORE.growth("mallee_worker_refused_capsules_total", "worker")),
        ),
        Alert(
            *("MalleeMemoryShort", "warning", "10m", "worker"),
            "{number} branches of {worker} lost their place for lack of KV blocks.",
            _more_than(10, _MORE.growth("mallee_worker_preemptions_total", "worker")),
        ),
        Alert(
            *("MalleeMemoryFaults", "critical", "0m", "worker"),
            "The KV memory of {worker} is not what was written there.",
            _more_than(0, _MORE.growth("mallee_worker_kv_faults_total", "worker")),
        ),
        Alert(
            *("MalleeHostTierFull", "warning", "10m", "worker"),
            "Capsules hold {share} of the host memory of {worker}.",
            _more_than(FULL, measures.kept_in_host(_FEW)),
        ),
        Alert(
            *("MalleeDiskTierFull", "warning", "10m", "worker"),
            "Capsules take {share} of the disk of {worker}, if they share nothing.",
            _crowded(FULL, measures.kept_on_disk(_FEW), measures.used_of_disk(_FEW)),
        ),
        Alert(
            *("MalleeDemotionsRefused", "warning", "0m", "fleet"),
            "{number} capsules could not be moved to host memory or disk.",
            _more_than(
                0, f"{_MORE.growth(measures.ANSWERS, where=_REFUSED)} or 0 * {_ANY_DEMOTIONS}"
            ),
        ),
        Alert(
            *("MalleeMovesFail", "warning", "0m", "worker"),
            "{number} moves of {worker} between its tiers failed: look at its disk.",
            _more_than(0, _MORE.growth("mallee_worker_failed_moves_total", "worker")),
        ),
        Alert(
            *("MalleeLoansFail", "warning", "5m", "worker"),
            "{number} loans of KV of {worker} ended by an error.",
            _more_than(5, _MORE.growth("mallee_worker_failed_loans_total", "worker")),
        ),
    ),
)

_FAULTS: Final = Group(
    "mallee-faults",
    (
        Alert(
            *("MalleeFailovers", "warning", "0m", "fleet"),
            "{number} branches had to go on elsewhere, for their worker died.",
            _more_than(0, _MORE.growth(_MOVED, where='reason="death"')),
        ),
        Alert(
            *("MalleeWorkersStall", "warning", "0m", "fleet"),
            "{number} branches were moved from workers that made no progress.",
            _more_than(0, _MORE.growth(_MOVED, where='reason="stall"')),
        ),
        Alert(
            *("MalleePausesLong", "warning", "0m", "fleet"),
            "The slowest twentieth of moved branches paused for {time}.",
            _more_than(STALL_S, _MORE.quantile(0.95, "mallee_branch_stall_seconds")),
        ),
        Alert(
            *("MalleeStreamsCut", "warning", "0m", "worker"),
            "{number} streams to gateways were cut, for a gateway fell behind or silent.",
            _more_than(
                0,
                f"{_MORE.growth('mallee_host_slow_streams_total')}"
                f" + {_MORE.growth('mallee_host_silent_gateways_total')}",
            ),
        ),
        Alert(
            *("MalleeRecordsStopped", "warning", "0m", "fleet"),
            "{number} records of sessions ended early, for the disk did not take them.",
            _more_than(
                0,
                _MORE.growth("mallee_session_records_stopped_total", where='reason=~"disk.*"'),
            ),
        ),
        Alert(
            *("MalleeFilesNearLimit", "warning", "10m", "fleet"),
            "{instance} has {share} of its files open.",
            _more_than(0.9, measures.open_files(_FEW)),
        ),
    ),
)

GROUPS: Final = (_AVAILABILITY, _LATENCY, _QUEUES, _ROUTING, _MEMORY, _FAULTS)
