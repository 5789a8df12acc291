"""The ring of decisions keeps the last ones, with the prices they were made by."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.placement.decisions import Decision, DecisionLog, Entry
from mallee.router.placement.fanout_pricing import Prices, Share
from mallee.router.placement.kernels import score
from mallee.router.placement.pricing import Demand

NAMES = (WorkerId("a"), None, WorkerId("c"))


def terms(seed: float) -> np.ndarray:
    """Prices of three slots, of which the second is empty."""
    made = np.full((score.NUM_TERMS_LENT, 3), np.inf, dtype=np.float32)
    for slot, total in ((0, 2.0), (1, 0.0), (2, 1.0)):
        made[:, slot] = (seed, 0.25, 0.5, 1.5, 0.75, seed + total, 0.125, 3.0)
    return made


def entry(name: str, seed: float) -> Entry:
    demand = Demand(100, 6, 1, 7, 2, 10)
    return Entry(RequestId(name), 2, "cost", seed, demand, terms(seed), NAMES, None)


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=30))
def test_the_last_decisions_are_kept_with_their_own_prices(size: int, stream: list[int]) -> None:
    """X11"""
    log = DecisionLog(size)
    truth: list[tuple[int, str, float]] = []
    for at, number in enumerate(stream):
        name = f"r{number}"
        assert log.add(entry(name, float(at))) == len(truth)
        truth.append((len(truth), name, float(at)))
        kept = truth[-size:][::-1]
        assert [key(d) for d in log.last(100)] == kept
        assert [key(d) for d in log.last(2)] == kept[:2]
        assert log.last(0) == log.last(-1) == []
        for name in ("r0", "r1", "never"):
            found = log.last(100, of=RequestId(name))
            assert [key(d) for d in found] == [each for each in kept if each[1] == name]


def key(decision: Decision) -> tuple[int, str, float]:
    assert all(each.overlap_blocks == decision.at for each in decision.candidates)
    return (decision.number, decision.request, decision.at)


def test_a_decision_shows_every_candidate_cheapest_first() -> None:
    """X11: names as they were then; workers where it could not go are dearest of all."""
    log = DecisionLog(4)
    spill = Share(2, 2, "migrate", Prices(3.0, 1.0, 2.0))
    made = entry("r", 7.0)
    made.terms[score.TERM_TOTAL, 0] = np.inf
    number = log.add(made._replace(reason="fan_out", at=5.5, share=spill))
    (decision,) = log.last(1, of=RequestId("r"))
    assert decision[:8] == (number, 5.5, "r", "c", "fan_out", 100, 6, 2)
    assert decision.spill == spill
    assert [each.worker for each in decision.candidates] == ["c", "a"]
    assert [each.total for each in decision.candidates] == [8.0, math.inf]
    cost = decision.candidates[0].cost
    assert tuple(cost) == (0.25, 0.5, 1.5, 0.75, 0.125)
    assert decision.candidates[0].pulled_blocks == 3
    assert cost.total_s == pytest.approx(3.125)


def test_equally_dear_candidates_are_in_slot_order() -> None:
    """X11"""
    log = DecisionLog(1)
    made = entry("r", 0.0)
    made.terms[score.TERM_TOTAL] = 4.0
    names = (WorkerId("z"), WorkerId("y"), WorkerId("x"))
    log.add(made._replace(slot=0, names=names))
    assert [each.worker for each in log.last(1)[0].candidates] == ["z", "y", "x"]
