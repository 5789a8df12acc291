"""The compiled build: the same source, so the same decisions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parent.parent
PLAY = """
import mallee.worker.engine as engine
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay
from bench.doubles.workloads import forks
for workload in (forks(4, 8, prefix_tokens=700, gap_s=0.01),):
    result = replay(workload, ReplayConfig(engines=3, kv_tokens=4096))
    print(engine.__file__.rpartition(".")[2], result.summary["digest"])

from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Fork, Limits, Prefill, pack_tokens
from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.worker.records import EngineConfig
for forward in (MockForward(mock_spec(), num_blocks=64), random_model().forward()):
    worker = engine.Engine(
        forward,
        config=EngineConfig(),
        clock=lambda: 0.0,
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
    )
    drawn = []
    fork = Fork("f", "p.0", (b"",) * 3, Limits(8, ignore_eos=True))
    for command in (Prefill("p", pack_tokens(range(1, 40))), fork):
        worker.submit(command, "g")
        while worker.has_work:
            frames = worker.step().frames.values()
            drawn += [token for frame in frames for update in frame.updates for token in update.tokens]
    worker.check()
    print(*drawn, sep=",")
"""


def played(path: Path) -> list[str]:
    """Of the modules under `path`: the engine's suffix, a replay's digest, tokens over two forward passes."""
    command = [sys.executable, "-c", PLAY]
    environ = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}  # of `bench`, too
    done = subprocess.run(
        command, cwd="/", capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_compiled_build_decides_the_same(tmp_path: Path) -> None:
    """K21, part, K26, part: neither a replay's digest nor a token depends on how the engine was built."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    environ = os.environ | {"MALLEE_COMPILE": "1"}
    target = tmp_path / "compiled"
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, env=environ)
    kind, *seen = played(target)
    assert kind == "so"
    assert played(ROOT / "src") == ["py", *seen]
