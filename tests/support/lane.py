"""One lane of `make check`: `python tests/support/lane.py NAME PYTEST_ARGUMENTS`.

Of up to `MAX_AGAIN` tests that fail each is run once more, one after the other with nothing beside it, and
named at the end. One that fails again fails the lane; one that passes then is a fault, too, of the test or of
what it tests, but one that depends on time, and no proof that the change is wrong.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

MAX_AGAIN: Final = 3
TESTS_FAILED: Final = 1  # pytest's exit status


def run(name: str, arguments: Sequence[str]) -> int:
    """The exit status of pytest, or of its second run."""
    cache = Path(".pytest_cache", name)
    pytest = (sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments)
    status = subprocess.run((*pytest, "--cache-clear")).returncode
    if status != TESTS_FAILED:
        return status
    failed = list(json.loads((cache / "v/cache/lastfailed").read_text(encoding="utf-8")))
    if len(failed) > MAX_AGAIN:
        return status
    _tell(f"once more, alone: {', '.join(failed)}")
    again = ("--last-failed", "--last-failed-no-failures=none", "-n", "0")
    status = subprocess.run((*pytest, *again)).returncode
    if status == 0:
        _tell(f"UNSTABLE: failed once, passed alone: {', '.join(failed)}")
    return status


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
