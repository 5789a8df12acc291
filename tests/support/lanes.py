"""The lanes of tests, told by the marks that a test file names."""

import re
from functools import cache
from pathlib import Path
from typing import Final, Literal

Lane = Literal["landing", "smoke", "nightly"]

LANDING: Final = "not process and not smoke"  # the expression after pytest's -m

_NIGHTLY = re.compile(r"\bmark\.process\b|\bPROCESS_MARKS\b")
_SMOKE = re.compile(r"\bmark\.smoke\b")
_REAL_TIME = re.compile(r"\bmark\.real_time\b")

_GPU = re.compile(r"\bmark\.gpu\b")


@cache
def has_gpu_tests(path: Path) -> bool:
    """Whether that file of tests, or one in that folder, has tests that want a CUDA device."""
    if path.is_dir():
        return any(has_gpu_tests(each) for each in path.rglob("test_*.py"))
    return path.name.startswith("test_") and bool(_GPU.search(path.read_text(encoding="utf-8")))


@cache
def lane_of(path: Path) -> Lane:
    text = path.read_text(encoding="utf-8")
    return "nightly" if _NIGHTLY.search(text) else "smoke" if _SMOKE.search(text) else "landing"


def is_in_real_time(path: Path) -> bool:
    """Whether the event loop of the file's tests is the system's; else it is one in virtual time."""
    return lane_of(path) != "landing" or bool(_REAL_TIME.search(path.read_text(encoding="utf-8")))
