"""Replays and reports in other processes."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.sweeps.sweep import Grid, sweep
from mallee.traces.read import read_workload

pytestmark = pytest.mark.process

DATA = Path(__file__).resolve().parents[1] / "traces" / "data"
make = partial(read_workload, DATA / "mooncake.jsonl")


def test_the_digest_does_not_depend_on_the_process() -> None:
    """Strings hash otherwise in each process, unless told; sets and dicts must not let it show."""
    code = (
        "from mallee.mocker.replay.config import ReplayConfig\n"
        "from mallee.mocker.replay.run import replay\n"
        "from bench.doubles.workloads import forks\n"
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
        "import sys, mallee.figures.replays.write_sweep, mallee.figures.replays.write\n"
        "print({'matplotlib', 'asyncio', 'torch', 'ray', 'multiprocessing.connection'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_sweep_does_not_depend_on_the_number_of_processes() -> None:
    grid = Grid([1, 2], ["cost"], [16 * 512, 64 * 512])
    rows = [
        [f.row() for f in sweep({0: make}, [ReplayConfig()], grid, processes=processes).fleets]
        for processes in (1, 2)
    ]
    assert rows[0] == rows[1]
    assert all(row["digests"]["0"] for row in rows[0])
