"""Clients of all kinds at once, and what each must see.

A deck of requests is asked undisturbed first. From then on each answer must be that one, or an error of a
kind that docs/api.md names, and it must end once: an end mark means a whole answer.
"""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import httpx

from bench.failover.streams import MODEL, WORDS, Ask, Seen, asks, client_of, stream
from bench.soak import hostile
from bench.soak.keys import Keys
from bench.soak.logs import Asked
from bench.soak.raw import exchange, trickle

ANSWER_S: Final = 90.0  # for which an answer may take, faults and all
REST_S: Final = 0.2  # of a client that was refused
TTL_S: Final = 20.0  # of capsules: their clients may never learn of them
MAX_SHOWN: Final = 20
REFUSALS: Final = frozenset(
    (
        *("unavailable", "lookup_incomplete", "store_away", "no_worker", "worker_lost"),
        *("poison_request", "pool_exhausted"),
        *("capsules_full", "saturated", "overloaded", "deadline_exceeded", "tenant_queue_full"),
    )
)
GONE: Final = frozenset(("capsule_not_found", "capsule_lost", "capsule_abandoned"))


class Service(Protocol):
    """The service as its clients know it."""

    @property
    def urls(self) -> Sequence[str]: ...

    def may_cut(self, gateway: int, since: float) -> bool:
        """Whether a fault since then explains that the gateway cut connections."""
        ...


