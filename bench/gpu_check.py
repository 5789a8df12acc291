"""Proves the GPU path on this machine: every figure that has a target, and its tests.

    python -m bench.gpu_check [--device cuda] [--tiny] [--only NAME,...] [--budget-s S] [--out FILE.json]
                              [--no-tests] [--profile FILE]

Prints hardware and versions, then the benches of `bench/gpu` over random weights of Llama 3.1 8B's shape,
the most telling first: nothing is downloaded. Each row is printed, and kept in `--out`, as soon as it is
measured. A bench that fails is a row with the reason, and the others go on; one that may take the process
with it runs last, in a process of its own. After `--budget-s` seconds nothing more begins. At the end come
the tests marked `gpu`. The last line is one JSON object. Exit status: 0, or 1 if a test or a bench failed or
a target was missed, or 2 if there is no device: then it says what is missing. `--tiny --device cpu` runs the
same code on tiny shapes, which proves no figure. `--profile` also measures a coarse grid of steps, for the
mocker.
"""

import argparse
import faulthandler
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import torch

from bench import ROOT, measure
from bench.gpu.check import APART, Check, Outcome, all_rows, run, run_bench
from bench.gpu.shapes import FULL, TINY_SCALE
from bench.gpu.targets import TARGETS, Row, row
from bench.gpu.versions import versions
from mallee.worker.model.installation import look, missing

__all__ = ["FULL", "TINY_SCALE", "Check", "main", "run", "versions"]

TEST_TIMEOUT_S: Final = 900
"""Of one test: the first one compiles kernels."""
TESTS_TIMEOUT_S: Final = 1800
APART_TIMEOUT_S: Final = 900
OVERRUN_S: Final = 30.0
"""After the budget, until a bench that hangs is ended with the process; its rows are kept."""


class Report:
    """The facts so far, in a file too if there is one: a run that is killed keeps them."""

    def __init__(self, path: Path | None, conditions: dict[str, Any]) -> None:
        self._path = path
        self._conditions = conditions
        self._shown: set[str] = set()
        self.outcome = Outcome({}, [])
        self.figures: dict[str, Any] = {}
        self.tests: dict[str, Any] | None = None

    def keep(self) -> None:
        """Print the rows that are new, and write the file anew."""
        for name in [name for name in self.outcome.rows if name not in self._shown]:
            self._shown.add(name)
            show(self.outcome.rows[name])
        if self._path is not None:
            part = self._path.with_suffix(".part")
            part.write_text(self.text(list(self.outcome.rows.values())) + "\n", encoding="utf-8")
            os.replace(part, self._path)

    def text(self, rows: Sequence[Row]) -> str:
        found = {
            "rows": [each._asdict() for each in rows],
            "failed": self.outcome.failed,
            "tests": self.tests,
            "figures": self.figures,
            **self._conditions,
        }
        return json.dumps(measure.rounded(found))


def show(each: Row) -> None:
    verdict = {True: "met", False: "MISSED", None: "-"}[each.meets]
    figure = "-" if each.measured is None else f"{each.measured:.4g}"
    line = f"{each.name:>18}  {figure:>10}  {verdict:6}  {each.target}  {each.reason}"
    print(line.rstrip(), flush=True)


