"""Replays of agents whose KV doesn't fit: recorded Claude-Code sessions, sessions in turn, a wide fan-out.

    python -m bench.capsule.replays [--requests N] [--trace FILE] [--seed N]

In virtual time on mocked engines (H200, Llama 3.1 8B in FP8; 128 KiB of KV a token; host memory of four
times the device over 25 GB/s): real router, scheduler, pool and tiers. Oversubscription is the mean of
what live sessions have in context, over the KV memory of all devices. A session's time is from its first
request to the end of its last, its tools' time included. The last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench import TRACES
from bench.doubles.workloads import made
from bench.measure import rounded
from bench.router.fanout import Scene, play
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.tiers import TierConfig
from mallee.traces.read import read_workload
from mallee.traces.workload import Request, Workload

TRACE: Final = TRACES / "claude_code_sessions.jsonl.gz"
ENGINES: Final = 1
SESSIONS_PER_HOUR: Final = 240.0
MAX_PROMPT: Final = 250_000  # of a session; those with a longer one are left out
BLOCK_TOKENS: Final = 256
OVERSUBSCRIBED: Final = (0.7, 1.4, 3.0)
HOST_SHARE: Final = 4  # host memory of a worker, as a multiple of its device's
RETAIN_S: Final = 300.0


class Way(NamedTuple):
    """Retention and tiers of a fleet."""

    retain_s: float = 0.0
    has_tiers: bool = False


WAYS: Final = {
    "lru": Way(),
    "retention": Way(RETAIN_S),
    "tiers": Way(has_tiers=True),
    "retention_tiers": Way(RETAIN_S, has_tiers=True),
}


def sessions(trace: Path, num_requests: int, seed: int) -> tuple[Workload, int]:
    """The first whole sessions of `trace` with so many requests in all, and how many were too long."""
    every = read_workload(trace, seed=seed, sessions_per_hour=SESSIONS_PER_HOUR)
    by_session: dict[str, list[Request]] = {}
    for request in every:
        by_session.setdefault(request.session, []).append(request)
    kept: list[Request] = []
    num_long = 0
    for requests in by_session.values():
        if len(kept) >= num_requests:
            break
        if max(request.input_tokens for request in requests) > MAX_PROMPT:
            num_long += 1
            continue
        kept += requests
    kept.sort(key=lambda request: request.number)
    numbers = {request.number: i for i, request in enumerate(kept)}
    renumbered = [
        Request(
            number=numbers[each.number],
            arrival_s=each.arrival_s,
            ids=each.ids,
            input_tokens=each.input_tokens,
            output_tokens=each.output_tokens,
            session=each.session,
            cls=each.cls,
            wait_for=tuple(numbers[name] for name in each.wait_for),
            tool_wait_s=each.tool_wait_s,
        )
        for each in kept
    ]
    return made(renumbered, name=trace.name, id_tokens=every.id_tokens), num_long


def live_tokens(workload: Workload) -> float:
    """Tokens that live sessions have in context, as recorded: the mean over time till the last one begins."""
    by_session: dict[str, list[Request]] = {}
    for request in workload:
        by_session.setdefault(request.session, []).append(request)
    end = max(requests[0].arrival_s for requests in by_session.values())
    total = 0.0
    for requests in by_session.values():
        for request, after in pairwise(requests):
            until = min(after.arrival_s, end)
            if request.arrival_s < until:
                num = request.input_tokens + request.output_tokens
                total += num * (until - request.arrival_s)
    return total / end


def figures(result: Result) -> dict[str, Any]:
    """The figures of a replay that are kept."""
    columns, summary = result.columns, result.summary
    num = len(result.sessions)
    ends, begins = np.zeros(num), np.full(num, np.inf)
    np.maximum.at(ends, columns.session, columns.end_s)
    np.minimum.at(begins, columns.session, columns.arrival_s)
    times = ends - begins
    return {
        "requests": summary["requests"],
        "sessions": num,
        "session_s": {"mean": float(times.mean()), "p50": float(np.median(times))},
        "serving_s": float(
            (columns.end_s - columns.arrival_s).sum() / num
        ),  # of a session, without its tools
        "hit_rate": summary["hit_rate"],
        "ttft_ms": summary["ttft_ms"],
        "prefill_tokens": int(columns.computed_tokens.sum()),
        "tiers": summary["tiers"],
        "evictions": summary["evictions"],
        "errors": summary["errors"],
        "utilisation": summary["utilisation"]["mean"],
        "wall_s": summary["wall_s"],
    }


def on(engines: int, kv_tokens: int, way: Way, seed: int) -> ReplayConfig:
    """A fleet with so many tokens of KV on each device."""
    return ReplayConfig(
        engines=engines,
        kv_tokens=kv_tokens,
        block_size=BLOCK_TOKENS,
        retain_s=way.retain_s,
        tiers=TierConfig(host_tokens=HOST_SHARE * kv_tokens) if way.has_tiers else None,
        seed=seed,
    )


def oversubscribed(workload: Workload, seed: int) -> list[dict[str, Any]]:
    """Recorded sessions on devices that hold less and less of what is live, each way."""
    live = live_tokens(workload)
    found = []
    for times in OVERSUBSCRIBED:
        kv_tokens = int(live / times / ENGINES)
        ways = {name: on(ENGINES, kv_tokens, way, seed) for name, way in WAYS.items()}
        runs = {name: figures(replay(workload, config)) for name, config in ways.items()}
        found.append({"oversubscribed": times, "kv_tokens": kv_tokens, "live_tokens": live, **runs})
    return found


def turns(num_sessions: int, num_turns: int, tokens: int, wait_s: float) -> Workload:
    """Sessions that begin with a text of their own, and take turns of 512 tokens and 64 of answer."""
    requests: list[Request] = []
    own = 1 << 20  # ids of a session
    for turn in range(num_turns):
        for session in range(num_sessions):
            number = len(requests)
            num = tokens + turn * 576
            ids = range(session * own, session * own + -(-num // BLOCK_TOKENS))
            requests.append(
                Request(
                    number,
                    session * wait_s / num_sessions + turn * wait_s,
                    ids,
                    num,
                    64,
                    f"s{session}",
                    wait_for=(number - num_sessions,) if turn else (),
                    tool_wait_s=wait_s,
                )
            )
    return made(requests, name="turns", id_tokens=BLOCK_TOKENS)


def fourfold(seed: int) -> dict[str, Any]:
    """32 sessions of 24,000 tokens and more that take turns on one device with room for 8 of them."""
    workload = turns(32, 8, 24_000, 20.0)
    room = 8 * 28_032
    ways = {
        "all_fit": on(1, 4 * room, Way(), seed),
        "lru": on(1, room, Way(), seed),
        "tiers": on(1, room, Way(has_tiers=True), seed),
    }
    return {"kv_tokens": room} | {
        name: figures(replay(workload, config)) for name, config in ways.items()
    }


def fan_out() -> dict[str, Any]:
    """512 children of a capsule of 4,096 tokens on 8 workers, with and without migration of the capsule."""
    kept = ("slowest_child_ms", "moved_nbytes", "prefix_copies", "bookings_max_mean")
    runs = {
        can_migrate: play(Scene(8, 512, can_migrate=can_migrate)) for can_migrate in (False, True)
    }
    found = {
        name: {key: runs[can_migrate][key] for key in kept}
        for name, can_migrate in (("recomputed", False), ("migrated", True))
    }
    alone = play(Scene(1, 512 // 8))  # nothing to move, nothing to wait for
    return {**found, "an_eighth_where_it_is_ms": alone["slowest_child_ms"]}


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(args)
    workload, num_long = sessions(asked.trace, asked.requests, asked.seed)
    found = {
        "engines": ENGINES,
        "left_out": num_long,
        "fan_out": fan_out(),
        "fourfold": fourfold(asked.seed),
        "sessions": oversubscribed(workload, asked.seed),
    }
    sys.stdout.write(json.dumps(rounded(found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
