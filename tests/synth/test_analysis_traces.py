"""The published figures of real traces, found again. They lie beside the repository, or are skipped."""

from functools import cache

import numpy as np
import pytest

from mallee.synth.analysis.analysis import Analysis, analyze
from mallee.traces.read import read_workload
from mallee.traces.trace import trace_of
from support.public_traces import PUBLIC, needs_public

pytestmark = needs_public


@cache
def analysis(name: str, block_size: int) -> Analysis:
    workload = read_workload(PUBLIC / name, seed=1)
    return analyze(trace_of(workload, block_size=block_size))


def test_mooncake_conversation() -> None:
    """X9, part: K23's curve, roots, branches and hits of the conversation trace."""
    found = analysis("mooncake_conversation.jsonl.gz", 512)
    assert (found.num_requests, found.rule, found.roots) == (12_031, "ceil", 1)
    assert found.curve.ideal == pytest.approx(0.366, abs=5e-4)
    assert len(found.branch_widths) == 3_876
    assert np.mean(found.branch_widths == 2) == pytest.approx(0.88, abs=0.005)
    assert found.branch_widths.max() == 7_373
    curve = [0.044, 0.052, 0.079, 0.195, 0.278, 0.345, 0.360, 0.366]
    assert found.mrc_hits == pytest.approx(curve, abs=6e-4)
    assert np.quantile(found.isl, [0.05, 0.5, 0.9, 0.99]).round() == pytest.approx(
        [901, 6909, 27367, 85400], abs=1
    )
    assert found.counts[60.0].dispersion == pytest.approx(2.85, abs=0.15)
    assert found.counts[60.0].autocorrelation == pytest.approx(0.30, abs=0.05)
    assert np.std(found.gaps_s) / np.mean(found.gaps_s) == pytest.approx(1.01, abs=0.03)
    assert found.tick_s is None


def test_the_ticks_of_mooncake_are_told() -> None:
    workload = read_workload(PUBLIC / "mooncake_conversation.jsonl.gz", spread_ticks=False)
    found = analyze(trace_of(workload))
    assert found.tick_s == 3.0
    assert np.std(found.gaps_s) / np.mean(found.gaps_s) == pytest.approx(3.03, abs=0.01)


def test_a_fleet_of_coding_agents() -> None:
    """X9, part: sessions, relations and hits of recorded sessions, begun at other times than published."""
    found = analysis("claude_code_sessions.jsonl.gz", 512)
    assert (found.num_requests, len(found.sessions.turns_per_session)) == (40_215, 580)
    assert found.curve.ideal == pytest.approx(0.965, abs=5e-4)
    assert len(found.branch_widths) == 798
    assert found.branch_widths.max() == 39
    published = [0.066, 0.153, 0.360, 0.794, 0.928, 0.965, 0.965, 0.965]
    assert found.mrc_hits == pytest.approx(published, abs=0.04)
    share = found.sessions.relation_share
    assert share("extends") == pytest.approx(0.972, abs=0.002)
    assert share("rolls_back") == pytest.approx(0.011, abs=0.002)
    assert share("diverges") == pytest.approx(0.011, abs=0.002)
    assert share("resets") == pytest.approx(0.0045, abs=0.0015)
    # Published as 0.002 with one thread for contexts that take turns, which are told apart here.
    assert share("returns") == pytest.approx(0.00086, abs=0.0002)
    assert np.quantile(found.sessions.turns_per_session, [0.05, 0.5, 0.9, 0.99]) == pytest.approx(
        [4, 45, 157, 344], abs=0.5
    )
    assert np.quantile(found.reuse_gap_s, [0.5, 0.9, 0.99]) == pytest.approx(
        [17, 130, 600], rel=0.05
    )


def test_an_agent_trace_with_whole_blocks_only() -> None:
    """X9, part."""
    found = analysis("miniswe_swebench_blk64.jsonl.gz", 64)
    assert (found.num_requests, found.rule, found.roots) == (402, "floor", 19)
    assert found.curve.ideal == pytest.approx(0.935, abs=5e-4)
    assert found.branch_widths.tolist() == [2.0] * 6


def test_search_trees() -> None:
    """K25, part: width and depth of breadth-first, backtracks of depth-first search."""
    game = analysis("tot_game24_trees.jsonl.gz", 16)
    assert game.roots == 100
    assert game.family.children_per_spawn.mean() == pytest.approx(5.25, abs=0.005)
    assert game.family.children_per_spawn.max() == 46
    assert game.sessions.turns_per_session.mean() == pytest.approx(85, abs=0.5)
    cross = analysis("tot_crosswords_dfs.jsonl.gz", 16)
    assert cross.roots == 40
    assert cross.forks is not None
    assert cross.family.children_per_spawn.mean() == pytest.approx(2.39, abs=0.005)
    assert len(cross.forks.backtracks) == 2_243
    assert np.quantile(cross.forks.backtracks, [0.5, 0.9, 0.99]).tolist() == [1, 3, 4]


def test_a_trace_without_prefixes() -> None:
    """X9, part."""
    found = analysis("azure2023_conv.csv.gz", 512)
    assert (found.num_requests, found.num_blocks, found.roots) == (19_366, 0, 0)
    assert found.curve.ideal == 0.0
    assert np.quantile(found.isl, 0.5) == 1_020
    assert found.counts[1.0].dispersion == pytest.approx(1.4, abs=0.05)