class Clock:
    """The time that is left of a budget of seconds; without one there is no end."""

    def __init__(self, budget_s: float | None) -> None:
        self._end = None if budget_s is None else time.monotonic() + budget_s

    def left_s(self, most: float) -> float:
        return most if self._end is None else min(most, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s(1.0) <= 0


def run_apart(name: str, arguments: Sequence[str], report: Report, timeout_s: float) -> None:
    """Bench `name` in another process, which may end as it likes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.gpu_check", *arguments, "--no-tests"]
        try:
            done = subprocess.run(
                [*command, "--only", name, "--out", str(out)],
                cwd=ROOT,
                check=False,
                timeout=timeout_s,
                stdout=sys.stderr,
            )
            status = f"its process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            status = f"its process took more than {timeout_s:.0f} s"
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    rows = {each["name"]: Row(**each) for each in found.get("rows", ())}
    report.outcome.rows.update(rows)
    report.outcome.failed.extend(found.get("failed", ()))
    figures = found.get("figures", {})
    if name not in figures.get("seconds", {}):  # it didn't come to its end
        report.outcome.failed.append(f"{name}: {status}")
        if name in TARGETS and name not in rows:
            report.outcome.rows[name] = row(name, None, status)
    seconds = {**report.figures.get("seconds", {}), **figures.pop("seconds", {})}
    report.figures.update({**figures, "seconds": seconds})
    report.keep()


def run_tests(device: str, clock: Clock) -> dict[str, Any]:
    """The tests marked `gpu`, and those of the model that take a device."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in {
        "gpu": ["tests", "-m", "gpu"],
        "device": ["tests/worker/model/test_device.py"],
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}"]
            command += ["-o", f"timeout={TEST_TIMEOUT_S}"]
            try:
                done = subprocess.run(
                    [*command, "--device", device, *arguments],
                    cwd=ROOT,
                    check=False,
                    timeout=max(1.0, clock.left_s(TESTS_TIMEOUT_S)),
                    stdout=sys.stderr,
                )
            except subprocess.TimeoutExpired as error:
                found[name] = {"status": f"ended after {error.timeout:.0f} s"}
            else:
                found[name] = {"status": done.returncode, **counts(report)}
    return found


def counts(report: Path) -> dict[str, int]:
    """Tests of a JUnit report by outcome."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "a report without a suite"
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: they prove no figure")
    parser.add_argument("--no-tests", action="store_true", help="run no tests")
    parser.add_argument("--only", default="", help="benches by the name of their first row")
    parser.add_argument("--budget-s", type=float, help="seconds after which nothing more begins")
    parser.add_argument("--out", type=Path, help="JSON file, written anew after each row")
    parser.add_argument(
        "--profile", type=Path, help="write a grid for `mallee replay --timing` there"
    )
    options = parser.parse_args()
    for option in ("profile", "out"):
        path = getattr(options, option)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{option} {path}: there is no folder {path.parent}")
    clock = Clock(options.budget_s)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    faulthandler.enable()
    if options.budget_s is not None:
        faulthandler.dump_traceback_later(options.budget_s + OVERRUN_S, exit=True)
    found = versions()
    for key, value in found.items():
        print(f"{key:>20}  {value or 'none'}")
    is_cuda = torch.device(options.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        lacking = missing(look())
        print("\n".join(("this machine has no CUDA device that torch can use:", *lacking)))
        print(json.dumps({"rows": [], "missing": lacking, "versions": found}))
        return 2
    conditions = {"is_tiny": options.tiny, "device": options.device, "versions": found}
    report = Report(options.out, conditions)
    report.keep()
    scale = TINY_SCALE if options.tiny else FULL
    check = Check(options.device, scale, options.profile)
    report.figures, judges = check.figures, check.is_real
    print(check.budget, flush=True)
    only = set(filter(None, options.only.split(",")))
    if unknown := only - check.benches().keys():
        parser.error(f"--only {','.join(sorted(unknown))}: give of {', '.join(check.benches())}")
    wanted = [name for name in check.benches() if not only or name in only]
    here = wanted if len(wanted) == 1 else [name for name in wanted if name not in APART]
    is_lost = False
    for name in here:
        if not clock.is_over and not is_lost:
            is_lost = run_bench(check, name, report.outcome, report.keep)
    del check  # other processes have the device's memory now
    gc.collect()
    if is_cuda and not is_lost:
        torch.cuda.empty_cache()
    arguments = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    for name in wanted:
        if name not in here and not clock.is_over:
            run_apart(name, arguments, report, clock.left_s(APART_TIMEOUT_S))
    if not options.no_tests and not clock.is_over:
        report.tests = run_tests(options.device, clock)
    reason = "no time was left" if clock.is_over else "it was not run"
    rows = all_rows(report.outcome.rows, judges=judges, reason=reason)
    report.keep()
    for each in rows:
        if not only and each.name not in report.outcome.rows:
            show(each)
    print(report.text(rows))
    broken = any(each["status"] not in (0, 5) for each in (report.tests or {}).values())
    is_missed = any(each.meets is False for each in rows)
    return int(bool(report.outcome.failed) or broken or is_missed)


if __name__ == "__main__":
    sys.exit(main())
