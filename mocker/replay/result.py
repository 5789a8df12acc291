"""The result of a replay: a summary, the conditions, a row for each request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.fleet.workers import Worker
from mallee.mocker.replay.records import Columns, Floats, Histogram, Ints
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import Timing
from mallee.traces.workload import Workload

_SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
MAX_SESSIONS = 1000  # that are reported one by one


class Wall(NamedTuple):
    """Wall-clock cost of the simulation: the run, and apart from it reading and making the fleet."""

    run_s: float
    read_s: float
    open_s: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Result:
    """`columns` have a row for each request that ended, in that order; see `records.Columns`.

    `summary` is one JSON object. Times in it end with their unit; `*_ms` are {p50, p90, p99, mean} over
    requests (of `itl_ms` over gaps between tokens), None where nothing was measured:

    requests (with those that failed, which count in no latency),
    requests_per_s (simulated per second of wall time), wall_s (the run), read_s (the workload),
    open_s (making the fleet), duration_s (virtual),
    virtual_requests_per_s, output_tokens_per_s, prefill_tokens_per_s (virtual; if requests are lost over the
    time until nothing happens any more)
    ttft_ms, itl_ms, e2e_ms, queue_ms (first token less what the prompt would take alone, if computed
    with nothing else on that worker), tpot_ms (mean gap of each request)
    goodput_per_s (virtual: requests within both slo_ttft_ms, slo_itl_ms by their mean gap), slo_share (of all
    requests: those that failed or are lost missed both)
    hit_rate (share of prompt tokens that were there already), prefix_copies (`sharing.Sharing`),
    regret_blocks, spills, evictions, preemptions, retries, rebuilt_capsules
    errors (by code, how many), reasons (by code, the first in words), lost (never ended)
    num_moves, nbytes_moved, broken_moves (of KV from worker to worker: loans of which something came, and
    pulls whose lender was lost meanwhile), tiers (blocks written below the device and fetched)
    fairness_sessions, fairness_workers (Jain), utilisation (mean, and by worker its range: a step lasts as
    long as it waits for a shared device), devices (shares of the time that shared ones work and change
    engines, and how often they change; None where none is shared)
    digest (of all that was delivered, in order), num_events, num_steps, peak_mb

    `workers` are lives in the order of their beginnings: "w1", and "w1#2" when it has come back.
    """

    summary: dict[str, Any]
    conditions: dict[str, Any]
    columns: Columns
    sessions: list[str]
    classes: list[str]
    workers: list[str]
    itl: Histogram
    by_class: dict[str, dict[str, Any]]
    by_session: dict[str, dict[str, Any]]


def summarise(workload: Workload, simulation: Simulation, wall: Wall) -> Result:
    """The result of a simulation that has run."""
    columns = simulation.rows.columns()
    config = simulation.config
    itl = simulation.gaps.histogram()
    queue_s = _queue_s(columns, simulation.timing)
    classes, sessions = list(simulation.classes), list(simulation.sessions)
    workers = list(simulation.fleet.lives.values())
    lost = _num_lost(simulation)
    span_s = simulation.clock.now if lost else float(columns.end_s.max(initial=0.0))
    summary = {
        **_speed(columns, wall, span_s),
        **_latencies(columns, queue_s),
        "itl_ms": _of_gaps(itl, simulation.gaps.mean_s),
        **_goodput(columns, config, span_s, lost),
        **_cache(columns, simulation),
        **_troubles(simulation),
        "lost": lost,
        "fairness_sessions": _session_fairness(columns, len(sessions)),
        "fairness_workers": jain([w.busy_s for w in workers]),
        "utilisation": _utilisation(simulation, span_s),
        "devices": _devices(simulation, span_s),
        "digest": simulation.log.digest(),
        "num_events": simulation.clock.num_events,
        "num_steps": sum(w.num_steps for w in workers),
        "peak_mb": round(wall.peak_mb, 1),
    }
    return Result(
        summary=summary,
        conditions=_conditions(workload, simulation),
        columns=columns,
        sessions=sessions,
        classes=classes,
        workers=_names(workers),
        itl=itl,
        by_class=_groups(columns, queue_s, columns.cls, classes),
        by_session=_groups(columns, queue_s, columns.session, sessions[:MAX_SESSIONS]),
    )


_SETTINGS = (
    *("rules", "engines", "policy", "kv_tokens", "speedup", "concurrency", "gateways", "max_rows"),
    *("max_step_tokens", "max_requests", "max_output_tokens", "keeps_order", "shared_reads"),
    *("prefill_engines", "can_migrate", "retain_s", "seed"),
)


def _conditions(workload: Workload, simulation: Simulation) -> dict[str, Any]:
    config = simulation.config
    timing, tiers = config.timing, config.tiers
    return {
        "trace": workload.name,
        "kind": workload.kind,
        "note": workload.note,
        "id_tokens": workload.id_tokens,
        "block_size": simulation.block_size,
        "timing": timing if isinstance(timing, str) else type(timing.model).__name__,
        **{name: getattr(config, name) for name in _SETTINGS},
        "engines_per_device": config.device.engines,
        "gpus": config.gpus,
        "slice_ms": config.device.slice_s * 1e3 if config.device.slice_s < inf else None,
        "switch_ms": config.device.switch_s * 1e3,
        "event_lag_ms": config.event_lag_s * 1e3,
        "host_tokens": tiers.host_tokens if tiers is not None else 0,
        "disk_tokens": tiers.disk_tokens if tiers is not None else 0,
        "kv_bytes_per_token": config.link.token_nbytes,
        "faults": len(config.faults),
        "slo_ttft_ms": config.slo_ttft_s * 1e3,
        "slo_itl_ms": config.slo_itl_s * 1e3,
    }


def _names(workers: Sequence[Worker]) -> list[str]:
    """One for each life."""
    counts = Counter[str]()
    names: list[str] = []
    for worker in workers:
        counts[worker.name] += 1
        num = counts[worker.name]
        names.append(worker.name if num == 1 else f"{worker.name}#{num}")
    return names


def _num_lost(simulation: Simulation) -> int:
    """Requests that never ended, or never began."""
    clients = simulation.clients
    return clients.num_begun - clients.num_ended + clients.count_waiting()


def _speed(columns: Columns, wall: Wall, duration_s: float) -> dict[str, Any]:
    num = len(columns.number)
    per_s = 1.0 / duration_s if duration_s else 0.0
    return {
        "requests": num,
        "requests_per_s": round(num / wall.run_s, 1) if wall.run_s else 0.0,
        "wall_s": round(wall.run_s, 4),
        "read_s": round(wall.read_s, 4),
        "open_s": round(wall.open_s, 4),
        "duration_s": duration_s,
        "virtual_requests_per_s": num * per_s,
        "output_tokens_per_s": int(columns.output_tokens.sum()) * per_s,
        "prefill_tokens_per_s": int(columns.computed_tokens.sum()) * per_s,
    }


def _latencies(columns: Columns, queue_s: Floats) -> dict[str, Any]:
    ended_s = np.where(
        np.isnan(columns.first_s), np.nan, columns.end_s
    )  # failed requests have no end
    return {
        "ttft_ms": _of_times(columns.first_s - columns.arrival_s),
        "e2e_ms": _of_times(ended_s - columns.arrival_s),
        "queue_ms": _of_times(queue_s),
        "tpot_ms": _of_times(_tpot_s(columns)),
    }


def _tpot_s(columns: Columns) -> Floats:
    """Mean gap between the tokens of each request's branches; NaN with fewer than two."""
    gaps = columns.output_tokens / np.maximum(columns.branches, 1) - 1
    spans = columns.end_s - columns.first_s
    return np.where(gaps > 0, spans / np.maximum(gaps, 1), np.nan)


