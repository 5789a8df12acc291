"""Workers that are killed while they lend and borrow: the other goes on, answers are right, nothing leaks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import crashing_loans

pytestmark = pytest.mark.process

KILLS = 20
TESTS = Path(crashing_loans.__file__).parents[1]


def test_a_kill_of_a_lender_or_a_borrower_leaves_the_other_whole() -> None:
    """X6, part: SIGKILL at random messages; answers are token-exact, loans, holds, files, threads all end."""
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, crashing_loans.__file__, "0", str(KILLS)]
    done = subprocess.run(
        command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": path}, stdout=-1
    )
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == KILLS
    # The story is not empty: KV went over, and was cut off.
    assert sum(outcome["moved"] > 0 for outcome in outcomes) > KILLS // 2
    assert sum(outcome["failed"] > 0 for outcome in outcomes) > KILLS // 2
