"""Benchmarks: a folder for each part, `peers/` runs other systems beside ours, `results/` has the figures.

Each bench is a module, run from the root of a checkout: `python -m bench.router`, `python -m
bench.engine.fork`. Its last line of output is one JSON object.
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TRACES: Final = ROOT.parent / "shared" / "traces"  # recorded traces, where none are named
