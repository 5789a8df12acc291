"""Replays by several processes: what one of them does, and that it dies, is told by its job."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.pool import Failed, Job, Run, run_jobs
from mallee.traces.read import read_workload

pytestmark = pytest.mark.smoke

DATA = Path(__file__).resolve().parents[1] / "traces" / "data"
make = partial(read_workload, DATA / "mooncake.jsonl")


def test_children_that_die_are_reported_and_the_others_go_on() -> None:
    config = ReplayConfig(engines=1, kv_tokens=32_768)
    jobs = [
        Job(partial(os._exit, 3), config),
        Job(make, config),
        Job(partial(signal.raise_signal, signal.SIGKILL), config),
        Job(partial(read_workload, DATA / "none.jsonl"), config),
        Job(make, config),
    ]
    told: list[int] = []
    found = run_jobs(jobs, processes=2, on_done=lambda index, done: told.append(index))
    assert sorted(told) == [0, 1, 2, 3, 4]
    exited, first, killed, missing, second = found
    assert exited == Failed("the process that simulated it died (exit code 3)")
    assert killed == Failed("the process that simulated it died (signal 9)")
    assert isinstance(missing, Failed)
    assert "no such file" in missing.error
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert first.summary["digest"] == second.summary["digest"]
