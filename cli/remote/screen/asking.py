"""A running service, asked without blocking: each question is awaited, and has a limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, NamedTuple, TypeVar

from mallee.cli.remote.fleet import Sample
from mallee.cli.remote.service import TIMEOUT_S
from mallee.client import AsyncMallee
from mallee.client.errors import ConnectionFailed
from mallee.protocol.api.operator import Course, Decision
from mallee.protocol.errors import Forbidden, MalleeError

MAX_DECISIONS: Final = 64
OPERATORS: Final = "this needs an operator's key, as MALLEE_API_KEY"
CLOSE_S: Final = 0.2

T = TypeVar("T")


class Told(NamedTuple, Generic[T]):
    """An answer, or a sentence that says why there is none."""

    answer: T | None = None
    missing: str = ""


class Look(NamedTuple):
    """A service's answers at one time. Without `health` it does not answer, and `trouble` says why.

    None: it was not asked for.
    """

    health: dict[str, Any] | None
    trouble: str = ""
    fleet: Told[Sample] | None = None
    decisions: Told[list[Decision]] | None = None


class LiveService:
    """A service, for one event loop and one watcher. To be closed."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._client = AsyncMallee(url, api_key=api_key, timeout=timeout_s, max_retries=0)
        self.url = self._client.base_url
        self._asked: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Give up what is asked. A moment goes by first, for connections that are just coming up."""
        if left := list(self._asked):
            await asyncio.wait(left, timeout=CLOSE_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()

    async def look(self, *, wants_decisions: bool = False) -> Look:
        """The fleet, and what else is wanted. Raises nothing of the service's."""
        try:
            health = await self._within(self._client.health())
        except MalleeError as error:
            return Look(None, str(error))
        if "reason" in health:  # the SDK's, of an answer that is no account of a service
            return Look(health, str(health["reason"]))
        return Look(
            health,
            fleet=await _told(self._fleet(health)),
            decisions=await _told(self._decisions()) if wants_decisions else None,
        )

    async def _fleet(self, health: dict[str, Any]) -> Sample:
        """Workers and counters. Raises Forbidden without an operator's key."""
        workers = await self._within(self._client.workers())
        metrics = await self._within(self._client.metrics())
        # 256 workers: 50 ms
        return await asyncio.to_thread(Sample.of, self._clock(), health, workers, metrics)

    async def _decisions(self) -> list[Decision]:
        """The last ones, youngest first. Raises Forbidden without an operator's key."""
        asked = self._client.explain(limit=MAX_DECISIONS, candidates=4)
        return (await self._within(asked)).data

    async def course(self, request: str) -> Course | None:
        """A request's course, whoever sent it. Raises NotFound, Forbidden."""
        found = await self._within(self._client.explain(request, candidates=1))
        return found.life or None

    async def _within(self, answer: Coroutine[Any, Any, T]) -> T:
        """Raises ConnectionFailed after the limit.

        If the caller is cancelled the request goes on, until `close`: one that is cancelled as its connection
        comes up would leave that open.
        """
        task = asyncio.create_task(answer)
        self._asked.add(task)
        task.add_done_callback(self._settle)
        done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
        if not done:
            task.cancel()
            raise ConnectionFailed(self.url, f"nothing within {self._timeout_s:g} s")
        return task.result()

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more


async def _told(asked: Awaitable[T]) -> Told[T]:
    try:
        return Told(await asked)
    except Forbidden:
        return Told(missing=OPERATORS)
    except MalleeError as error:
        return Told(missing=str(error))
