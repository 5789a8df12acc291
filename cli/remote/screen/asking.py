"""A running service, asked without blocking: each question is awaited, and has a limit."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from mallee.cli.remote.course import Course, Decision, Explained, read
from mallee.cli.remote.fleet import METRICS_PATH, WORKERS_PATH, Answers, Sample
from mallee.cli.remote.service import TIMEOUT_S
from mallee.client import AsyncMallee
from mallee.client.errors import ConnectionFailed
from mallee.client.results import read_answer
from mallee.client.sessions import ClosedSession, SessionData, SessionTree
from mallee.protocol.errors import Forbidden, MalleeError, NotFound

MAX_SESSIONS: Final = 100  # a page of the server
MAX_TREES: Final = 16
"""Sessions whose trees a look asks for: those that changed first, then those looked at the longest ago."""
MAX_DECISIONS: Final = 64
OPERATORS: Final = "this needs an operator's key, as MALLEE_API_KEY; your own sessions need none"
PAGE: Final = f"the first {MAX_SESSIONS} by name"
ACTION_TIMEOUT_S: Final = 45.0  # the server itself gives a close 30 s
CLOSE_S: Final = 0.2
_NO_PARAMS: Final[Mapping[str, str]] = {}

T = TypeVar("T")


class Told(NamedTuple, Generic[T]):
    """An answer, or a sentence that says why there is none. Both: the answer is not whole."""

    answer: T | None = None
    missing: str = ""


class Look(NamedTuple):
    """A service's answers at one time. Without `health` it does not answer, and `trouble` says why.

    None: it was not asked for.
    """

    health: dict[str, Any] | None
    trouble: str = ""
    fleet: Told[Sample] | None = None
    sessions: Told[list[SessionTree]] | None = None
    decisions: Told[list[Decision]] | None = None


class LiveService:
    """A service, for one event loop and one watcher. To be closed."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        cache_salt: str | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self._salt = cache_salt
        self._timeout_s = timeout_s
        self._clock = clock
        self._client = AsyncMallee(
            self.url, api_key=api_key, timeout_s=ACTION_TIMEOUT_S, max_retries=0
        )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s)
        self._asked: set[asyncio.Task[Any]] = set()
        self._trees: dict[str, SessionTree] = {}
        self._looked: dict[str, int] = {}  # the number of the look in which a tree was asked for
        self._num_looks = 0

    async def close(self) -> None:
        """Give up what is asked. A moment goes by first, for connections that are just coming up."""
        if left := list(self._asked):
            await asyncio.wait(left, timeout=CLOSE_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()
        await self._http.aclose()

    async def look(self, *, wants_sessions: bool = False, wants_decisions: bool = False) -> Look:
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
            sessions=await _told_sessions(self._sessions()) if wants_sessions else None,
            decisions=await _told(self._decisions()) if wants_decisions else None,
        )

    async def _fleet(self, health: dict[str, Any]) -> Sample:
        """Workers and counters. Raises Forbidden without an operator's key."""
        listed = (await self._json(WORKERS_PATH)).get("data", [])
        raw = await self._get(METRICS_PATH)
        answers = Answers(health, listed, raw.decode(errors="replace"))
        return await asyncio.to_thread(Sample.of, self._clock(), answers)  # 256 workers: 50 ms

    async def _decisions(self) -> list[Decision]:
        """The last ones, youngest first. Raises Forbidden without an operator's key."""
        limits = {"limit": str(MAX_DECISIONS), "candidates": "4"}
        return read(await self._json("/v1/router/explain", limits), Explained).data

    async def course_for_operators(self, request: str) -> Course | None:
        """A request's course, whoever sent it. Raises NotFound, Forbidden."""
        asked = {"request": request, "candidates": "1"}
        return read(await self._json("/v1/router/explain", asked), Explained).life

    async def course(self, request: str) -> Course:
        """The course of a request of the caller's. Raises NotFound."""
        found = await self._within(self._client.request(request, cache_salt=self._salt))
        return read(found, Course)

    async def _sessions(self) -> list[SessionTree]:
        """The first MAX_SESSIONS by name, each as it was when its tree was last asked for."""
        self._num_looks += 1
        listed = await self._within(
            self._client.sessions(limit=MAX_SESSIONS, cache_salt=self._salt)
        )
        by_name = {each.id: each for each in listed}
        for gone in self._trees.keys() - by_name.keys():
            del self._trees[gone], self._looked[gone]
        due = sorted(listed, key=self._turn)[:MAX_TREES]
        looks = (self._look_at(each.id) for each in due)
        for failed in await asyncio.gather(*looks, return_exceptions=True):
            if failed is not None:
                raise failed
        return [_as_listed(each, self._trees.get(each.id)) for each in listed]

    def _turn(self, listed: SessionData) -> tuple[bool, int]:
        """The order in which trees are asked for."""
        tree = self._trees.get(listed.id)
        is_same = (
            tree is not None
            and (tree.capsules, tree.running) == (listed.capsules, listed.running)
            and tree.last_used == listed.last_used
        )
        return is_same, self._looked.get(listed.id, 0)

    async def _look_at(self, name: str) -> None:
        """One that is closed meanwhile keeps its tree until the next look."""
        try:
            tree = await self._within(self._client.session(name, cache_salt=self._salt).show())
        except NotFound:
            return
        self._trees[name] = tree
        self._looked[name] = self._num_looks

    async def prune(self, capsule: str) -> list[str]:
        """End all that went on from a capsule; names of the requests that had not ended. Raises NotFound."""
        return await (await self._client.capsule(capsule, cache_salt=self._salt)).prune()

    async def close_session(self, name: str) -> ClosedSession:
        """Raises NotFound."""
        return await self._client.session(name, cache_salt=self._salt).close()

    async def _json(self, path: str, params: Mapping[str, str] = _NO_PARAMS) -> dict[str, Any]:
        raw = await self._get(path, params)
        body = read_answer(200, raw, self.url, {})
        return body if isinstance(body, dict) else {}

    async def _get(self, path: str, params: Mapping[str, str] = _NO_PARAMS) -> bytes:
        """The body. Raises the server's error."""
        import httpx

        try:
            answer = await self._within(self._http.get(path, params=params))
        except httpx.HTTPError as error:
            raise ConnectionFailed(self.url, str(error) or type(error).__name__) from error
        if answer.is_error:
            read_answer(answer.status_code, answer.content, self.url, answer.headers)
        return answer.content

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


async def _told_sessions(asked: Awaitable[list[SessionTree]]) -> Told[list[SessionTree]]:
    told = await _told(asked)
    is_page = told.answer is not None and len(told.answer) == MAX_SESSIONS
    return told._replace(missing=PAGE) if is_page else told


def _as_listed(listed: SessionData, tree: SessionTree | None) -> SessionTree:
    """The tree, with what the list says of the session."""
    if tree is None:
        return SessionTree(
            id=listed.id,
            parent=listed.parent,
            created=listed.created,
            last_used=listed.last_used,
            capsules=listed.capsules,
            running=listed.running,
            children=[],
            nodes=[],
        )
    return replace(tree, parent=listed.parent, running=listed.running)
