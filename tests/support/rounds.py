"""Runs test files many times on a busy machine, and lists what failed at least once.

    python -m support.rounds [--times 20] [--shard 1/2] [FILE ...]

Without FILEs: landing files with coroutines or threads. A loop on every core keeps the machine busy
meanwhile. Files run by twenties in one process, which notes each round in build/rounds.json: what was stopped
goes on from there. A file begins again when it, or what it depends on, changes.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import pytest

from support.imports import ROOT, graph, linked, reached, sources
from support.lanes import lane_of

STATE: Final = ROOT / "build" / "rounds.json"
BATCH: Final = 20  # files of a process
TAIL: Final = 4000  # characters of a failure that are kept
BUSY: Final = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"

_RACY = re.compile(
    r"^async def test_|\bthreading\b|\bThreadPoolExecutor\b|\bto_thread\b", re.MULTILINE
)


class Progress:
    """Rounds that files have had, and their failures, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    def begin(self, digests: dict[str, str]) -> None:
        """Forget what other versions of these files have done."""
        for file, digest in digests.items():
            if self.files.get(file, {}).get("digest") != digest:
                self.files[file] = {"digest": digest, "rounds": 0, "failures": []}
        self.save()

    def pending(self, files: Iterable[str], times: int) -> list[str]:
        return [file for file in files if self.files[file]["rounds"] < times]

    def fail(self, test: str, tail: str) -> None:
        """Note a failure in the round that goes on; `test` is a test's id, or a file."""
        entry = self.files[test.partition("::")[0]]
        failure = {"test": test, "round": entry["rounds"] + 1, "tail": tail[-TAIL:]}
        entry["failures"].append(failure)

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self.files, indent=1))
        fresh.replace(self._path)

    def table(self, files: Iterable[str]) -> str:
        """Failures by test, with the end of the first one's text."""
        lines = []
        for file in files:
            rounds, failures = self.files[file]["rounds"], self.files[file]["failures"]
            for test, num in Counter(each["test"] for each in failures).items():
                tail = next(each["tail"] for each in failures if each["test"] == test)
                lines += [f"{test}: {num} of {rounds} rounds failed", *_indented(tail)]
        return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()[-25:]]


class Rounds:
    """A plugin of pytest: runs each file's tests until the file has had so many rounds.

    Between two rounds all fixtures are torn down.
    """

    def __init__(self, progress: Progress, files: Sequence[str], times: int) -> None:
        self._progress = progress
        self._files = files
        self._times = times

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while pending := self._progress.pending(self._files, self._times):
            items = [item for item in session.items if item.nodeid.partition("::")[0] in pending]
            for item, following in zip_longest(items, items[1:]):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            for file in pending:
                self._progress.files[file]["rounds"] += 1
            self._progress.save()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._progress.fail(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._progress.fail(report.nodeid, report.longreprtext)


@contextmanager
def load() -> Iterator[None]:
    """Every core is busy; the loops end with this process at the latest."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def racy_files() -> list[str]:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    landing = (path for path in paths if lane_of(path) == "landing")
    return [str(path.relative_to(ROOT)) for path in landing if _RACY.search(path.read_text())]


def digests(files: Iterable[str]) -> dict[str, str]:
    """For each file a digest of its text, and of those that it depends on."""
    edges = graph(sources(), linked())
    hashes = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in edges}
    found = {}
    for file in files:
        text = "".join(f"{path} {hashes[path]}\n" for path in sorted(reached(edges, [file])))
        found[file] = hashlib.sha256(text.encode()).hexdigest()
    return found


def run_batch(files: Sequence[str], state: Path, times: int) -> None:
    """Rounds of some files in a process of their own, of which the end is noted if it is untimely."""
    command = [sys.executable, "-m", "support.rounds", "--within", "--times", str(times)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [*command, "--state", str(state), *files],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        progress = Progress(state)
        for file in progress.pending(files, times)[:1]:
            progress.fail(file, f"{done.stdout}\nthe process ended with {done.returncode}")
        progress.save()


def run_within(files: Sequence[str], state: Path, times: int) -> int:
    rounds = Rounds(Progress(state), files, times)
    options = ["--verbose", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *files], plugins=[rounds]))


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="support.rounds")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts of the files")
    parser.add_argument("--batch", type=int, default=BATCH, help="files of a process")
    parser.add_argument("--state", type=Path, help="build/rounds.json, or a shard's own")
    parser.add_argument("--within", action="store_true", help="in this process, without load")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    asked = arguments(words)
    shard, num_shards = map(int, asked.shard.split("/"))
    files = (asked.files or racy_files())[shard - 1 :: num_shards]
    name = STATE.stem if num_shards == 1 else f"{STATE.stem}-{shard}-of-{num_shards}"
    state: Path = asked.state or STATE.with_stem(name)
    if asked.within:
        return run_within(files, state, asked.times)
    progress = Progress(state)
    progress.begin(digests(files))
    with load():
        pending = progress.pending(files, asked.times)
        for at in range(0, len(pending), asked.batch):
            batch = pending[at : at + asked.batch]
            run_batch(batch, state, asked.times)
            print(f"{asked.times} rounds of {', '.join(batch)}", flush=True)  # noqa: T201
    progress = Progress(state)
    failed = [file for file in files if progress.files[file]["failures"]]
    left = progress.pending(files, asked.times)
    print(progress.table(failed))  # noqa: T201
    print(f"{len(files)} files: {len(failed)} failed, {len(left)} are not done")  # noqa: T201
    return 1 if failed or left else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
