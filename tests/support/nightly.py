"""Runs the nightly lane in parts, and keeps one table of its outcome in bench/results/nightly.json.

    python -m support.nightly [--only PART ...] [--resume] [--times 10] [--budget-s 3600]

Parts: each file with the mark `process` by itself, two at a time; `properties`, the in-process property tests
with fresh seeds and 100 examples; `stories`, those of faults in fleets with 500; `any gateway`, the tests of
the API over a fleet, with three gateways that come and go (`support.any_gateway`);
`speed`, the benches beside those of an earlier commit (`bench.guard`); `clients`, `schemathesis` and `fuzz`,
which the Makefile explains.
`--only process` means all files. With `--times` the files run so many times under load instead
(`support.rounds`).
The table is written after each part; parts that have not run keep what the last run wrote.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree

import msgspec

from support.imports import ROOT
from support.lanes import LANDING, lane_of
from support.rounds import Progress

RESULT: Final = ROOT / "bench" / "results" / "nightly.json"
LOGS: Final = ROOT / "build" / "nightly"
SLOTS: Final = 2  # parts at a time
PART_S: Final = 1800.0  # after which a part is ended
POLL_S: Final = 0.2
PYTEST: Final = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
CLIENTS: Final = "tests/api/clients/"
ROUNDS: Final = "process, many times"
STORIES: Final = ("tests/chaos/test_stale.py", "tests/mocker/test_faults.py")


class Part(NamedTuple):
    """One command, and the file beside its log in which it writes its outcome."""

    name: str
    command: tuple[str, ...]
    environment: str = ""  # made by the command; without it the part is left out, and doesn't fail
    num_slots: int = 1
    limit_s: float = PART_S

    @property
    def stem(self) -> Path:
        return LOGS / self.name.replace("/", "-").replace(" ", "-")

    @property
    def report(self) -> Path:
        return self.stem.with_suffix(".xml")


class Outcome(msgspec.Struct, frozen=True):
    """Tests of a part by their ids; `skipped` are functions of which no case ran."""

    commit: str
    seconds: float
    passed: int = 0
    failed: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    note: str = ""


class Night(msgspec.Struct):
    """The result's file: the last outcome of each part, and all that failed and was skipped."""

    parts: dict[str, Outcome] = {}
    failed: list[str] = []
    skipped: list[str] = []

    def add(self, name: str, outcome: Outcome) -> None:
        self.parts[name] = outcome
        self.failed = sorted({test for each in self.parts.values() for test in each.failed})
        self.skipped = sorted({test for each in self.parts.values() for test in each.skipped})

    def table(self) -> str:
        rows = [
            "| part | commit | s | passed | failed | skipped | |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, each in self.parts.items():
            counts = f"{each.passed} | {len(each.failed)} | {len(each.skipped)}"
            rows.append(f"| {name} | {each.commit} | {each.seconds:.0f} | {counts} | {each.note} |")
        return "\n".join([*rows, *(f"failed: {test}" for test in self.failed)])


def commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


def parts() -> list[Part]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    lanes = {str(path.relative_to(ROOT)): lane_of(path) for path in paths}
    nightly = [
        path
        for path, lane in lanes.items()
        if lane == "nightly" and not path.startswith(CLIENTS)  # run by `make clients`
    ]
    spread = (*PYTEST, "-n", str(SLOTS), "--dist", "worksteal", "-m", f"{LANDING} and hypothesis")
    properties = (*spread, "--hypothesis-profile", "nightly")
    stories = (*spread, "--hypothesis-profile", "stories", *STORIES)
    any_gateway = (*PYTEST, "-n", str(SLOTS), "-m", LANDING, "tests/api", "tests/examples")
    schemathesis = ("make", "schemathesis", "CALLS=5000")
    return [
        *(Part(path, (*PYTEST, path)) for path in nightly),
        Part("clients", ("make", "clients"), ".venv-clients/.ready"),
        Part("schemathesis", schemathesis, "build/schemathesis/bin/schemathesis"),
        Part("fuzz", ("make", "fuzz", "BODIES=2000")),
        Part("stories", stories, num_slots=SLOTS),
        Part("any gateway", ("env", "ANY_GATEWAY=1", *any_gateway), num_slots=SLOTS),
        Part("properties", properties, num_slots=SLOTS),
        Part("speed", (sys.executable, "-m", "bench.guard"), num_slots=SLOTS, limit_s=2 * PART_S),
    ]


def under_load(files: Iterable[str], times: int) -> Part:
    """Files run so many times by `support.rounds`."""
    options = ("--times", str(times), "--batch", "1", "--state", str(LOGS / "rounds.json"))
    command = (sys.executable, "-m", "support.rounds", *options, *files)
    return Part(ROUNDS, command, num_slots=SLOTS, limit_s=float("inf"))


def outcome_of(part: Part, returncode: int | None, seconds: float) -> Outcome:
    """The outcome of a part that ended with `returncode`; None: it took too long and was ended."""
    passed, failed, skipped = _counts(part)
    note = "" if returncode is not None else f"ended after {seconds:.0f} s"
    if part.environment and returncode and not (ROOT / part.environment).exists():
        return Outcome(commit(), seconds, note="not run: its environment could not be made")
    if returncode not in (0, 5) and not failed:  # 5: no tests
        failed = [part.name]
        note = note or f"ended with {returncode}, {part.stem.name}.log"
    return Outcome(commit(), seconds, passed, tuple(failed), tuple(skipped), note)


def _counts(part: Part) -> tuple[int, list[str], list[str]]:
    """The number of tests that passed, those that failed, and functions that were skipped."""
    if part.name == ROUNDS:
        failures = (each["failures"] for each in Progress(LOGS / "rounds.json").files.values())
        return 0, sorted({each["test"] for some in failures for each in some}), []
    return counts(part.report.read_text()) if part.report.exists() else (0, [], [])


def counts(report: str) -> tuple[int, list[str], list[str]]:
    """The same of pytest's report in XML, with files (its family `xunit1`)."""
    failed: set[str] = set()
    ran: list[str] = []
    skipped: set[str] = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        test = f"{case.get('file', case.get('classname', ''))}::{case.get('name', '')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(test)
        elif skip is not None and skip.get("type") != "pytest.xfail":
            skipped.add(test.partition("[")[0])
        else:
            ran.append(test)
    left_out = skipped - {test.partition("[")[0] for test in (*ran, *failed)}
    return len(set(ran) - failed), sorted(failed), sorted(left_out)


class Running(NamedTuple):
    part: Part
    process: "subprocess.Popen[bytes]"
    began: float

    @classmethod
    def start(cls, part: Part) -> "Running":
        LOGS.mkdir(parents=True, exist_ok=True)
        part.report.unlink(missing_ok=True)
        environment = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **os.environ,
            "PYTHONPATH": str(ROOT / "tests"),
            "PYTEST_ADDOPTS": f"-o junit_family=xunit1 --junitxml={part.report}",
        }
        with part.stem.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(part, process, time.monotonic())

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def outcome(self) -> Outcome | None:
        """None while it goes on; what takes too long is ended."""
        if self.seconds > self.part.limit_s:
            self.stop()
            return outcome_of(self.part, None, self.seconds)
        code = self.process.poll()
        return None if code is None else outcome_of(self.part, code, self.seconds)

    def stop(self) -> None:
        """End its processes, and wait for the first of them."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(waiting: Sequence[Part], night: Night, path: Path, budget_s: float) -> list[Part]:
    """Run parts as slots are free, and write the result after each.

    Returns those that have not begun within `budget_s`.
    """
    began, queue, running = time.monotonic(), list(waiting), list[Running]()
    try:
        while running or (queue and time.monotonic() - began < budget_s):
            taken = sum(each.part.num_slots for each in running)
            is_time = time.monotonic() - began < budget_s
            if queue and is_time and taken + queue[0].num_slots <= SLOTS:
                running.append(Running.start(queue.pop(0)))
            for each in [*running]:
                if (outcome := each.outcome()) is not None:
                    running.remove(each)
                    night.add(each.part.name, outcome)
                    path.write_bytes(
                        msgspec.json.format(msgspec.json.encode(night), indent=1) + b"\n"
                    )
                    failed = [f"    failed: {test}" for test in outcome.failed]
                    print(f"{each.part.name}: {each.seconds:.0f} s", *failed, sep="\n", flush=True)  # noqa: T201
            time.sleep(POLL_S)
    finally:
        for each in running:
            each.stop()
    return queue


def chosen(known: Sequence[Part], only: Iterable[str]) -> list[Part]:
    """Parts by their names; `process` is all files, and a folder's name all files below it."""
    wanted = tuple(only)
    if not wanted:
        return list(known)
    found = [
        part
        for part in known
        if part.name.startswith(wanted) or ("process" in wanted and part.name.startswith("tests/"))
    ]
    if not found:
        raise SystemExit(f"no such part; there are {', '.join(part.name for part in known)}")
    return found


