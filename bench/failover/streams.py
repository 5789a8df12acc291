"""Clients: the requests of a round, and what each client saw of its answer."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httpx

MODEL: Final = "m"
TIMEOUT_S: Final = 300.0
MAX_LOGPROB_ERROR: Final = 1e-3  # of rows that are computed in other batches
WORDS = (  # noqa: SIM905 - sixty lines otherwise
    "river mountain harbour winter engine garden letter market window silver summer doctor island "
    "morning captain village forest teacher bridge evening soldier kitchen station painter valley"
).split()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Ask(NamedTuple):
    """One request of a round."""

    kind: str
    path: str
    body: dict[str, Any]


def asks(num: int, max_tokens: int, capsule: str | None = None) -> list[Ask]:
    """`num` requests of all kinds by turns; forks of `capsule` among them, if it is given."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {"temperature": 0}),
        ("sampled", {"temperature": 0.9, "top_p": 0.95}),
        ("json_schema", {"temperature": 0.7, "guided_json": SCHEMA, "ignore_eos": False}),
        ("n=4", {"temperature": 1.0, "n": 4}),
        ("penalties", {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.5}),
        ("stop", {"temperature": 0.8, "stop": ["\n\n", " the end", "zebra"]}),
        ("logprobs", {"temperature": 0.5, "logprobs": 3}),
        ("whole", {"temperature": 0.8, "n": 2, "stream": False, "stream_options": None}),
    ]
    if capsule is not None:
        kinds.append(("fork", {"temperature": 0.9, "n": 2}))
    return [_ask(i, *kinds[i % len(kinds)], max_tokens, capsule) for i in range(num)]


def _ask(i: int, kind: str, options: dict[str, Any], max_tokens: int, capsule: str | None) -> Ask:
    body = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 1000 + i}
    body |= {"stream_options": {"include_usage": True}} | options
    if kind == "fork":
        return Ask(kind, f"/v1/capsules/{capsule}/fork", body)
    words = [WORDS[(7 * i + 3 * k) % len(WORDS)] for k in range(12)]
    prompt = f"Story {i} about {', '.join(words)}. Once upon a time"
    return Ask(kind, "/v1/completions", {"model": MODEL, "prompt": prompt, **body})


@dataclass
class Seen:
    """The answer as one client saw it. Seconds are of `time.monotonic`."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice, as the rest
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    capsules: dict[int, str] = field(default_factory=dict)
    workers: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # tokens of prompt and answer
    error: str = ""
    code: str = ""  # of the error
    status: int = 0  # of HTTP
    is_done: bool = False  # the end mark came
    worker: str = ""  # of the header
    num_events: int = 0
    stall_s: float = 0.0  # between two pieces of one choice, the longest
    ended: float = 0.0
    _last: dict[int, float] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its end without an error."""
        return self.is_done and not self.error and "error" not in self.finishes.values()

    def take(self, event: dict[str, Any], now: float) -> None:
        """Take in an event of the stream."""
        if "error" in event:
            self.error, self.code = str(event["error"]), str(event["error"].get("code"))
            return
        self.num_events += 1
        for choice in event["choices"]:
            self._take_choice(choice, now)
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        index = choice["index"]
        self.stall_s = max(self.stall_s, now - self._last.get(index, now))
        self._last[index] = now
        self.texts[index] = self.texts.get(index, "") + _text_of(choice)
        if told := choice.get("logprobs"):
            self.tokens.setdefault(index, []).extend(told["tokens"])
            self.logprobs.setdefault(index, []).extend(told["token_logprobs"])
        if (finish := choice["finish_reason"]) is not None:
            self.finishes[index] = finish
            self.workers[index] = choice["mallee"]["worker"]
            if (capsule := choice["mallee"]["capsule"]) is not None:
                self.capsules[index] = capsule

    def difference(self, other: "Seen") -> str:
        """The first field in which both answers differ; "" if they are the same."""
        for name in ("texts", "tokens", "finishes", "usage"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} instead of {getattr(other, name)}"
        for index, values in self.logprobs.items():
            pairs = zip(values, other.logprobs[index], strict=True)
            if any(abs(a - b) > MAX_LOGPROB_ERROR for a, b in pairs):
                return f"logprobs: {values} instead of {other.logprobs[index]}"
        if self.capsules.keys() != other.capsules.keys():
            return f"capsules: {self.capsules} instead of {other.capsules}"
        return ""


def _text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of a completion or a chat, whole or a piece of it."""
    message = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or message.get("content") or "")


async def stream(client: httpx.AsyncClient, ask: Ask, seen: Seen) -> Seen:
    """Ask, and take in the answer, however it ends."""
    try:
        async with client.stream("POST", ask.path, json=ask.body) as answer:
            seen.worker = answer.headers.get("x-mallee-worker", "")
            seen.status = answer.status_code
            if answer.status_code != 200:
                body = (await answer.aread()).decode()
                seen.error, seen.code = f"{answer.status_code}: {body}", _code_of(body)
            else:
                await _read(answer, seen)
    except (httpx.HTTPError, OSError) as error:
        seen.error = seen.error or repr(error)
    seen.ended = time.monotonic()
    if not seen.is_done and not seen.error:
        seen.error = "the stream ended without its end mark"
    return seen


def _code_of(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _read(answer: httpx.Response, seen: Seen) -> None:
    if answer.headers["content-type"] == "application/json":
        seen.take(json.loads(await answer.aread()), time.monotonic())
        seen.is_done = True
        return
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            seen.is_done = True
        elif line.startswith("data: "):
            seen.take(json.loads(line.removeprefix("data: ")), time.monotonic())


class Round:
    """Requests that run at once."""

    def __init__(self, client: httpx.AsyncClient, asked: Sequence[Ask]) -> None:
        self.asks = asked
        self.seen = [Seen() for _ in asked]
        self._tasks = [
            asyncio.create_task(stream(client, ask, seen))
            for ask, seen in zip(asked, self.seen, strict=True)
        ]

    async def under_way(self, num_events: int = 6) -> None:
        """Returns once three quarters of the answers have so many pieces, or are over."""
        num_needed = 3 * len(self.seen) // 4
        while self._num_under_way(num_events) < num_needed:  # noqa: ASYNC110 - text of other processes
            await asyncio.sleep(0.02)

    def _num_under_way(self, num_events: int) -> int:
        return sum(each.num_events >= num_events or each.ended > 0 for each in self.seen)

    async def whole(self) -> list[Seen]:
        """The answers as their clients saw them, once all are over."""
        return list(await asyncio.gather(*self._tasks))


def client_of(url: str) -> httpx.AsyncClient:
    """A client with a connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)
