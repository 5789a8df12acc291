"""k real engines as processes on the cores of this machine, beside one engine with all their rows.

The cores are the device, and Linux' scheduler its time slices. Run as a module it is one of the engines: it
loads the model, says "ready", and after a line on stdin plays its share and prints one JSON object.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.runner import load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

TIMEOUT_S: Final = 300.0


class Share(NamedTuple):
    """The part of one engine: a closed loop with as many clients as it has rows."""

    rows: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0


class Player:
    """One engine and its clients. Times are seconds of `time.perf_counter`."""

    def __init__(self, share: Share, model: str, threads: int) -> None:
        self._share = share
        length = share.prompt_tokens + share.output_tokens + 32
        self._forward = load(
            resolve_model(model),
            num_blocks=share.rows * length // 16 + 64,
            dtype="bfloat16",
            threads=threads,
            max_model_len=length,
        )
        self._engine = Engine(
            self._forward,
            config=EngineConfig(SchedulerConfig(max_rows=share.rows), max_answer_capsules=0),
            clock=time.monotonic,
            worker=WorkerId("w0"),
            incarnation=Incarnation(1),
        )
        self._draw = random.Random(share.seed)  # prompts
        self._asked: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_sent = 0
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_tokens = 0

    def warm_up(self) -> None:
        """One request, which does not count."""
        self._send()
        while self._engine.has_work:
            self._engine.step()
        self._num_sent = 0
        self._asked.clear()

    def play(self) -> None:
        """All requests, from the first to the end of the last."""
        for _ in range(min(self._share.rows, self._share.requests)):
            self._send()
        while self._engine.has_work:
            frames = self._engine.step().frames
            now = time.perf_counter()
            for frame in frames.values():
                for update in frame.updates:
                    assert update.error is None, update.error
                    self._hear(update.request, len(update.tokens), now)
                    if update.finish is not None and self._num_sent < self._share.requests:
                        self._send()

    def _send(self) -> None:
        vocab = self._forward.spec.vocab_size
        tokens = [self._draw.randrange(100, vocab) for _ in range(self._share.prompt_tokens)]
        name = f"r{self._num_sent}"
        self._num_sent += 1
        limits = Limits(self._share.output_tokens, ignore_eos=True)
        self._asked[name] = time.perf_counter()
        self._engine.submit(Generate(name, pack_tokens(tokens), limits), "bench")

    def _hear(self, request: str, num: int, now: float) -> None:
        if not num:
            return
        self.num_tokens += num
        if (last := self._last.get(request)) is not None:
            self.gaps_s.append(now - last)
        else:
            self.first_s.append(now - self._asked[request])
        self._last[request] = now


def together(engines: int, whole: Share, model: str, threads: int) -> dict[str, float]:
    """Figures of `engines` processes, each with its share of `whole`, that begin together."""
    share = whole._replace(rows=whole.rows // engines, requests=whole.requests // engines)
    with ExitStack() as stack:
        children = []
        for i in range(engines):
            command = [sys.executable, "-m", "bench.contention.processes", "--model", model]
            command += ["--threads", str(threads), "--share", json.dumps(share._replace(seed=i))]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise RuntimeError("an engine did not start; what it says is above")
        begin = time.perf_counter()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        parts = [json.loads(child.communicate(timeout=TIMEOUT_S)[0]) for child in children]
        took_s = time.perf_counter() - begin
    first = sorted(s for part in parts for s in part["first_s"])
    gaps = sorted(s for part in parts for s in part["gaps_s"])
    return {
        "tokens_per_s": sum(part["num_tokens"] for part in parts) / took_s,
        "ttft_p50_ms": at_share(first, 0.5),
        "ttft_p99_ms": at_share(first, 0.99),
        "itl_p50_ms": at_share(gaps, 0.5),
        "itl_p99_ms": at_share(gaps, 0.99),
        "peak_mb": sum(part["peak_mb"] for part in parts),
    }


def at_share(times_s: list[float], share: float) -> float:
    """Milliseconds that so great a share of the sorted times does not exceed."""
    return 1e3 * times_s[min(len(times_s) - 1, int(len(times_s) * share))]


def main() -> int:
    from bench.measure import peak_rss_nbytes

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=lambda text: Share(*json.loads(text)), required=True)
    options = parser.parse_args()
    player = Player(options.share, options.model, options.threads)
    player.warm_up()
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        return 1
    player.play()
    found: dict[str, Any] = {
        "first_s": player.first_s,
        "gaps_s": player.gaps_s,
        "num_tokens": player.num_tokens,
        "peak_mb": peak_rss_nbytes() / 1e6,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
