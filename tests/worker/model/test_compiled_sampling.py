"""Kernels are compiled for GPUs without one, by a process of its own: here they run in an interpreter."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_a_samplers_kernels_compile_for_every_kind_of_gpu_that_is_served() -> None:
    """I5, part: for the arguments that they are launched with; A100, H100 and H200, GB10."""
    command = [sys.executable, "-m", "support.compiled_sampling", "80", "90", "121"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    lines = [f"{each} edit draw report" for each in (80, 90, 121)]
    assert found.stdout.splitlines() == lines, found.stderr
