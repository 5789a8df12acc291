"""An idle service over Ray: processor time and memory of every process, by its role.

    python -m bench.idle [--quick] [--cases mocked_1,mocked_10,...] [--seconds 60] [--rounds 1]

`mallee serve` as users start it, answered once, then left alone: after a while to settle, the seconds of
processor time that each process used in a minute, and its proportional set size (PSS: shared pages counted
once). Cases: 1, 10 and 100 mocked engines in one worker process; ten processes of one; two workers of a real
model. They run one after another, in every round; medians of the rounds. The table goes to stderr, the last
line of stdout is one JSON object.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from bench import measure
from bench.processes import running, wait_for
from mallee.runtime.addresses import free_port

MODEL: Final = "m"
READY_S: Final = 180.0
STOP_S: Final = 60.0
MOCK: Final = ("--set", "engine.kind=mock")
ROLES: Final = {
    "Gateway": "gateway",
    "Worker": "worker",
    "Broker": "broker's supervisor",
    "nats-server": "NATS",
    "ServeController": "Serve's controller",
    "Proxy": "Serve's proxy",
    "haproxy": "HAProxy",
    "raylet": "Ray's raylet",
    "gcs_server": "Ray's GCS",
    "Agent": "Ray's agents",
    "mallee.cli": "mallee serve",
}
"""The role of a process by a word of its command line; the first word that is there counts."""


class Case(NamedTuple):
    """Settings of the service; "" for the model stands for mocked engines."""

    options: tuple[str, ...]

    @classmethod
    def mocked(cls, workers: int, engines: int) -> "Case":
        engine = f"mock.engines_per_worker={engines}"
        return cls((*MOCK, "--set", engine, "--set", f"workers={workers}"))


CASES: Final = {
    "mocked_1": Case.mocked(1, 1),
    "mocked_10": Case.mocked(1, 10),
    "mocked_100": Case.mocked(1, 100),
    "processes_10": Case.mocked(10, 1),
    "smollm2_2": Case(("--set", "workers=2")),
}


class Sample(NamedTuple):
    """One process at one moment."""

    role: str
    cpu_s: float
    pss_mb: float


def role_of(command: Sequence[str]) -> str:
    """The role of a process, by its command line."""
    text = " ".join(command[:4])
    return next((role for word, role in ROLES.items() if word in text), "Ray's others")


def sample(root: psutil.Process) -> dict[int, Sample]:
    """All processes below `root`, and itself, by id. Those that end meanwhile are left out."""
    found = {}
    for process in (root, *root.children(recursive=True)):
        try:
            times, pss = process.cpu_times(), process.memory_full_info().pss
            found[process.pid] = Sample(
                role_of(process.cmdline()), times.user + times.system, pss / 1e6
            )
        except psutil.NoSuchProcess:
            continue
    return found


def by_role(before: dict[int, Sample], after: dict[int, Sample], took_s: float) -> dict[str, Any]:
    """role -> processes, cores (share of one), MB; and the same of all."""
    parts: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0, "cores": 0.0, "mb": 0.0})
    for pid, now in after.items():
        used_s = now.cpu_s - before[pid].cpu_s if pid in before else now.cpu_s
        for part in (parts[now.role], parts["all"]):
            part["count"] += 1
            part["cores"] += used_s / took_s
            part["mb"] += now.pss_mb
    return dict(parts)


def measured(case: Case, folder: Path, *, seconds: float, settle_s: float) -> dict[str, Any]:
    """Roles of one start of the service."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", "--model", "smollm2"]
    command += ["--set", f"served_model_name={MODEL}", "--port", str(port), *case.options]
    log = folder / f"{port}.log"
    with running(command, log, stop_s=STOP_S) as process:
        wait_for(f"http://127.0.0.1:{port}", process, log, READY_S)
        time.sleep(settle_s)
        root = psutil.Process(process.pid)
        begun, before = time.monotonic(), sample(root)
        time.sleep(seconds)
        took_s, after = time.monotonic() - begun, sample(root)
    return by_role(before, after, took_s)


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure of each role that is there in every run."""
    roles: Iterable[str] = [role for role in runs[0] if all(role in run for run in runs)]
    return {role: measure.medians([run[role] for run in runs]) for role in roles}


def _print(found: dict[str, dict[str, Any]]) -> None:
    for case, roles in found.items():
        print(case, file=sys.stderr)
        for role, part in sorted(roles.items(), key=lambda item: -item[1]["cores"]):
            figures = f"{part['count']:3.0f} {1000 * part['cores']:8.1f} ms/s {part['mb']:7.0f} MB"
            print(f"  {role:22} {figures}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a moment: does it run at all")
    parser.add_argument("--cases", default="", help="some of them, with commas; all by default")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    seconds, settle_s = (2.0, 0.0) if options.quick else (options.seconds, 15.0)
    wanted = [name for name in options.cases.split(",") if name] or list(CASES)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in wanted:
                runs[name].append(
                    measured(CASES[name], Path(folder), seconds=seconds, settle_s=settle_s)
                )
                _print({name: runs[name][-1]})
    found = {name: medians(each) for name, each in runs.items()}
    about = {"seconds": seconds, "rounds": options.rounds, **measure.machine()}
    print(json.dumps(measure.rounded({"cases": found, **about})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
