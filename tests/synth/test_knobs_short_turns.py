"""K24: what knobs and lengths do where turns are short, sessions few, or all come at once."""

import msgspec
import numpy as np
import pytest

from mallee.synth.core.knobs import Knobs
from mallee.synth.fit import fit
from mallee.traces.trace import Trace, trace_of
from mallee.traces.workload import Request, Workload

SIZE = 16


def workload(requests: list[Request]) -> Workload:
    ordered = sorted(requests, key=lambda each: each.arrival_s)
    numbered = [msgspec.structs.replace(each, number=i) for i, each in enumerate(ordered)]
    return Workload("made", SIZE, lambda: iter(numbered))


def chats(
    num: int, *, every_s: float, turns: int = 12, seed: int = 0, system: int = 4
) -> list[Request]:
    """Sessions over one system prompt, whose turns add about a block, and one that drops what it had."""
    rng = np.random.default_rng(seed)
    requests = []
    free = 1000
    for session in range(num):
        tokens, ids = system * SIZE, list(range(system))
        for turn in range(turns):
            if turn == turns // 2:
                keep = system + 2
                tokens, ids = keep * SIZE, ids[:keep]
            tokens += int(rng.integers(5, 30))
            more = tokens // SIZE - len(ids)
            ids = [*ids, *range(free, free + more)]
            free += more
            at_s = session * every_s + 3.0 * turn + rng.random()
            requests.append(Request(0, at_s, list(ids), tokens, 20, f"s{session}"))
    return requests


def made(source: Trace, requests: int, seed: int = 1, **turned: object) -> Trace:
    knobs = Knobs(**turned)  # type: ignore[arg-type]
    return trace_of(fit(source, "session").generate(requests=requests, seed=seed, knobs=knobs))


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.5])
def test_own_text_grows_exactly(factor: float) -> None:
    """The begin of a block that the turn before had is not new, though the block is."""
    source = trace_of(workload(chats(60, every_s=5.0)))
    own = [
        np.mean([made(source, 720, seed, **turned).input_tokens.mean() for seed in range(4)])
        - 4 * SIZE
        for turned in ({}, {"prompt_len": factor})
    ]
    assert own[1] == pytest.approx(factor * own[0], rel=0.04)


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_a_context_that_is_dropped_keeps_the_prompt(factor: float) -> None:
    """Prefixes of sessions stay whole at any length of own text."""
    source = trace_of(workload(chats(60, every_s=5.0)))
    turned = made(source, 720, prompt_len=factor)
    system = turned.path(0)[:4]
    assert all((turned.path(i)[:4] == system).all() for i in range(len(turned)))


def test_one_session_is_followed_by_others() -> None:
    """X9, part: one begin has no rate; sessions then come one after another, not one a second."""
    source = trace_of(workload(chats(1, every_s=1.0, turns=50)))
    length_s = float(source.arrival_s[-1])
    longer = made(source, 500)
    assert float(longer.arrival_s[-1]) == pytest.approx(10 * length_s, rel=0.15)


@pytest.mark.slow
def test_sessions_that_begin_at_once_do_so_again() -> None:
    """X9, part: as many as in the source, and the next when its length has passed."""
    source = trace_of(workload(chats(20, every_s=0.0)))
    source.arrival_s[:20] = 0.0
    longer = made(source, 4 * len(source))
    rate = len(source) / float(source.arrival_s[-1])
    assert len(longer) / float(longer.arrival_s[-1]) == pytest.approx(rate, rel=0.15)
    all_at_once = trace_of(workload([Request(0, 0.0, [i], SIZE, 5) for i in range(3)]))
    many = made(all_at_once, 3000)
    assert np.bincount(np.searchsorted(np.unique(many.arrival_s), many.arrival_s)).tolist() == (
        [3] * 1000
    )


def test_sessions_take_turns_at_one_time() -> None:
    """X9, part: the first calls of all sessions come first, and all after those they wait for."""
    requests = [
        Request(0, 0.0, list(range(100 * s, 100 * s + turn + 1)), SIZE * (turn + 1), 5, f"s{s}")
        for turn in range(4)
        for s in range(10)
    ]
    generated = list(fit(trace_of(workload(requests)), "session").generate(requests=40, seed=1))
    assert [r.input_tokens // SIZE for r in generated] == [1] * 10 + [2] * 10 + [3] * 10 + [4] * 10
    assert [len(r.wait_for) for r in generated] == [0] * 10 + [1] * 30


def test_joins_come_after_those_they_wait_for_at_one_time() -> None:
    """X9, part: a caller, two children of two calls each, and the call that joins them, all at once."""
    requests = []
    for s in range(12):
        own = 100 * s
        first = len(requests)
        names = [("main", [own], ()), *(("child", [own + c], (first,)) for c in (10, 20))]
        names += [
            ("child", [own + c, own + c + 1], (first + k + 1,)) for k, c in enumerate((10, 20))
        ]
        names.append(("main", [own, own + 1], (first, first + 3, first + 4)))
        for cls, ids, waits in names:
            tokens = SIZE * len(ids)
            requests.append(
                Request(len(requests), 0.0, ids, tokens, 5, f"s{s}", cls, wait_for=waits)
            )
    source = trace_of(workload(requests))
    generated = list(fit(source, "session").generate(requests=len(requests), seed=2))
    joins = [r for r in generated if r.cls == "main" and r.input_tokens == 2 * SIZE]
    assert [len(r.wait_for) for r in joins] == [3] * 12
    assert [r.cls for r in generated[-12:]] == ["main"] * 12