def _queue_s(columns: Columns, timing: Timing) -> Floats:
    computed, cached = columns.computed_tokens.tolist(), columns.cached_tokens.tolist()
    step_s, path_s = timing.step_s, timing.request_s / timing.speedup
    alone = [
        path_s + step_s([(new, old)], 0, 0) if new else path_s
        for new, old in zip(computed, cached, strict=True)
    ]
    waited: Floats = columns.first_s - columns.arrival_s - np.array(alone)
    return np.maximum(waited, 0.0)


def _of_times(times_s: Floats) -> dict[str, float | None]:
    known = times_s[~np.isnan(times_s)]
    if not len(known):
        return {**{name: None for name, _ in _SHARES}, "mean": None}
    values = np.percentile(known, [share * 100 for _, share in _SHARES]) * 1e3
    named = {name: float(value) for (name, _), value in zip(_SHARES, values, strict=True)}
    return {**named, "mean": float(known.mean()) * 1e3}


def _of_gaps(itl: Histogram, mean_s: float) -> dict[str, float | None]:
    if not itl.counts.any():
        return {**{name: None for name, _ in _SHARES}, "mean": None}
    return {**{name: itl.percentile(share) * 1e3 for name, share in _SHARES}, "mean": mean_s * 1e3}


def _goodput(columns: Columns, config: ReplayConfig, span_s: float, lost: int) -> dict[str, Any]:
    tpot = _tpot_s(columns)
    in_time = columns.first_s - columns.arrival_s <= config.slo_ttft_s
    good = in_time & (np.isnan(tpot) | (tpot <= config.slo_itl_s))
    num = len(good) + lost
    return {
        "goodput_per_s": float(good.sum()) / span_s if span_s else 0.0,
        "slo_share": float(good.sum()) / num if num else None,
    }


