"""JSON-able bodies of a router's state, for its operator: workers, decisions, health, places of metrics."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mallee.protocol.errors import NotFound, shown
from mallee.protocol.events import Load, TierUse
from mallee.protocol.ids import RequestId
from mallee.protocol.model import WeightChange
from mallee.router.placement.decisions import Candidate, Decision
from mallee.router.placement.fanout_pricing import Prices
from mallee.router.placement.pulls import Pull
from mallee.router.router import Router
from mallee.router.views import WorkerView


def workers_body(views: Iterable[WorkerView], loads: Mapping[str, Load]) -> dict[str, Any]:
    """Workers. Incarnations are strings: they may exceed what JavaScript counts exactly.

    `loads`: what workers hold and did, as they say now; those that don't answer are not in it.
    """
    return {
        "object": "list",
        "data": [
            {
                **view._asdict(),
                "object": "worker",
                "incarnation": str(view.incarnation),
                "weight_change": _change(view.weight_change),
                **_held(loads.get(view.worker)),
            }
            for view in views
        ],
    }


def _held(load: Load | None) -> dict[str, Any]:
    if load is None or load.use is None:
        return {"use": None, "tiers": None}
    use = load.use
    counts = {
        "running_branches": load.rows,
        "waiting_branches": load.waiting,
        "live_blocks": use.live_blocks,
        "cached_blocks": use.cached_blocks,
        "capsules": use.kept_capsules,
        "cached_tokens": use.num_cached_tokens,
        "prefill_tokens": use.num_prefill_tokens,
        "evicted_blocks": use.num_evicted_blocks,
        "preemptions": use.num_preemptions,
    }
    return {"use": counts, "tiers": None if use.tiers is None else _tiers(use.tiers)}


def _tiers(use: TierUse) -> dict[str, Any]:
    return {
        "block_nbytes": use.block_nbytes,
        "blocks": use.blocks,
        "held_blocks": use.host_held,
        "moved_blocks": use.moved_blocks,
        "dropped_blocks": use.num_dropped,
        "declined_blocks": use.num_declined,
        "failed_moves": use.num_failed,
    }


def _change(change: WeightChange | None) -> dict[str, Any] | None:
    if change is None:
        return None
    return {"version": change.target.label, "state": change.state, "reason": change.reason}


def health_body(
    router: Router,
    gateway: str,
    expected_workers: int,
    *,
    is_sound: bool,
    is_full: bool,
    key_fault: str,
) -> dict[str, Any]:
    """`status` and its cause: ok, degraded or unavailable (no worker).

    Degraded: no broker, its store `is_full`, workers missing, a fault in the file of keys, or the gateway is
    not `is_sound`.
    """
    stats = router.stats()
    broker = "up" if stats.is_broker_up else "down"
    store = "full" if is_full else broker
    is_right = is_sound and not key_fault
    is_whole = is_right and store == "up" and stats.num_workers >= expected_workers
    status = "ok" if is_whole else "degraded"
    if not stats.num_workers:
        status = "unavailable"
    return {
        "status": status,
        "gateway": gateway,
        "broker": broker,
        "store": store,
        "keys": key_fault or "ok",
        "workers": [
            {"worker": view.worker, "incarnation": str(view.incarnation), "rows": view.rows}
            for view in router.workers()
        ],
    }


def targets_body(
    fleet: str, gateways: Iterable[str], workers: Iterable[str]
) -> list[dict[str, Any]]:
    """Addresses at which processes serve their metrics, as Prometheus' HTTP service discovery reads them.

    Source: Prometheus, http_sd_config.
    """
    processes = {"gateway": gateways, "worker": workers}
    return [
        {"targets": found, "labels": {"process": process, "fleet": fleet}}
        for process, addresses in processes.items()
        if (found := sorted(filter(None, addresses)))
    ]


def decisions_body(
    router: Router,
    request: RequestId | None,
    limit: int,
    candidates: int,
    life: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The last decisions, youngest first; with `request`, its own alone: one for each part of it.

    Each with its `candidates` cheapest workers and the chosen one; `life` is the request's course. Raises
    NotFound if nothing about `request` is remembered.
    """
    decisions = router.decisions(limit, of=request, candidates=candidates)
    if request is not None and not decisions and life is None:
        raise NotFound(
            f"request {shown(request)} is not in the decision log (another gateway's, or too long ago)",
            param="request",
            request=request,
        )
    body: dict[str, Any] = {"object": "list", "data": [_decision(each) for each in decisions]}
    return body if life is None else {**body, "life": life}


def _decision(decision: Decision) -> dict[str, Any]:
    body: dict[str, Any] = {
        "object": "route.decision",
        "number": decision.number,
        "request": decision.request,
        "worker": decision.worker,
        "reason": decision.reason,
        "prompt_tokens": decision.prompt_tokens,
        "num_blocks": decision.num_blocks,
        "rows": decision.rows,
        "num_candidates": decision.num_candidates,
        "candidates": [_candidate(each) for each in decision.candidates],
    }
    if decision.spill is not None:
        body["spill"] = {"how": decision.spill.how, **_prices(decision.spill.prices)}
    if decision.pull is not None:
        body["pull"] = _pull(decision.pull)
    return body


def _prices(prices: Prices) -> dict[str, float | None]:
    """In seconds; null for a way that is barred."""
    return {
        name: seconds if math.isfinite(seconds) else None
        for name, seconds in prices._asdict().items()
    }


def _pull(pull: Pull) -> dict[str, Any]:
    return {
        "reason": pull.reason,
        "blocks": pull.num_blocks,
        "bytes": pull.nbytes,
        "from": [
            {"worker": each.worker, "tokens": each.num_tokens, "capsule": each.capsule or None}
            for each in pull.holders
        ],
        **_prices(pull.prices),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    is_eligible = math.isfinite(candidate.total)
    return {
        "worker": candidate.worker,
        "eligible": is_eligible,
        "overlap_blocks": candidate.overlap_blocks,
        "matched_blocks": candidate.matched_blocks,
        "pulled_blocks": candidate.pulled_blocks,
        **candidate.cost._asdict(),
        "total": candidate.total if is_eligible else None,
    }
