"""A lane of the check: what fails is run once more, and fails the lane if it fails again."""

import subprocess
import sys
from pathlib import Path

import pytest

import support.lane

TESTS = """
from pathlib import Path

def test_fails_once():
    is_again = Path("mark").exists()
    Path("mark").touch()
    assert is_again

def test_follows_the_file():
    assert not Path("bad").exists()
"""


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_failure_that_stays_fails_the_lane_and_another_is_named(
    tmp_path: Path, is_bad: bool
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    if is_bad:
        (tmp_path / "bad").touch()
    ran = subprocess.run(
        (sys.executable, str(Path(support.lane.__file__)), "it", "-q"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == int(is_bad), ran.stdout
    assert ("UNSTABLE: failed once, passed alone: test_it.py::test_fails_once" in ran.stdout) != (
        is_bad
    )