def ordered(selected: Sequence[Part], last: Mapping[str, Outcome]) -> list[Part]:
    """Longest parts of the last time first, but those that take all slots at the end."""

    def key(part: Part) -> tuple[int, float]:
        return part.num_slots, -last[part.name].seconds if part.name in last else -PART_S

    return sorted(selected, key=key)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="support.nightly")
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(words)
    known = parts()
    selected = chosen(known, asked.only)
    if asked.times > 1:
        files = [part.name for part in selected if part.name.startswith("tests/")]
        selected = [under_load(files, asked.times)]
    night = Night()
    if asked.out.exists():
        night = msgspec.json.decode(asked.out.read_bytes(), type=Night)
    names = {part.name for part in known} | {ROUNDS}
    night.parts = {name: each for name, each in night.parts.items() if name in names}
    now = commit()
    done = {name for name, each in night.parts.items() if asked.resume and each.commit == now}
    selected = [part for part in selected if part.name not in done]
    left = run(ordered(selected, night.parts), night, asked.out, asked.budget_s)
    print(night.table())  # noqa: T201
    if left:
        print(f"not run, out of time: {', '.join(part.name for part in left)}")  # noqa: T201
    ran = [night.parts[part.name] for part in selected if part not in left]
    return 1 if left or any(each.failed for each in ran) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
