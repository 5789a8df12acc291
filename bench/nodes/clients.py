"""Clients that stream without a pause, and how each answer compares with the undisturbed one."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httpx

from bench.failover.streams import Ask, Seen, stream

MODEL: Final = "m"
MAX_TOKENS: Final = 200
_PAUSE_S = 0.1  # after a failure


class Ended(NamedTuple):
    """An answer, and which request it was for."""

    client: int
    seen: Seen


@dataclass
class Load:
    """The answers that clients saw since the start."""

    undisturbed: Sequence[Seen]
    answers: list[Ended] = field(default_factory=list)

    def figures(self, since: int) -> dict[str, Any]:
        """Of the answers after the first `since`."""
        ended = self.answers[since:]
        whole = [each for each in ended if each.seen.is_whole]
        wrong = [
            text for each in whole if (text := each.seen.difference(self.undisturbed[each.client]))
        ]
        failed = [each.seen for each in ended if not each.seen.is_whole]
        return {
            "requests": len(ended),
            "failed": len(failed),
            "wrong": len(wrong),
            "stall_s_max": max((each.seen.stall_s for each in whole), default=0.0),
            "errors": sorted({each.error for each in failed} | set(wrong))[:3],
            "unclean_ends": sum(each.is_done for each in failed),
        }


class Pinned:
    """Capsules that are kept, a few on every worker, and the texts of their forks."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.ids: list[str] = []
        self.texts: list[str] = []

    async def make(self, num: int) -> None:
        for i in range(num):
            body = {"model": MODEL, "prompt": f"{i} trunks of a tree from one root. " * 12}
            answer = await self._client.post("/v1/capsules", json=body)
            assert answer.status_code == 200, answer.text
            self.ids.append(answer.json()["id"])
        self.texts = [await self._fork(each) for each in self.ids]

    async def num_equal(self) -> int:
        """The number of forks with the text that they had first."""
        texts = [await self._fork(each) for each in self.ids]
        pairs = list(zip(texts, self.texts, strict=True))
        for text in {a for a, b in pairs if a != b}:
            sys.stderr.write(f"a fork is another one: {text}\n")
        return sum(a == b for a, b in pairs)

    async def _fork(self, capsule: str) -> str:
        body = {"max_tokens": 16, "ignore_eos": True, "seed": 5, "n": 2}
        answer = await self._client.post(f"/v1/capsules/{capsule}/fork", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        return str([choice["text"] for choice in answer.json()["choices"]])


def asks(num: int, max_tokens: int = MAX_TOKENS) -> list[Ask]:
    """A request for each client: greedy, sampled and two of one prompt by turns."""
    kinds: Sequence[tuple[str, dict[str, Any]]] = (
        ("greedy", {"temperature": 0}),
        ("sampled", {"temperature": 0.9}),
        ("n=2", {"temperature": 1.0, "n": 2}),
    )
    return [
        Ask(
            kind,
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": f"Story {i} of a mallee, a tree of many trunks. " * (1 + i % 4),
                **{"max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": 100 + i},
                **options,
            },
        )
        for i in range(num)
        for kind, options in [kinds[i % len(kinds)]]
    ]


async def undisturbed(client: httpx.AsyncClient, asked: Sequence[Ask]) -> list[Seen]:
    """The answers to these requests, one after the other."""
    answers = [await stream(client, ask, Seen()) for ask in asked]
    assert all(each.is_whole for each in answers), [each.error for each in answers]
    return answers


@asynccontextmanager
async def streaming(
    client: httpx.AsyncClient, asked: Sequence[Ask], expected: Sequence[Seen]
) -> AsyncIterator[Load]:
    """Each client sends its request over and over, until the block ends; then the last are awaited."""
    load = Load(expected)
    is_over = asyncio.Event()

    async def repeat(number: int, ask: Ask) -> None:
        while not is_over.is_set():
            seen = await stream(client, ask, Seen())
            load.answers.append(Ended(number, seen))
            if not seen.is_whole:
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as clients:
        for number, ask in enumerate(asked):
            clients.create_task(repeat(number, ask))
        try:
            yield load
        finally:
            is_over.set()


async def some_more(load: Load, rounds: int, timeout_s: float = 120.0) -> None:
    """Until each client has seen the ends of so many answers that begin later."""
    num_clients = len(load.undisturbed)
    begin, since = time.monotonic(), len(load.answers)

    def fewest() -> int:
        counts = [0] * num_clients
        for each in load.answers[since:]:
            counts[each.client] += 1
        return min(counts)

    while fewest() <= rounds:
        if time.monotonic() > begin + timeout_s:
            raise TimeoutError(f"a client saw {fewest()} answers in {timeout_s:.0f} s")
        await asyncio.sleep(0.05)