def _cache(columns: Columns, simulation: Simulation) -> dict[str, Any]:
    prompt = _prompt_tokens(columns)
    routers = [router for g in simulation.gateways for router in g.routers.values()]
    spilled: dict[str, int] = {}
    for router in routers:
        for (how, _), count in router.stats().spilled.items():
            spilled[how] = spilled.get(how, 0) + count
    return {
        "hit_rate": int(columns.cached_tokens.sum()) / prompt if prompt else 0.0,
        "prefix_copies": simulation.sharing.copies,
        "unique_shared_tokens": simulation.sharing.unique_tokens,
        "copied_tokens": simulation.sharing.copied_tokens,
        "regret_blocks": sum(router.stats().regret_blocks for router in routers),
        "spills": spilled,
    }


def _troubles(simulation: Simulation) -> dict[str, Any]:
    engines = [worker.engine for worker in simulation.fleet.lives.values()]
    return {
        "evictions": sum(engine.num_evicted for engine in engines),
        "preemptions": sum(engine.num_preemptions for engine in engines),
        "retries": sum(gateway.num_retries for gateway in simulation.gateways),
        "rebuilt_capsules": sum(gateway.num_rebuilt for gateway in simulation.gateways),
        **_moves(simulation),
        "tiers": _tiers(simulation),
        "errors": dict(simulation.errors),
        "reasons": dict(simulation.reasons),
    }


def _moves(simulation: Simulation) -> dict[str, int]:
    """Loans of which something came, its bytes, and pulls whose lender was lost meanwhile."""
    peers = simulation.fleet.peers
    if peers is None:
        return {"num_moves": 0, "nbytes_moved": 0, "broken_moves": 0}
    block_nbytes = simulation.block_size * peers.link.token_nbytes
    return {
        "num_moves": peers.num_moves,
        "nbytes_moved": peers.num_blocks * block_nbytes,
        "broken_moves": peers.num_broken,
    }


def _prompt_tokens(columns: Columns) -> int:
    """Of requests that began: what no worker took, none could have had."""
    return int(columns.input_tokens[~np.isnan(columns.first_s)].sum())


def _tiers(simulation: Simulation) -> dict[str, int] | None:
    """Blocks written to and fetched from lower tiers, over all workers; None without them."""
    config = simulation.config.tiers
    lives = simulation.fleet.lives.values()
    if config is None:
        return None
    stats = [each for worker in lives if (each := worker.own.stats().tiers) is not None]
    if not stats:
        return None
    num_fetched = sum(each.num_fetched_host + each.num_fetched_disk for each in stats)
    return {
        "written_blocks": sum(each.num_offloaded for each in stats),
        "spilled_blocks": sum(each.num_spilled for each in stats),
        "fetched_host_blocks": sum(each.num_fetched_host for each in stats),
        "fetched_disk_blocks": sum(each.num_fetched_disk for each in stats),
        "declined_blocks": sum(each.num_declined for each in stats),
        "fetched_nbytes": num_fetched * simulation.block_size * config.token_nbytes,
    }


def _utilisation(simulation: Simulation, end: float) -> dict[str, Any]:
    shares = [
        worker.busy_s / span
        for worker in simulation.fleet.lives.values()
        if (span := min(worker.left_s, max(end, worker.busy_until)) - worker.joined_s) > 0
    ]
    if not shares:
        return {"mean": None, "least": None, "most": None}
    return {"mean": sum(shares) / len(shares), "least": min(shares), "most": max(shares)}


def _devices(simulation: Simulation, end: float) -> dict[str, Any] | None:
    """The work and the changes of shared devices; None without any."""
    if simulation.fleet.devices is None or not end:
        return None
    stats, config = simulation.fleet.devices.stats(), simulation.config
    span_s = end * -(-config.engines // config.device.engines)
    return {
        "busy": stats.busy_s / span_s,
        "switching": stats.switching_s / span_s,
        "num_switches": stats.num_switches,
    }


def jain(values: Sequence[float]) -> float | None:
    """Jain's index of fairness: 1 when all are equal, 1 / n when one has everything."""
    array = np.asarray(values, dtype=np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares else None


def _session_fairness(columns: Columns, num_sessions: int) -> float | None:
    """Jain's index over what sessions get: output tokens in a second that they wait for answers."""
    if num_sessions < 2:
        return None
    tokens = np.bincount(columns.session, columns.output_tokens, num_sessions)
    waited = np.bincount(columns.session, columns.end_s - columns.arrival_s, num_sessions)
    return jain(list(tokens[waited > 0] / waited[waited > 0]))


def _groups(
    columns: Columns, queue_s: Floats, group: Ints, names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Percentiles for each of the first `names` of `group`."""
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(names) + 1))
    found: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        picked = order[bounds[i] : bounds[i + 1]]
        part = columns.picked(picked)
        prompt = _prompt_tokens(part)
        found[name] = {
            "requests": len(picked),
            **_latencies(part, queue_s[picked]),
            "hit_rate": int(part.cached_tokens.sum()) / prompt if prompt else 0.0,
        }
    return found
