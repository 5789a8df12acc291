"""Searches on a mocked H200: the programs, and the ways of serving them."""

from dataclasses import replace

import numpy as np
import pytest

from bench.search.__main__ import PROFILE, first_tokens
from bench.search.decode import decode_cost
from bench.search.programs import SHAPES, Program, Text, drawn_text
from bench.search.ways import WAYS, Setting, play
from mallee.mocker.timing import load_timing

TIMING = replace(load_timing(PROFILE), jitter=0.05)
SMALL = {"expansions": 6, "rollouts": 5, "tokens": 20, "leaves": 2}


def rounds(program: Program) -> list[list[tuple[int, int, int]]]:
    """Of each expansion: tokens of its text, answers and their length; answers are all zeros."""
    found = []
    expands = next(program)
    while True:
        found.append([(len(e.text.tokens) + len(e.suffix), e.width, e.tokens) for e in expands])
        texts = [
            [
                Text(np.concatenate([e.text.tokens, e.suffix, np.zeros(e.tokens, np.uint32)]))
                for _ in range(e.width)
            ]
            for e in expands
        ]
        try:
            expands = program.send(texts)
        except StopIteration:
            return found


@pytest.mark.parametrize(("shape", "leaves"), [("mcts", 1), ("mcts_4", 4)])
def test_the_search_expands_50_texts_by_1000_rollouts_of_50_tokens(shape: str, leaves: int) -> None:
    """D24, part: the tree grows below its own answers, and no text is expanded twice at once."""
    found = rounds(SHAPES[shape].begin(Text(drawn_text(1, 100)), 7))
    expansions = [each for round in found for each in round]
    assert len(expansions) == 50
    assert {each[1:] for each in expansions} == {(20, 50)}
    assert expansions[0][0] == 100
    assert all(each[0] % 50 == 0 and each[0] > 100 for each in expansions[1:])
    assert {100, 150, 200} <= {each[0] for each in expansions}
    assert max(map(len, found)) == leaves


def test_levels_beams_and_votes_have_their_widths() -> None:
    root = Text(drawn_text(1, 10))
    levels = rounds(SHAPES["tree"].begin(root, 1))
    assert [each for (each,) in levels] == [(10 + 16 * i, 5, 16) for i in range(10)]
    beams = rounds(SHAPES["beam"].begin(root, 1))
    assert [len(each) for each in beams] == [1] + [4] * 7
    thoughts = rounds(SHAPES["thoughts"].begin(root, 1))
    assert [(len(each), each[0][1:]) for each in thoughts[:4]] == [
        *[(1, (5, 32)), (5, (3, 8))],
        *[(5, (5, 32)), (25, (3, 8))],
    ]


def test_a_search_is_the_same_by_all_ways_and_in_a_pool_that_loses_capsules() -> None:
    """D24, part, I20, part: forks, requests with and without a cache, and evicted capsules."""
    shape = SHAPES["mcts"]._replace(figures=SMALL)
    wide = Setting(TIMING, 100_000, 200, searches=2)
    narrow = wide._replace(kv_tokens=1024)
    runs = {(s.kv_tokens, way): play(shape, way, s, 1) for s in (wide, narrow) for way in WAYS}
    assert len({run.answers for run in runs.values()}) == 1
    assert {run.drawn for run in runs.values()} == {2 * 6 * 5 * 20}
    # Of a request with n answers each computes the last token of the prompt; of forks none does.
    assert runs[100_000, "tree"].prefilled == 2 * (200 + 5)
    assert runs[100_000, "tree"].resent == 0
    assert runs[1024, "tree"].resent > 0
    assert runs[1024, "cached"].prefilled > runs[100_000, "cached"].prefilled
    resent = runs[100_000, "resent"]
    assert resent.prefilled >= 2 * 6 * 5 * 200, "each answer's whole text"
    assert resent.peak_blocks > 4 * runs[100_000, "tree"].peak_blocks


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    shape, setting = SHAPES["mcts"]._replace(figures=SMALL), Setting(TIMING, 100_000, 200)
    first, again, other = (play(shape, "tree", setting, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.answers != other.answers
    assert first.total_s != other.total_s


def test_a_text_costs_what_the_timing_says() -> None:
    """One answer of two tokens, without jitter: the request, a prefill, a decode."""
    timing = load_timing(PROFILE)
    shape = SHAPES["chain"]._replace(figures={"depth": 1, "width": 1, "tokens": 2})
    run = play(shape, "resent", Setting(timing, 100_000, 300), 1)
    first = timing.request_s + timing.step_s([(300, 0)], 0, 0)
    assert run.ttft_s == pytest.approx((first,))
    # The first token's own KV is there when the second is drawn.
    assert run.total_s == pytest.approx(first + timing.step_s([], 1, 301), rel=1e-3)


def test_captures_cost_less_than_a_fiftieth_of_a_decode_step() -> None:
    """F15, part: host time of a step with a capture of each row every 64 tokens, against an H200's step."""
    cost = decode_cost(TIMING, 8, num_steps=64)
    assert cost.plain_us > 0
    assert cost.slowdown < 1.02


def test_the_gain_in_first_tokens_grows_with_the_prompt() -> None:
    """F16, part: 2, 4 and 8 thousand tokens; a capsule's first token takes as long after any of them."""
    found = first_tokens(TIMING, 100_000, 3)
    for name in ("fork", "restore"):
        gains = [found[str(n)][f"{name}_speedup"]["median"] for n in (2048, 4096, 8192)]
        assert 2 < gains[0] < gains[1] < gains[2]
    assert abs(found["slope_us_per_token"]["restore"]) < 0.01 * found["slope_us_per_token"]["cold"]
