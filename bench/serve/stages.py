"""CPU of a short streamed completion over Ray, by stage: what the gateway does for it, HAProxy, the engines.

    python -m bench.serve --stages [--engines 100]

The load is that of `bench.serve` at 16 clients. A process's CPU for a request is what the system counts while
nobody looks. Then py-spy looks at who has the interpreter's lock in the gateway; a look counts for the stage
of its innermost frame that is of one (`STAGES`), and the gateway's CPU is shared out by looks.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from bench.gateway.__main__ import load
from bench.idle import sample
from bench.serve.sides import MODEL, serve

CLIENTS: Final = 16
GATEWAYS: Final = (1, 2, 4)
SECONDS: Final = 10.0
LOOKS_A_SECOND: Final = 200
PARTS: Final = {"gateway": "gateway", "haproxy": "HAProxy", "engines": "worker"}  # roles
STAGES: Final = (
    ("detokenize", ("Detokenizer", "api/deltas.py", "api/text/cuts.py")),
    ("tokenize", ("api/prompts.py", "api/text/", "tokenizers/")),
    ("hash", ("/hashing.py",)),
    ("send to workers", ("HostLink._", "Connection.send", "Connection._write")),
    ("frames", ("runtime/transport/", "gateway/requests/deltas.py", "RunningRequest.deliver")),
    ("events of workers", ("runtime/bus/", "nats/", "gateway/fleet/", "router/sync/")),
    ("route and book", ("router/placement/", "router/load/", "router/index/", "router/router.py")),
    ("dispatch", ("router/dispatch/", "gateway/shell.py", "gateway/requests/")),
    ("read and validate", ("entry/asking.py", "entry/decoding.py", "entry/bodies.py")),
    ("write events", ("api/sse.py", "api/answers.py", "api/serve.py")),
    ("gate, keys, counts", ("api/entry/", "gateway/access/", "runtime/telemetry/")),
    ("plan", ("mallee/api/", "mallee/gateway/")),
    ("HTTP", ("uvicorn/", "starlette/", "runtime/proxy/")),
)
"""Stages, and what of a frame ("FUNCTION (FILE:LINE)") tells of them; the first that fits."""


def stage_of(stack: str) -> str:
    """The stage of a look: frames from the outermost, with ";" between."""
    for frame in reversed(stack.split(";")):
        for stage, marks in STAGES:
            if any(mark in frame for mark in marks):
                return stage
    return "other"


@contextmanager
def looking(pid: int, out: Path) -> Iterator[None]:
    """py-spy beside the block, which lasts `SECONDS`; it writes "STACK LOOKS" lines to `out`."""
    command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(pid), "--gil"]
    command += ["--rate", str(LOOKS_A_SECOND), "--duration", str(round(SECONDS))]
    command += ["--format", "raw", "--full-filenames", "--output", str(out)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=subprocess.PIPE, text=True) as process:
        yield
        _, said = process.communicate(timeout=60)
    if process.returncode:
        raise RuntimeError(f"py-spy ended with {process.returncode}: {said}")


def measured(
    engines: int, prompt_chars: int, *, gateways: int = 1, looks: Path | None = None
) -> dict[str, float]:
    """Requests a second, and CPU of a request in us by role, of all gateways together; then py-spy looks."""
    with (
        tempfile.TemporaryDirectory() as name,
        serve(Path(name), engines, gateways=gateways) as url,
    ):

        def run(seconds: float) -> dict[str, float]:
            shape = {"prompt_chars": prompt_chars, "prompts": 4000, "model": MODEL, "seed": 1}
            timing = {"seconds": seconds, "warm_up_s": 0}
            return load(url, stream=True, concurrency=CLIENTS, **timing, **shape)

        run(SECONDS / 2)  # what comes for the first time takes longer
        before = sample(psutil.Process())
        figures = run(SECONDS)
        used_s: Counter[str] = Counter()
        for pid, process in sample(psutil.Process()).items():
            used_s[process.role] += process.cpu_s - before[pid].cpu_s if pid in before else 0.0
        if looks is not None:
            pids = {process.role: pid for pid, process in before.items()}
            with looking(pids["gateway"], looks):
                run(SECONDS)
    cpu_us = {part: used_s[role] / figures["requests"] * 1e6 for part, role in PARTS.items()}
    return {"rps": figures["rps"], **cpu_us}


def bench(engines: int, prompt_chars: int) -> dict[str, Any]:
    """Requests a second, CPU of a request by process, of the gateway's by stage, of several gateways."""
    with tempfile.TemporaryDirectory() as name:
        looks = Path(name) / "looks"
        cpu_us = measured(engines, prompt_chars, looks=looks)
        shares: Counter[str] = Counter()
        for line in looks.read_text().splitlines():
            stack, _, num = line.rpartition(" ")
            shares[stage_of(stack)] += int(num)
    us = cpu_us["gateway"] / shares.total()
    return {
        "rps": cpu_us.pop("rps"),
        "cpu_us": cpu_us,
        "looks": shares.total(),
        "gateway_us": {stage: num * us for stage, num in shares.most_common()},
        "gateways": {n: measured(engines, prompt_chars, gateways=n) for n in GATEWAYS},
    }