@dataclass
class Ledger:
    """Ends of requests by kind, and those that were wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def note(self, kind: str, end: str, seconds: float = 0.0) -> None:
        self.counts[f"{kind}: {end}"] += 1
        self.longest_s = max(self.longest_s, seconds)

    def fail(self, kind: str, why: str) -> None:
        self.counts[f"{kind}: WRONG"] += 1
        self.wrong.append(f"{kind}: {why}"[:1500])
        if len(self.wrong) <= MAX_SHOWN:
            print(f"  wrong: {kind}: {why[:1500]}", file=sys.stderr)


class Step(NamedTuple):
    """A request and the answer that it must have."""

    key: str
    ask: Ask


def chat(i: int, max_tokens: int) -> Ask:
    words = " ".join(WORDS[(5 * i + k) % len(WORDS)] for k in range(8))
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Talk of {words}, {i}."}]}
    body |= {"max_tokens": max_tokens, "seed": 77 + i, "stream": True, "ignore_eos": True}
    return Ask("chat", "/v1/chat/completions", body | {"n": 1 + i % 2})


def deck(num: int, max_tokens: int) -> list[Step]:
    """Requests that need nothing before them."""
    found = [*asks(num, max_tokens), *(chat(i, max_tokens) for i in range(num // 4))]
    return [Step(f"{i} {ask.kind}", ask) for i, ask in enumerate(found)]


class Clients:
    """All clients of one run. `seed` says what each does."""

    def __init__(
        self, service: Service, keys: Keys, *, seed: int, num_asks: int, max_tokens: int
    ) -> None:
        self.ledger = Ledger()
        self.asked: dict[str, Asked] = {}  # requests, by the ids that they are sent with
        self._keys = keys
        self._rng = random.Random(f"{seed} keys")
        self._service = service
        self._seed = seed
        self._max_tokens = max_tokens
        self._deck = deck(num_asks, max_tokens)
        self._expected: dict[str, Seen] = {}
        self._http: dict[tuple[int, str], httpx.AsyncClient] = {}  # by gateway and key
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []

    # Phases

    async def learn(self) -> None:
        """Ask everything once, undisturbed; then again, when caches are warm."""
        for _ in range(2):
            for step in self._deck:
                await self._ask("deck", 0, step, self._key(), may_fail=False)
            for number in range(len(self._deck) // 8):
                await self._tree(0, number, self._key(), may_fail=False)

    def begin(self, num: int) -> None:
        """`num` clients, each of whom asks for one thing after the other."""
        self._clients = [asyncio.create_task(self._client(i)) for i in range(num)]

    async def end(self) -> None:
        """Return when every client has its last answer, and each gateway the keys as they are now."""
        self._is_over = True
        await asyncio.gather(*self._clients)
        for gateway in range(len(self._service.urls)):
            for token in self._keys.ended:
                async with asyncio.timeout(ANSWER_S):
                    while await self._look(gateway, token) != 401:  # noqa: ASYNC110 # another process
                        await asyncio.sleep(REST_S)
                self.ledger.note("ended key", "401")

    async def close(self) -> None:
        for client in self._http.values():
            await client.aclose()

    # Keys

    def _key(self) -> str:
        return self._keys.choose(self._rng)

    def _with_key(self, gateway: int, token: str) -> httpx.AsyncClient:
        """A client of that gateway, each of whose requests has an id in `asked`."""
        found = self._http.get((gateway, token))
        if found is None:
            found = self._http[gateway, token] = client_of(self._service.urls[gateway])
            found.headers["authorization"] = f"Bearer {token}"
            found.event_hooks = {
                "request": [lambda request: self._note(gateway, request, 0)],
                "response": [
                    lambda answer: self._note(gateway, answer.request, answer.status_code)
                ],
            }
        return found

    async def _note(self, gateway: int, request: httpx.Request, status: int) -> None:
        name = request.headers.setdefault("x-request-id", f"r{len(self.asked)}")
        self.asked[name] = Asked(f"g{gateway}", time.monotonic(), status)

    async def _look(self, gateway: int, token: str) -> int:
        """The status of a small request; 0 without an answer."""
        try:
            return (await self._with_key(gateway, token).get("/v1/models")).status_code
        except httpx.HTTPError:
            return 0

    # What clients do

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        flows: list[tuple[int, Callable[[random.Random, int], Awaitable[None]]]] = [
            (50, self._one),
            (20, self._many_generations),
            (12, self._leave),
            (4, self._giant),
            (4, self._hostile),
            (1, self._slow_reader),
            (6, self._limited),
        ]
        weights, calls = [w for w, _ in flows], [call for _, call in flows]
        while not self._is_over:
            (flow,) = rng.choices(calls, weights)
            await flow(rng, rng.randrange(len(self._service.urls)))
            await asyncio.sleep(rng.random() * 0.1)

    async def _one(self, rng: random.Random, gateway: int) -> None:
        await self._ask("deck", gateway, rng.choice(self._deck), self._key())

    async def _many_generations(self, rng: random.Random, gateway: int) -> None:
        await self._tree(gateway, rng.randrange(len(self._deck) // 8), self._key())

    async def _tree(self, gateway: int, number: int, key: str, *, may_fail: bool = True) -> None:
        """A capsule, forks of it, forks of one of them, and of that; the capsule is deleted at the end."""
        prompt = " ".join(WORDS[(3 * number + k) % len(WORDS)] for k in range(40))
        made = await self._call(gateway, "capsule", "POST", "/v1/capsules", prompt, may_fail, key)
        if made is None:
            return
        began = time.monotonic()
        options = {"max_tokens": self._max_tokens // 2, "ignore_eos": True, "stream": True}
        capsule: str | None = made["id"]
        for depth in range(3):
            shape: dict[str, Any] = {"n": 3} if depth != 1 else {"suffixes": [" And", " But so"]}
            body = {**options, **shape, "seed": number + depth, "temperature": 0.8}
            step = Step(f"tree {number}/{depth}", Ask("fork", f"/v1/capsules/{capsule}/fork", body))
            may_forget = self._service.may_cut(gateway, began) or time.monotonic() - began > TTL_S
            seen = await self._ask("fork", gateway, step, key, may_fail=may_fail)
            if seen.code in GONE and not may_forget:
                self.ledger.fail("fork", f"{step.key}: forgotten: {seen.error}")
            capsule = seen.capsules.get(1)
            if not seen.is_whole or capsule is None:
                break
        path = f"/v1/capsules/{made['id']}"
        # A client that means it: refusals and broken connections are tried again.
        for _ in range(100):
            if await self._call(gateway, "delete", "DELETE", path, None, may_fail, key) is not None:
                break
            await asyncio.sleep(REST_S)

    async def _leave(self, rng: random.Random, gateway: int) -> None:
        """Ask, read a little of the stream, and hang up."""
        step = rng.choice([each for each in self._deck if each.ask.body.get("stream")])
        num_lines, token = rng.choice([0, 1, 3, 20]), self._keys.token(self._key())
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._with_key(gateway, token).stream(
                    "POST", step.ask.path, json=step.ask.body
                ) as answer,
            ):
                lines = answer.aiter_lines()
                for _ in range(num_lines):
                    await anext(lines, "")
        except TimeoutError:
            self.ledger.fail("left", f"{step.key}: no answer to leave in {ANSWER_S:g} s")
        except httpx.HTTPError:
            self.ledger.note("left", "cut")
        else:
            self.ledger.note("left", "left")

    async def _giant(self, rng: random.Random, gateway: int) -> None:
        """A prompt far beyond the context, or a body beyond the limit."""
        num_bytes, wants = rng.choice([(9 << 20, 413), (1 << 20, 400)])
        body = {"model": MODEL, "prompt": "tree " * (num_bytes // 5), "max_tokens": 4}
        since = time.monotonic()
        try:
            client = self._with_key(gateway, self._keys.token("acme"))
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            # A server may close while the rest of a body that it refuses is still being sent.
            is_fine = wants == 413 or self._service.may_cut(gateway, since)
            self._check("giant", is_fine, "cut", repr(error))
            return
        is_refused = answer.status_code in (wants, 503, 429)
        self._check("giant", is_refused, str(answer.status_code), answer.text[:300])

    async def _hostile(self, rng: random.Random, gateway: int) -> None:
        since = time.monotonic()
        for _ in range(5):
            token = self._keys.token(rng.choice(("acme", "operator")))
            request = hostile.with_key(hostile.request(rng), token)
            found = await exchange(
                self._service.urls[gateway],
                request.raw,
                timeout_s=ANSWER_S,
                ends=not request.is_http,
            )
            problem = hostile.problem(request, found)
            is_fine = not problem or self._service.may_cut(gateway, since)
            self._check("hostile", is_fine, f"{found.status // 100}xx", f"{problem} {request}")

    async def _slow_reader(self, rng: random.Random, gateway: int) -> None:
        """Read a byte at a time, and hang up after a while."""
        step = rng.choice([each for each in self._deck if each.ask.body.get("stream")])
        url, key = self._service.urls[gateway], self._keys.token("acme")
        await trickle(url, step.ask.path, step.ask.body, seconds=10.0, period_s=0.05, key=key)
        self.ledger.note("slow reader", "left")

    async def _limited(self, rng: random.Random, gateway: int) -> None:
        """Ask with a key that has a limit: 429, if that is used up, says how long to wait."""
        step, since = rng.choice(self._deck), time.monotonic()
        client = self._with_key(gateway, self._keys.token("limited"))
        try:
            answer = await client.post(step.ask.path, json=step.ask.body, timeout=ANSWER_S)
        except httpx.HTTPError as error:
            self._check("limited", self._service.may_cut(gateway, since), "cut", repr(error))
            return
        status, wait = answer.status_code, answer.headers.get("retry-after", "")
        is_fine = status in (200, 503) or (status == 429 and wait.isdigit() and int(wait) > 0)
        self._check("limited", is_fine, str(status), f"{wait!r}: {answer.text[:300]}")

    # One request

    async def _ask(
        self, kind: str, gateway: int, step: Step, key: str, *, may_fail: bool = True
    ) -> Seen:
        seen, since = Seen(), time.monotonic()
        client = self._with_key(gateway, self._keys.token(key))
        try:
            async with asyncio.timeout(ANSWER_S):
                await stream(client, step.ask, seen)
        except TimeoutError:
            self.ledger.fail(kind, f"{step.key}: no end in {ANSWER_S:g} s; {seen}")
            return seen
        if seen.status == 401:
            self._check(kind, self._keys.may_be_refused(key, since), "401", f"{step.key}: {key}")
        else:
            self._judge(kind, step, seen, may_fail, self._service.may_cut(gateway, since))
        self.ledger.longest_s = max(self.ledger.longest_s, time.monotonic() - since)
        if not seen.is_whole:
            await asyncio.sleep(REST_S)
        return seen

    def _judge(self, kind: str, step: Step, seen: Seen, may_fail: bool, may_be_cut: bool) -> None:
        ledger = self.ledger
        if seen.is_done and seen.code:
            ledger.fail(kind, f"{step.key}: an end mark after {seen.error}")
        elif seen.is_whole:
            expected = self._expected.setdefault(step.key, seen)
            difference = seen.difference(expected)
            if not seen.finishes or set(seen.finishes) != set(expected.finishes):
                difference = f"finishes: {seen.finishes} instead of {expected.finishes}"
            self._check(kind, not difference, "equal", f"{step.key}: {difference}")
        elif seen.is_done:  # a branch failed alone
            self._check(kind, may_fail, "a branch failed", f"{step.key}: {seen}")
        elif seen.code in (REFUSALS | GONE if kind == "fork" else REFUSALS):
            self._check(kind, may_fail, seen.code, f"{step.key}: {seen.error}")
        elif seen.code:
            ledger.fail(kind, f"{step.key}: {seen.error}")
        else:
            self._check(kind, may_be_cut, "cut", f"{step.key}: {seen.error}")

    async def _call(
        self,
        gateway: int,
        kind: str,
        method: str,
        path: str,
        prompt: str | None,
        may_fail: bool,
        key: str,
    ) -> dict[str, Any] | None:
        """The answer to a small request; None if it failed as it may."""
        since, client = time.monotonic(), self._with_key(gateway, self._keys.token(key))
        body = None if prompt is None else {"model": MODEL, "prompt": prompt, "ttl_s": TTL_S}
        try:
            answer = await client.request(method, path, json=body, timeout=ANSWER_S)
        except httpx.HTTPError as error:
            is_fine = may_fail and self._service.may_cut(gateway, since)
            self._check(kind, is_fine, "cut", f"{path}: {error!r}")
            return None
        found: dict[str, Any] = answer.json()
        code = found.get("error", {}).get("code", "")
        if answer.status_code == 200:
            self.ledger.note(kind, "done")
            return found
        if answer.status_code == 401:
            self._check(kind, self._keys.may_be_refused(key, since), "401", f"{path}: {key}")
            return {} if kind == "delete" else None  # its key will never be taken again
        is_fine = code in REFUSALS or (kind == "delete" and code in GONE)
        self._check(kind, may_fail and is_fine, code, f"{path}: {answer.text[:300]}")
        return {} if code in GONE else None

    def _check(self, kind: str, is_fine: bool, end: str, why: str) -> None:
        if is_fine:
            self.ledger.note(kind, end)
        else:
            self.ledger.fail(kind, why)
