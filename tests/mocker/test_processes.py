"""Replays and reports in other processes, and a mocked engine on the wall clock."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from math import inf
from pathlib import Path

import pytest

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.report.pool import Failed, Job, Run, run_jobs
from mallee.mocker.report.sweep import Grid, sweep
from mallee.mocker.timing import ClosedForm, Plane, Timing
from mallee.traces.read import read_workload
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.asking import Ask, Scene
from support.conforming import assert_same_but_for_strides
from support.paced import assert_same_order, play_live, virtual

pytestmark = pytest.mark.process

DATA = Path(__file__).resolve().parents[1] / "traces" / "data"
make = partial(read_workload, DATA / "mooncake.jsonl")


def test_the_digest_does_not_depend_on_the_process() -> None:
    """Strings hash otherwise in each process, unless told; sets and dicts must not let it show."""
    code = (
        "from mallee.mocker.replay.config import ReplayConfig\n"
        "from mallee.mocker.replay.run import replay\n"
        "from mallee.testing.workloads import forks\n"
        "w = forks(6, 5, prefix_tokens=96, levels=2, output_tokens=9)\n"
        "c = ReplayConfig(engines=3, kv_tokens=1024, gateways=2, booking_lag_s=0.001)\n"
        "print(replay(w, c).summary['digest'])\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    told = io.StringIO()
    with redirect_stdout(told):
        exec(code, {})  # in this process, whose strings hash otherwise
    assert done.stdout == told.getvalue() != ""


def test_nothing_is_loaded_for_drawing_before_something_is_drawn() -> None:
    code = (
        "import sys, mallee.mocker.report.write_sweep, mallee.mocker.report.scenes\n"
        "print({'matplotlib', 'asyncio', 'torch', 'ray', 'multiprocessing.connection'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


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


def test_a_sweep_does_not_depend_on_the_number_of_processes() -> None:
    grid = Grid([1, 2], ["cost"], [16 * 512, 64 * 512])
    rows = [
        [f.row() for f in sweep({0: make}, ReplayConfig(), grid, processes=processes).fleets]
        for processes in (1, 2)
    ]
    assert rows[0] == rows[1]
    assert all(row["digests"]["0"] for row in rows[0])


def crowd(num: int) -> Scene:
    """Everybody comes at once: what is decided hangs on no clock."""
    asks = [
        Ask(0.0, "generate", f"r{i}", (i % 3, 10 + i % 6), 16 - i % 3, 5 + 3 * (i % 7), 1 + i % 2)
        for i in range(num)
    ]
    config = EngineConfig(SchedulerConfig(max_step_tokens=24, max_rows=6, watermark=0.0))
    return Scene(config, 28, tuple(asks))


@pytest.mark.parametrize("max_multi_step", [1, 99])
async def test_the_wall_clock_changes_nothing_but_when_things_are_told(max_multi_step: int) -> None:
    """K16, K21, part: on this machine's clock: the same order, and nothing before it is over."""
    scene = crowd(12)
    timing = Timing(ClosedForm(1e-3, 1e-5, 0.0, 0.0, (Plane(1e-3, 5e-5, 0.0),)), 2e-4)
    expected = virtual(scene, timing)
    assert any(choice[0] == "preempt" for choice in expected.choices)
    begin = time.monotonic()
    found = await play_live(scene, time.monotonic, timing, max_multi_step=max_multi_step)
    if max_multi_step == 1:
        assert_same_order(found, expected)
    assert_same_but_for_strides(found, expected, abs_s=inf)
    for ours, theirs in zip(found.events, expected.events, strict=True):
        assert ours[0] - begin >= theirs[0] - 1e-6, "told before it was over"
