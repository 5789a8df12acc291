"""Benches, run as users run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_bench(module: str, *args: str, timeout_s: float = 150) -> tuple[dict[str, Any], str]:
    """The JSON object of the last line that `python -m bench.<module>` prints, and its stderr."""
    command = [sys.executable, "-m", f"bench.{module}", *args]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
