"""Our Triton kernels, compiled for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

TESTS = Path(__file__).parents[2]


def test_kernels_compile_for_gpus_since_ampere() -> None:
    """I7, part: to machine code, for the shapes of four models, one in float32, too; once for all steps."""
    pytest.importorskip("triton")
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "support.compiled_kernels", "80", "90", "100", "121"],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 5 * 8, done.stdout
