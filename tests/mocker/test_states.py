"""Replays of a model with recurrent layers."""

from dataclasses import replace

from bench.doubles.workloads import sessions, siblings
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay


def test_a_hybrid_finds_nearly_what_a_dense_model_does() -> None:
    """X2, X3, part: siblings all of it; conversations but for what the second of a kind computes again."""
    dense = ReplayConfig(engines=2, kv_tokens=65536)
    hybrid = replace(dense, state_nbytes=50 << 20)
    for scene, least in (
        (siblings(1, 8, prefix_tokens=2048, suffix_tokens=48, output_tokens=8, gap_s=30.0), 1.0),
        (sessions(6, 4, groups=1), 0.9),
    ):
        one, other = (replay(scene, each).summary["hit_rate"] for each in (dense, hybrid))
        assert least * one <= other <= one
