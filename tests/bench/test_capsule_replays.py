"""F26, part: the replays of agents whose KV does not fit, at a small size."""

from pathlib import Path

import pytest

from bench.capsule import replays
from bench.capsule.replays import Way, figures, live_tokens, on, turns
from mallee.mocker.replay.run import replay
from mallee.testing.workloads import made
from mallee.traces.workload import Request


def test_sessions_that_take_turns_share_a_device_a_fourth_of_their_size() -> None:
    """F26, part, K15, part: nothing is computed twice; moving it takes a part of the time of that."""
    workload, room = turns(16, 5, 24_000, 20.0), 4 * 27_136
    fit, lru, tiers = (
        figures(replay(workload, config))
        for config in (
            on(1, 4 * room, Way(), 0),
            on(1, room, Way(), 0),
            on(1, room, Way(has_tiers=True), 0),
        )
    )
    for run in (fit, lru, tiers):
        assert run["requests"] == 80
        assert not run["errors"]
    assert lru["hit_rate"] < 0.1 < 0.75 < fit["hit_rate"]
    assert tiers["hit_rate"] > 0.98 * fit["hit_rate"]
    assert fit["serving_s"] < tiers["serving_s"] < (fit["serving_s"] + lru["serving_s"]) / 2


def test_what_is_live_is_what_sessions_have_in_context_over_time() -> None:
    requests = [
        Request(0, 0.0, (), 100, 0, "a"),
        Request(1, 2.0, (), 300, 0, "b"),
        Request(2, 4.0, (), 200, 0, "a"),
        Request(3, 10.0, (), 10, 0, "c"),
        Request(4, 30.0, (), 500, 0, "b"),
    ]
    # Of ten seconds: four of 100 tokens, and, while b is in between, eight of 300.
    assert live_tokens(made(requests, name="t", id_tokens=4)) == pytest.approx(280.0)


def test_only_whole_sessions_are_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "sessions.jsonl"
    rows = [
        '{"id": "a", "block_size": 64, "requests": [{"k": "r", "t": 0, "in": 64, "out": 1, "h": [[0, 1]]},'
        ' {"k": "r", "t": 9, "in": 128, "out": 1, "h": [[0, 2]]}]}',
        '{"id": "b", "block_size": 64, "requests": [{"k": "r", "t": 0, "in": 500000, "out": 1, "h": []}]}',
        '{"id": "c", "block_size": 64, "requests": [{"k": "r", "t": 0, "in": 64, "out": 1, "h": [[0, 1]]}]}',
    ]
    trace.write_text("\n".join(rows) + "\n")
    workload, num_long = replays.sessions(trace, 10, 0)
    assert (len(list(workload)), num_long) == (3, 1)
