"""A closed-loop load generator for OpenAI completions, small enough not to be what is measured.

    python -m bench.gateway.load --url http://127.0.0.1:8000 --workload prefix --concurrency 16 --seconds 2
    python -m bench.gateway.load --url http://127.0.0.1:8000 --stream --concurrency 64 --requests 1000

flat: every prompt is new. prefix: three quarters of a prompt are one of 50 shared beginnings.
fork: a parent, then `--branches` children at once whose prompts extend it exactly, `--trees` trees at a
time; the share of the children that the parent's worker answered is their affinity. Workers are known by the
header `x-mallee-worker` or the answer's `system_fingerprint`. An answer counts from sending its request to
its last byte; a stream must end with the stream's end mark. With `--usage` streams end with the count of
their tokens, which must be `--max-tokens`. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from typing import Any, Final, NamedTuple, cast
from urllib.parse import urlsplit

from bench.measure import run_async

WORDS = (  # noqa: SIM905 - sixty lines otherwise
    "the of and to in that is was for it with as his on be at by had not are but from or have an they "
    "which one you were all her she there would their we him been has when who will more no if out so "
    "water people system because number through between another against without different important"
).split()
NUM_PREFIXES: Final = 50
VOCABULARY: Final = 40_000
CHARS_PER_TOKEN: Final = 4
MAX_TOKENS: Final = 8
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"([^"]*)"')
_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_TAIL = 2048  # bytes, in which the end of a stream and its usage are
_DONE, _LAST_CHUNK = b"data: [DONE]\n\n", b"0\r\n\r\n"


class Answer(NamedTuple):
    """One answer; seconds since its request was sent."""

    status: int
    worker: str
    first_s: float  # of a stream the first event, else the whole
    whole_s: float
    is_done: bool  # a stream that came to its end mark
    tokens: int | None = None  # as its usage says, if it does
    events: int = 0
    end: bytes = b""  # the last of what was received

    def is_good(self, is_stream: bool, tokens: int | None = None) -> bool:
        """Whether it is whole; with `tokens`, whether it has so many."""
        is_whole = self.status == 200 and (self.is_done or not is_stream)
        return is_whole and (tokens is None or self.tokens == tokens)


class Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection; one request at a time.

    A server may close it between two requests. One of which nothing was answered then is sent again on
    a new connection, as HTTP clients do; the time goes on.
    """

    def __init__(self, url: str, on_answer: Callable[["Connection", Answer], None]) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port or 80
        self._on_answer = on_answer
        self._raw: bytes | None = None  # of the request that is not answered
        self._is_again = False
        self._received = bytearray()
        self._head = b""  # lower case, once it is there
        self._sent = self._first = 0.0
        self._is_closing = False
        self.closed = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Raises OSError."""
        await asyncio.get_running_loop().create_connection(lambda: self, *self._address)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, raw: bytes) -> None:
        """Send a whole request."""
        self._raw, self._is_again = raw, False
        self._received, self._head = bytearray(), b""
        self._sent, self._first = time.perf_counter(), 0.0
        self._transport.write(raw)

    def close(self) -> None:
        self._is_closing = True
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._first and b"data:" in data:
            self._first = time.perf_counter()
        if not self._head:
            self._head = bytes(received[: received.find(b"\r\n\r\n") + 4]).lower()
        if not self._head or not _is_whole(received, self._head):
            return
        now = time.perf_counter()
        worker = _header(self._head, b"x-mallee-worker")
        if worker is None:
            found = _FINGERPRINT.search(received, len(self._head))
            worker = found.group(1) if found else b""
        counted = _TOKENS.search(received, max(0, len(received) - _TAIL))
        answer = Answer(
            status=int(self._head.split(b" ", 2)[1]),
            worker=worker.decode(),
            first_s=(self._first or now) - self._sent,
            whole_s=now - self._sent,
            is_done=_DONE in received[-64:],
            tokens=int(counted.group(1)) if counted else None,
            events=received.count(b"data: {"),
            end=bytes(received[-300:]),
        )
        self._raw = None
        self._on_answer(self, answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if self._is_closing:
            self.closed.set_result(None)
        elif self._raw is None or self._received or self._is_again:
            self.closed.set_exception(error or ConnectionError("the server closed a connection"))
        else:
            self._is_again = True
            self._reopening = asyncio.create_task(self._reopen(self._raw))

    async def _reopen(self, raw: bytes) -> None:
        try:
            await self.open()
        except OSError as error:
            self.closed.set_exception(error)
        else:
            self._transport.write(raw)


def _is_whole(received: bytearray, head: bytes) -> bool:
    if received.endswith(_LAST_CHUNK):
        return True
    length = _header(head, b"content-length")
    return length is not None and len(received) >= len(head) + int(length)


def _header(head: bytes, name: bytes) -> bytes | None:
    at = head.find(b"\r\n" + name + b":")
    return None if at < 0 else head[at + len(name) + 3 :].split(b"\r\n", 1)[0].strip()


class Requests:
    """Whole HTTP requests with prompts of about `chars` characters, or a quarter as many token ids."""

    def __init__(
        self,
        seed: int,
        chars: int,
        *,
        host: str,
        model: str,
        as_tokens: bool,
        is_stream: bool,
        max_tokens: int = MAX_TOKENS,
        has_usage: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._chars = chars
        self._host = host
        self._fields: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
        if is_stream:
            self._fields |= {"stream": True, "ignore_eos": True}
        if has_usage:
            self._fields["stream_options"] = {"include_usage": True}
        self._as_tokens = as_tokens
        self._prefixes = [self.text(chars * 3 // 4) for _ in range(NUM_PREFIXES)]

    def text(self, chars: int) -> Any:
        draw = self._random
        if self._as_tokens:
            return [draw.randrange(VOCABULARY) for _ in range(chars // CHARS_PER_TOKEN)]
        found: list[str] = []
        while chars > 0:
            found.append(draw.choice(WORDS))
            chars -= len(found[-1]) + 1
        return " ".join(found) + " "

    def flat(self) -> bytes:
        return self.request(self.text(self._chars))

    def prefix(self) -> bytes:
        return self.request(self._random.choice(self._prefixes) + self.text(self._chars // 4))

    def request(self, prompt: Any) -> bytes:
        body = json.dumps({"prompt": prompt, **self._fields}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def steady(args: argparse.Namespace, draw: Callable[[], bytes]) -> dict[str, Any]:
    """Closed loop: each of `concurrency` clients sends its next request when it has its answer.

    Requests are made before the clock runs. With `prompts` so many are sent again and again.
    """
    num = args.prompts or int(400 + 300 * args.seconds * min(args.concurrency, 16))
    made = [draw() for _ in range(num)]
    supply: Iterator[bytes] = cycle(made) if args.prompts else chain(made, iter(draw, None))
    started = time.perf_counter()
    begin = started if args.requests else started + args.warm_up_s
    end = begin + args.seconds
    answers: list[Answer] = []
    num_sent = 0

    def go_on(connection: Connection) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent <= args.requests if args.requests else time.perf_counter() < end:
            connection.send(next(supply))
        else:
            connection.close()

    def on_answer(connection: Connection, answer: Answer) -> None:
        if args.requests or time.perf_counter() - answer.whole_s >= begin:
            answers.append(answer)
        go_on(connection)

    connections = [await _connect(args.url, on_answer) for _ in range(args.concurrency)]
    for connection in connections:
        go_on(connection)
    await asyncio.gather(*(connection.closed for connection in connections))
    return _summary(answers, time.perf_counter() - begin, args)


async def fork(args: argparse.Namespace, requests: Requests) -> dict[str, Any]:
    """Parents and their children; affinity over all children that were answered."""
    answers: list[Answer] = []
    together = 0
    begin = time.perf_counter()
    waiting: dict[Connection, asyncio.Future[Answer]] = {}

    def on_answer(connection: Connection, answer: Answer) -> None:
        answers.append(answer)
        waiting.pop(connection).set_result(answer)

    async def ask(connection: Connection, raw: bytes) -> Answer:
        future = waiting[connection] = asyncio.get_running_loop().create_future()
        connection.send(raw)
        return await future

    async def tree() -> None:
        nonlocal together
        connections = [await _connect(args.url, on_answer) for _ in range(args.branches)]
        for _ in range(args.rounds):
            parent = requests.text(args.prompt_chars)
            first = await ask(connections[0], requests.request(parent))
            children = [requests.request(parent + requests.text(64)) for _ in connections]
            pairs = zip(connections, children, strict=True)
            found = await asyncio.gather(*(ask(each, raw) for each, raw in pairs))
            together += sum(answer.worker == first.worker != "" for answer in found)
        for connection in connections:
            connection.close()

    await asyncio.gather(*(tree() for _ in range(args.trees)))
    result = _summary(answers, time.perf_counter() - begin, args)
    return result | {"affinity": together / (args.branches * args.trees * args.rounds)}


async def _connect(url: str, on_answer: Callable[[Connection, Answer], None]) -> Connection:
    connection = Connection(url, on_answer)
    await connection.open()
    return connection


def _summary(answers: list[Answer], elapsed_s: float, args: argparse.Namespace) -> dict[str, Any]:
    tokens = args.max_tokens if args.usage else None
    good = [answer for answer in answers if answer.is_good(args.stream, tokens)]
    firsts = sorted(answer.first_s for answer in answers) or [0.0]
    wholes = sorted(answer.whole_s for answer in answers) or [0.0]
    middle, last = len(wholes) // 2, len(wholes) * 99 // 100
    return {
        "p50_ms": 1000 * wholes[middle],
        "p99_ms": 1000 * wholes[last],
        "first_p50_ms": 1000 * firsts[middle],
        "first_p99_ms": 1000 * firsts[last],
        "rps": len(answers) / elapsed_s,
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "first_error": next(
            (str(a.end) for a in answers if not a.is_good(args.stream, tokens)), None
        ),
        "tokens_per_s": sum(answer.tokens or 0 for answer in good) / elapsed_s,
        "tokens_per_event": sum(answer.tokens or 0 for answer in good)
        / (sum(answer.events for answer in good) or 1),
        "seconds": elapsed_s,
    }


def parse(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", choices=["flat", "prefix", "fork"], default="prefix")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm-up-s", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=0, help="so many, instead of seconds")
    parser.add_argument("--prompts", type=int, default=0, help="different ones; 0: all are")
    parser.add_argument("--prompt-chars", type=int, default=4096)
    parser.add_argument("--tokens", action="store_true", help="token ids instead of text")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--usage", action="store_true", help="streams end with their usage")
    parser.add_argument("--branches", type=int, default=8)
    parser.add_argument("--trees", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="m")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(args)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The load that `args` (see `parse`) describe, and its figures."""
    requests = Requests(
        args.seed,
        args.prompt_chars,
        host=urlsplit(args.url).netloc,
        model=args.model,
        as_tokens=args.tokens,
        is_stream=args.stream,
        max_tokens=args.max_tokens,
        has_usage=args.usage,
    )
    if args.workload == "fork":
        return await fork(args, requests)
    return await steady(args, requests.flat if args.workload == "flat" else requests.prefix)


def main() -> None:
    print(json.dumps(run_async(run(parse(sys.argv[1:])))))


if __name__ == "__main__":
    main()
