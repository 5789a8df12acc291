"""A closed-loop load generator for OpenAI completions, small enough not to be what is measured.

    python -m bench.gateway.load --url http://127.0.0.1:8000 --workload prefix --concurrency 16 --seconds 2

flat: every prompt is new. prefix: three quarters of a prompt are one of 50 shared beginnings.
fork: a parent, then `--branches` children at once whose prompts extend it exactly, `--trees` trees at a
time; how many children were answered by the parent's worker is their affinity. Workers are known by the
header `x-mallee-worker` or the answer's `system_fingerprint`. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

WORDS = (  # noqa: SIM905 - sixty lines otherwise
    "the of and to in that is was for it with as his on be at by had not are but from or have an they "
    "which one you were all her she there would their we him been has when who will more no if out so "
    "water people system because number through between another against without different important"
).split()
NUM_PREFIXES = 50
VOCABULARY = 40_000
CHARS_PER_TOKEN = 4
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"([^"]*)"')


class Answer(NamedTuple):
    status: int
    worker: str


class Connection:
    """One kept-alive HTTP/1.1 connection; one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer's status and who made it."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        raw = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(raw.split(b" ", 2)[1])
        content = await self._content(raw, self._reader)
        worker = _header(raw, b"x-mallee-worker")
        if worker is None:
            found = _FINGERPRINT.search(content)
            worker = found.group(1) if found else b""
        if (_header(raw, b"connection") or b"") == b"close":
            self.close()
        return Answer(status, worker.decode())

    async def _content(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        length = _header(head, b"content-length")
        if length is not None:
            return await reader.readexactly(int(length))
        content = b""
        while size := int((await reader.readline()).strip() or b"0", 16):
            content += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
        return content

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def _header(head: bytes, name: bytes) -> bytes | None:
    at = head.find(b"\r\n" + name + b":")
    return None if at < 0 else head[at + len(name) + 3 :].split(b"\r\n", 1)[0].strip()


class Prompts:
    """Prompts of about `chars` characters, as text or as token ids a quarter as many."""

    def __init__(self, seed: int, chars: int, *, as_tokens: bool, model: str) -> None:
        self._random = random.Random(seed)
        self._chars = chars
        self._as_tokens = as_tokens
        self._model = model
        self._prefixes = [self.text(chars * 3 // 4) for _ in range(NUM_PREFIXES)]

    def text(self, chars: int) -> Any:
        draw = self._random
        if self._as_tokens:
            return [draw.randrange(VOCABULARY) for _ in range(chars // CHARS_PER_TOKEN)]
        found: list[str] = []
        while chars > 0:
            found.append(draw.choice(WORDS) if draw.random() < 0.9 else str(draw.randrange(10**6)))
            chars -= len(found[-1]) + 1
        return " ".join(found) + " "

    def flat(self) -> bytes:
        return self.body(self.text(self._chars))

    def prefix(self) -> bytes:
        return self.body(self._random.choice(self._prefixes) + self.text(self._chars // 4))

    def body(self, prompt: Any) -> bytes:
        return json.dumps({"model": self._model, "prompt": prompt, "max_tokens": 8}).encode()


def _summary(latencies: list[float], elapsed_s: float, errors: int) -> dict[str, Any]:
    """`latencies` in seconds."""
    ordered = sorted(latencies) or [0.0]
    return {
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[len(ordered) * 99 // 100],
        "rps": len(latencies) / elapsed_s,
        "requests": len(latencies),
        "errors": errors,
    }


async def steady(
    url: str, draw: Callable[[], bytes], *, concurrency: int, seconds: float, warm_up_s: float
) -> dict[str, Any]:
    """Closed loop: each of `concurrency` clients sends its next request when it has its answer."""
    bodies = [draw() for _ in range(int(400 + 300 * seconds * min(concurrency, 16)))]
    supply = iter(bodies)
    latencies: list[float] = []
    errors = 0
    begin = time.perf_counter() + warm_up_s
    end = begin + seconds

    async def client() -> None:
        nonlocal errors
        connection = Connection(url)
        while (sent := time.perf_counter()) < end:
            body = next(supply, None) or draw()
            answer = await connection.post("/v1/completions", body)
            if sent >= begin:
                latencies.append(time.perf_counter() - sent)
                errors += answer.status != 200
        connection.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return _summary(latencies, time.perf_counter() - begin, errors)


async def fork(
    url: str, prompts: Prompts, *, chars: int, branches: int, trees: int, rounds: int
) -> dict[str, Any]:
    """Parents and their children; affinity over all children that were answered."""
    latencies: list[float] = []
    together = errors = 0
    begin = time.perf_counter()

    async def ask(connection: Connection, body: bytes) -> Answer:
        sent = time.perf_counter()
        answer = await connection.post("/v1/completions", body)
        latencies.append(time.perf_counter() - sent)
        return answer

    async def tree() -> None:
        nonlocal together, errors
        connections = [Connection(url) for _ in range(branches)]
        for _ in range(rounds):
            parent = prompts.text(chars)
            first = await ask(connections[0], prompts.body(parent))
            bodies = [prompts.body(parent + prompts.text(64)) for _ in range(branches)]
            pairs = zip(connections, bodies, strict=True)
            answers = await asyncio.gather(*(ask(each, body) for each, body in pairs))
            together += sum(answer.worker == first.worker != "" for answer in answers)
            errors += sum(answer.status != 200 for answer in (first, *answers))
        for connection in connections:
            connection.close()

    await asyncio.gather(*(tree() for _ in range(trees)))
    result = _summary(latencies, time.perf_counter() - begin, errors)
    return result | {"affinity": together / (branches * trees * rounds)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", choices=["flat", "prefix", "fork"], default="prefix")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up-s", type=float, default=0.5)
    parser.add_argument("--prompt-chars", type=int, default=4096)
    parser.add_argument("--tokens", action="store_true", help="token ids instead of text")
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--trees", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="m")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


async def run(args: argparse.Namespace) -> dict[str, Any]:
    prompts = Prompts(args.seed, args.prompt_chars, as_tokens=args.tokens, model=args.model)
    if args.workload == "fork":
        return await fork(
            args.url,
            prompts,
            chars=args.prompt_chars,
            branches=args.branches,
            trees=args.trees,
            rounds=args.rounds,
        )
    return await steady(
        args.url,
        prompts.flat if args.workload == "flat" else prompts.prefix,
        concurrency=args.concurrency,
        seconds=args.seconds,
        warm_up_s=args.warm_up_s,
    )


def main() -> int:
    work = run(_arguments())
    try:
        import uvloop
    except ImportError:
        result = asyncio.run(work)
    else:
        result = uvloop.run(work)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
