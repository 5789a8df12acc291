"""Streamed completions in a closed loop, by a client that is small enough not to be what is measured.

    python -m bench.gateway.mock_load --url http://127.0.0.1:8000 --concurrency 64 --seconds 5

Prompts of about 460 words, three quarters of which are one of 50 shared beginnings; 8 output tokens. An
answer counts from sending its request to its last byte, and must end with the stream's end mark.
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

WORDS = (  # noqa: SIM905 - sixty lines otherwise
    "the of and to in that is was for it with as his on be at by had not are but from or have an they "
    "which one you were all her she there would their we him been has when who will more no if out so "
    "water people system because number through between another against without different important"
).split()
NUM_PREFIXES = 50
NUM_WORDS = 460
OUTPUT_TOKENS = 8
_DONE, _END = b"data: [DONE]\n\n", b"0\r\n\r\n"


class Client(asyncio.Protocol):
    """One kept-alive connection; the next request leaves when the last answer is there."""

    def __init__(self, draw: Callable[[], bytes | None], on_answer: "OnAnswer") -> None:
        self._draw = draw
        self._on_answer = on_answer
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._sent = self._first = 0.0
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        if not self._first and b"data:" in data:
            self._first = time.perf_counter()
        tail = self._tail + data
        self._tail = tail[-64:]
        if tail.endswith(_END) or (b"HTTP/1.1 200" not in tail and b"HTTP/1.1 " in tail):
            now = time.perf_counter()
            is_whole = _DONE in self._tail
            self._on_answer(
                self._sent, (self._first or now) - self._sent, now - self._sent, is_whole
            )
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        request = self._draw()
        if request is None:
            self._transport.close()
            return
        self._tail = b""
        self._sent, self._first = time.perf_counter(), 0.0
        self._transport.write(request)


OnAnswer = Callable[[float, float, float, bool], None]


def requests(model: str, host: str, seed: int, count: int) -> list[bytes]:
    """`count` whole HTTP requests, made before the clock runs."""
    draw = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(draw.choices(WORDS, k=n))

    prefixes = [words(NUM_WORDS * 3 // 4) for _ in range(NUM_PREFIXES)]
    made = []
    for _ in range(count):
        prompt = f"{draw.choice(prefixes)} {words(NUM_WORDS // 4)}"
        body = json.dumps(
            {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True,
             "ignore_eos": True}
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


def endless(made: list[bytes]) -> Iterator[bytes]:
    while True:
        yield from made


async def load(args: argparse.Namespace) -> dict[str, Any]:
    parts = urlsplit(args.url)
    supply = endless(requests(args.model, parts.netloc, args.seed, args.prompts))
    begin = time.perf_counter() + args.warm_up_s
    end = begin + args.seconds
    firsts: list[float] = []
    wholes: list[float] = []
    errors = left = 0

    def draw() -> bytes | None:
        nonlocal left
        if args.requests:
            left += 1
            return next(supply) if left <= args.requests else None
        return next(supply) if time.perf_counter() < end else None

    def on_answer(sent: float, first_s: float, whole_s: float, is_whole: bool) -> None:
        nonlocal errors
        if sent >= begin or args.requests:
            errors += not is_whole
            firsts.append(first_s)
            wholes.append(whole_s)

    loop, started = asyncio.get_running_loop(), time.perf_counter()
    clients = []
    for _ in range(args.concurrency):
        _, client = await loop.create_connection(
            lambda: Client(draw, on_answer), parts.hostname, parts.port
        )
        clients.append(client)
    await asyncio.gather(*(client.closed for client in clients))
    elapsed = time.perf_counter() - (started if args.requests else begin)
    return {
        "rps": len(wholes) / elapsed,
        "p50_ms": _at(wholes, 50),
        "p99_ms": _at(wholes, 99),
        "first_p50_ms": _at(firsts, 50),
        "first_p99_ms": _at(firsts, 99),
        "requests": len(wholes),
        "errors": errors,
        "seconds": elapsed,
    }


def _at(seconds: list[float], percent: int) -> float:
    ordered = sorted(seconds) or [0.0]
    return 1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up-s", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=0, help="so many, instead of seconds")
    parser.add_argument("--prompts", type=int, default=4000, help="different ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        result = asyncio.run(load(args))
    else:
        result = uvloop.run(load(args))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
