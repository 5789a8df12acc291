"""Decode steps beside a verifier that scores the branches (D12): `mallee.stop_when.score`.

    python -m bench.serve.scores [--rounds N] [--tokens N] [--serve]

A streamed request of 16 branches of 300 tokens; a step is the time between two tokens of a branch, at the
client. By turns: without a verifier; with one that answers at once; with one that computes for 20 ms a call;
with one that answers no call. Each branch is shown every 8 tokens, the verifier is a process of its own.
`mallee mock`, one engine, a step each 10 ms, so that a longer step is made by gateway, links or HTTP; with
`--serve` also `mallee serve` with SmolLM2 on one thread, which shares the machine's cores with the verifier.
Figures are of all rounds together; the last line of stdout is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx

from bench.measure import machine
from bench.serve.sides import MODEL, answering
from mallee.mocker.timing.closed import ClosedForm, Plane
from mallee.mocker.timing.files import TimingFile
from mallee.runtime.addresses import free_port

STEP_S: Final = 0.01
BRANCHES: Final = 16
EVERY: Final = 8
BUSY_S: Final = 0.02
CASES: Final = ("none", "at_once", "busy", "silent")
HEAD: Final = 20  # steps of a stream that are left out: its prefill, and what comes with it


def verify(ready: Any, port: Any, calls: Any) -> None:
    """A verifier in a process of its own; the path of a call names its case."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body at once: else the kernel waits with the body for 40 ms

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            calls.value += 1
            if self.path == "/busy":
                until = time.thread_time() + BUSY_S
                while time.thread_time() < until:
                    pass
            if self.path == "/silent":
                time.sleep(60)
            body = json.dumps({"scores": [1.0] * len(question["branches"])}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.value = server.server_address[1]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ready.set()
    server.serve_forever()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process of its own"
    parent.join()
    os._exit(1)


@contextmanager
def verifying() -> Iterator[tuple[str, Any]]:
    """The verifier's address, and the number of its calls so far."""
    context = multiprocessing.get_context("spawn")
    ready, port, calls = context.Event(), context.Value("i", 0), context.Value("i", 0)
    process = context.Process(target=verify, args=(ready, port, calls))
    process.start()
    try:
        assert ready.wait(60), "the verifier did not start"
        yield f"http://127.0.0.1:{port.value}", calls
    finally:
        process.terminate()
        process.join()


@contextmanager
def mock(folder: Path, verifier: str) -> Iterator[str]:
    """The URL of a mocked service at that pace."""
    timing, port = folder / "timing.json", free_port()
    TimingFile(model=ClosedForm(0.0, 2e-6, 0.0, 0.0, (Plane(STEP_S, 0.0, 0.0),))).save(timing)
    command = [sys.executable, "-m", "mallee.cli", "mock", "--model", "smollm2", "--engines", "1"]
    command += ["--set", f"served_model_name={MODEL}", "--port", str(port), "--timing", str(timing)]
    command += ["--set", "mock.jitter=0", "--set", f"http.callbacks=[{verifier}]"]
    with answering(command, port, folder) as url:
        yield url


@contextmanager
def serve(folder: Path, verifier: str) -> Iterator[str]:
    """The URL of a service with a real model."""
    port = free_port()
    command = [sys.executable, "-m", "mallee.cli", "serve", "--model", "smollm2"]
    for setting in (
        *(f"served_model_name={MODEL}", "engine.kv_tokens=16384", "engine.threads=1"),
        f"http.callbacks=[{verifier}]",
    ):
        command += ["--set", setting]
    with answering([*command, "--port", str(port)], port, folder) as url:
        yield url


def steps_ms(url: str, score: str, seed: int, num_tokens: int) -> list[float]:
    """The times between two tokens of a branch, at the client; with a verifier if `score` is its URL."""
    body: dict[str, Any] = {
        **{"model": MODEL, "prompt": f"A verifier looks at round {seed}.", "n": BRANCHES},
        **{"max_tokens": num_tokens, "ignore_eos": True, "seed": seed, "stream": True},
        "logprobs": 0,  # so that each token is told, though it be no whole character
    }
    if score:
        body["mallee"] = {"stop_when": {"score": {"url": score, "below": 0.5, "every": EVERY}}}
    at: dict[int, list[float]] = {i: [] for i in range(BRANCHES)}
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            now = time.perf_counter()
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    num = len((choice.get("logprobs") or {}).get("tokens", ()))
                    at[choice["index"]] += [now] * num
    assert all(len(times) == num_tokens for times in at.values()), "an answer is too short"
    return [
        1000 * (b - a)
        for times in at.values()
        for a, b in zip(times[HEAD:], times[HEAD + 1 :], strict=False)
    ]


def figures(steps: list[float], num_calls: int) -> dict[str, float]:
    found = sorted(steps)
    return {
        "p50_ms": round(found[len(found) // 2], 3),
        "p99_ms": round(found[len(found) * 99 // 100], 3),
        "max_ms": round(found[-1], 3),
        "steps": len(found),
        "calls": num_calls,
    }


def play(url: str, verifier: str, calls: Any, *, rounds: int, num_tokens: int) -> dict[str, Any]:
    """The figures of each case, and its p99 by that without a verifier."""
    steps: dict[str, list[float]] = {case: [] for case in CASES}
    counts = dict.fromkeys(CASES, 0)
    for number in range(rounds + 1):
        # Each case stands at each place of the order, for the machine's speed changes.
        for case in (*CASES[number % 4 :], *CASES[: number % 4]):
            before = calls.value
            score = "" if case == "none" else f"{verifier}/{case}"
            found = steps_ms(url, score, number, num_tokens)
            if number:  # the first round warms up
                steps[case] += found
                counts[case] += calls.value - before
    by_case = {case: figures(steps[case], counts[case]) for case in CASES}
    base = by_case["none"]["p99_ms"]
    for case, each in by_case.items():
        each["p99_ratio"] = round(each["p99_ms"] / base, 3)
        print(f"{case:8} {each}", file=sys.stderr)
    return by_case


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300, help="of a branch")
    parser.add_argument("--serve", action="store_true", help="also with a real model, over Ray")
    args = parser.parse_args()
    sides = {"mock": mock, **({"serve": serve} if args.serve else {})}
    report: dict[str, Any] = {"bench": "scores", "rounds": args.rounds, "step_ms": STEP_S * 1000}
    with verifying() as (verifier, calls):
        for name, side in sides.items():
            with tempfile.TemporaryDirectory() as folder, side(Path(folder), verifier) as url:
                report[name] = play(
                    url, verifier, calls, rounds=args.rounds, num_tokens=args.tokens
                )
    print(json.dumps({**report, **machine()}))


if __name__ == "__main__":
    main()
