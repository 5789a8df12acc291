"""The compiled build: the same source, so the same decisions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAY = """
import mallee.worker.engine as engine
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.run import replay
from mallee.mocker.replay.scenes import forks
for workload in (forks(4, 8, prefix_tokens=700, gap_s=0.01),):
    result = replay(workload, ReplayConfig(engines=3, kv_tokens=4096))
    print(engine.__file__.rpartition(".")[2], result.summary["digest"])
"""


def played(path: Path) -> list[str]:
    """Suffix of the engine's module, and digest, of a replay with the modules under `path`."""
    command = [sys.executable, "-c", PLAY]
    environ = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True, env=environ)
    return done.stdout.split()


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    os.environ.get("MALLEE_TEST_COMPILED") != "1" or shutil.which("cc") is None,
    reason="takes minutes and a C compiler: set MALLEE_TEST_COMPILED=1",
)
def test_a_compiled_build_decides_the_same(tmp_path: Path) -> None:
    """K21, K26: the digest of a replay does not depend on how the engine was built."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    environ = os.environ | {"MALLEE_COMPILE": "1"}
    target = tmp_path / "compiled"
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, env=environ)
    kind, digest = played(target)
    assert kind == "so"
    assert played(ROOT / "src") == ["py", digest]
