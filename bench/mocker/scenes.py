"""Scenes of forks and agents in virtual time: what `bench/mocker/__main__.py` says of them beside speed."""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from bench.doubles.workloads import agents, made, siblings
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.traces.workload import Request

# Two agents on one document, as SwarmKV's authors measured them: one after another 10,275 ms, 4,339 of
# them for either's document. These two calibrate the engine: the rest of each half is its answer.
DOCUMENT_TOKENS: Final = 3500
ANSWER_TOKENS: Final = 32
PREFILL_S, APART_S = 4.339, 10.275
MEASURED: Final = {"shared_ms": 5272.0, "speedup": 1.95, "second_activation_ms": 83.0}

QUESTION_TOKENS: Final = 16
KNEE_GAIN: Final = 1.5  # of twice the agents; less is less than half of what they should bring


def document(readers: int = 50, tokens: int = 50_000) -> dict[str, Any]:
    """`readers` of one document that arrive together, cold, on 8 engines: by policy."""
    scene = siblings(1, readers, prefix_tokens=tokens, suffix_tokens=128, output_tokens=64)
    config = ReplayConfig(engines=8, kv_tokens=262_144)
    return {
        policy: _document(replay(scene, replace(config, policy=policy))) for policy in _POLICIES
    }


_POLICIES: Final = ("cost", "round_robin")


def _document(result: Result) -> dict[str, Any]:
    return {
        "prefix_copies": result.summary["prefix_copies"],
        "prefill_tokens": int(result.columns.computed_tokens.sum()),
        "slowest_s": float(result.columns.end_s.max()),
    }


def two_agents() -> dict[str, Any]:
    """Each computes the document, one after the other; or both fork it, each with a question of its own.

    `second_activation_ms`: from the document's last token computed to the second one's first token.
    """
    step_s = (APART_S / 2 - PREFILL_S) / (ANSWER_TOKENS - 1)
    device = ClosedForm(0.0, PREFILL_S / DOCUMENT_TOKENS, 0.0, 0.0, (Plane(step_s, 0.0, 0.0),))
    config = ReplayConfig(engines=1, kv_tokens=65_536, timing=Timing(device))
    config = replace(config, max_step_tokens=DOCUMENT_TOKENS + 64)
    ids = -(-DOCUMENT_TOKENS // 16)
    cold = [
        Request(i, 0.0, range(ids * i, ids * (i + 1)), DOCUMENT_TOKENS, ANSWER_TOKENS)
        for i in range(2)
    ]
    root = Request(0, 0.0, range(ids), DOCUMENT_TOKENS, 0, num_children=1)
    fork = Request(1, 0.0, (), QUESTION_TOKENS, ANSWER_TOKENS, parent=0, branches=2)
    apart = replay(made(cold, name="apart", id_tokens=16), replace(config, concurrency=1))
    shared = replay(made([root, fork], name="shared", id_tokens=16), config)
    columns = shared.columns
    apart_ms, shared_ms = (1e3 * float(each.columns.end_s.max()) for each in (apart, shared))
    return {
        "apart_ms": apart_ms,
        "shared_ms": shared_ms,
        "speedup": apart_ms / shared_ms,
        "second_activation_ms": 1e3 * float(columns.first_s[-1] - columns.arrival_s[-1]),
        "measured": MEASURED,
    }


def agents_sweep(most: int = 64) -> dict[str, Any]:
    """1, 2, 4 .. `most` agents on one engine: what each gets, how evenly, and where more add little."""
    rows: dict[str, Any] = {}
    rates: dict[int, float] = {}
    num = 1
    while num <= most:
        scene = agents(num, 8, document_tokens=4096, turn_tokens=512, output_tokens=128)
        result = replay(scene, ReplayConfig(engines=1, kv_tokens=524_288))
        rates[num] = result.summary["output_tokens_per_s"]
        rows[str(num)] = {
            "output_tokens_per_s": rates[num],
            **_per_agent(result),
            "fairness": _fairness(result),
        }
        num *= 2
    return {**rows, "knee": knee(rates)}


def _per_agent(result: Result) -> dict[str, Any]:
    """Milliseconds of a turn, over all agents' turns; jitter: how far an agent's turns differ."""
    columns = result.columns
    turns = columns.output_tokens > 0
    took = 1e3 * (columns.end_s - columns.arrival_s)[turns]
    session = columns.session[turns]
    spreads = [took[session == s].std() for s in np.unique(session)]
    return {
        "turn_ms": {f"p{q}": float(np.percentile(took, q)) for q in (50, 95, 99)},
        "jitter_ms": float(np.mean(spreads)),
    }


def _fairness(result: Result) -> float | None:
    """Jain's index over the agents' output tokens a second; one agent is fair to itself."""
    shares = [
        float(columns.output_tokens.sum() / (columns.end_s - columns.arrival_s).sum())
        for name in result.by_session
        if name
        for columns in [_of_session(result, name)]
    ]
    total, squares = sum(shares), sum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares else None


def _of_session(result: Result, name: str) -> Any:
    picked = np.flatnonzero(result.columns.session == result.sessions.index(name))
    return result.columns.picked(picked)


def knee(rates: dict[int, float]) -> int | None:
    """The fewest agents of which twice as many bring less than half as much again; None: none did."""
    for num, rate in rates.items():
        if 2 * num in rates and rates[2 * num] < KNEE_GAIN * rate:
            return num
    return None
