"""Calls URLs that requests name, of those that the operator allows.

A request's URL would else reach whatever the gateway reaches. It must be plain (no user, no percent signs in
its path), have scheme, host and port of one of `http.callbacks`, and its path or one below it. A call carries
the question alone: no key, cookie or header of the client, of the environment, or of an earlier answer.
Redirects are not followed, and an answer is read up to a bound, within a time.
"""

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import httpx
import msgspec

from mallee.protocol.errors import CallbackFailed, InvalidParameter
from mallee.protocol.ids import Scope
from mallee.runtime.config import CALLBACK_URL
from mallee.runtime.tasks import Tasks

SETTING: Final = "http.callbacks"
MAX_CALLS: Final = 64  # at once; more wait
MAX_SCOPE_CALLS: Final = 16  # of them, those of one scope
MAX_URL: Final = 2048  # characters
MAX_ANSWER_NBYTES: Final = 64 << 10
IDLE_S: Final = 2.0  # of a connection: a server that gives up its end first would cut a call
_PORTS: Final = {"http": 80, "https": 443}
_REQUESTED: Final = re.compile(rf"({CALLBACK_URL})(\?[!$-~]*)?")
_PARTS: Final = re.compile(r"(https?)://(\[[^]]*\]|[^:/]*)(?::(\d+))?(.*)")

Outcome: TypeAlias = Literal["answered", "abandoned", "slow", "unreachable", "refused", "malformed"]

_ABANDONED: Outcome = "abandoned"

A = TypeVar("A", bound=msgspec.Struct)


class CountCallback(Protocol):
    """Counts a call that is over."""

    def __call__(self, outcome: Outcome, seconds: float) -> None: ...


def ignore(outcome: Outcome, seconds: float) -> None:
    """Counts nothing."""


class Place(NamedTuple):
    """A part of the web: all paths at and below `path`, which has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Place":
        """That of a plain URL without a query."""
        found = _PARTS.fullmatch(url)
        assert found is not None, f"{url!r} is no plain URL"
        scheme, host, port, path = found.groups()
        return cls(scheme, host.lower(), int(port or _PORTS[scheme]), path.rstrip("/"))

    def has(self, other: "Place") -> bool:
        return other[:3] == self[:3] and f"{other.path}/".startswith(f"{self.path}/")


class AllowedUrls:
    """The URLs that requests may have called; `urls` as in `http.callbacks`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._places = [Place.of(url) for url in urls]

    def check(self, param: str, url: str) -> None:
        """Raises InvalidParameter, naming `param`, for another one."""
        if not self._places:
            remedy = f"this server calls no URLs: its operator allows some by the setting {SETTING}"
            raise InvalidParameter(param, url, remedy)
        found = _REQUESTED.fullmatch(url)
        if found is None or len(url) > MAX_URL or not _is_sound(url):
            remedy = (
                f"give http(s)://HOST[:PORT][/PATH][?QUERY] of at most {MAX_URL} characters,"
                " without a user, a fragment, or percent signs and dots as segments in its path"
            )
            raise InvalidParameter(param, url, remedy)
        place = Place.of(found[1])
        if not any(each.has(place) for each in self._places):
            remedy = f"it is at or below none of the URLs in this server's setting {SETTING}"
            raise InvalidParameter(param, url, remedy)


class Callbacks:
    """The calls of one gateway. Belongs to one event loop, in which `tasks` close its connections."""

    def __init__(self, *, timeout_s: float, tasks: Tasks, count: CountCallback = ignore) -> None:
        """`timeout_s`: of one call, without the wait for its turn."""
        self._timeout_s = timeout_s
        self.tasks = tasks
        self._count = count
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._rooms: WeakValueDictionary[Scope, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, scope: Scope) -> AsyncGenerator["Turn", None]:
        """A turn to call, once there is room for one of `scope`."""
        # The variable keeps the scope's room in the dictionary, as long as somebody waits or calls.
        room = self._rooms.setdefault(scope, asyncio.Semaphore(MAX_SCOPE_CALLS))
        async with room, self._room:
            yield Turn(await self._opened(), self._timeout_s, self._count)

    async def _opened(self) -> httpx.AsyncHTTPTransport:
        if self._transport is None:
            tls = await asyncio.to_thread(_certificates)
            if self._transport is None:  # by another call meanwhile
                self._transport = _transport(tls)
                self.tasks.spawn(_hold(self._transport), name="the connections of callbacks")
        return self._transport


class Turn:
    """One call's place among those that run."""

    __slots__ = ("_count", "_timeout_s", "_transport")

    def __init__(
        self, transport: httpx.AsyncHTTPTransport, timeout_s: float, count: CountCallback
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._count = count

    async def ask(
        self, url: str, question: msgspec.Struct, kind: type[A], flaw: Callable[[A], str]
    ) -> A:
        """The answer to `question`, posted as JSON to a `url` that was checked.

        `flaw(answer)` says what is wrong with it, if something is. Raises CallbackFailed.
        """
        clock = asyncio.get_running_loop().time
        begun, outcome = clock(), _ABANDONED
        request = httpx.Request(
            "POST",
            url,
            content=msgspec.json.encode(question),
            headers={"content-type": "application/json", "accept-encoding": "identity"},
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                raw = await self._raw(request)
            answer = msgspec.json.decode(raw, type=kind)
            if why := flaw(answer):
                raise _Failed("malformed", why)
            outcome = "answered"
            return answer
        except _Failed as error:
            outcome = error.outcome
            raise CallbackFailed(_shown(url), str(error)) from None
        except TimeoutError:
            outcome = "slow"
            why = f"it did not answer within {self._timeout_s:g} s"
            raise CallbackFailed(_shown(url), why) from None
        except httpx.TransportError as error:
            outcome = "unreachable"
            why = f"it can't be reached: {type(error).__name__}"
            raise CallbackFailed(_shown(url), why) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            outcome = "malformed"
            raise CallbackFailed(_shown(url), f"its answer can't be read: {error}") from error
        finally:
            self._count(outcome, clock() - begun)

    async def _raw(self, request: httpx.Request) -> bytes:
        """The body of an answer with status 200. Raises _Failed, httpx.TransportError."""
        response = await self._transport.handle_async_request(request)
        try:
            if response.status_code != 200:
                raise _Failed("refused", f"it answered with status {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise _Failed("malformed", "its answer is compressed")
            raw = bytearray()
            async for part in response.aiter_raw():
                raw += part
                if len(raw) > MAX_ANSWER_NBYTES:
                    raise _Failed("malformed", f"its answer is over {MAX_ANSWER_NBYTES} bytes")
            return bytes(raw)
        finally:
            await response.aclose()


class _Failed(Exception):
    """A call that was answered in vain."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@cache
def _certificates() -> ssl.SSLContext:
    """The system's authorities. To read them takes some milliseconds."""
    return ssl.create_default_context()


def _transport(tls: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    """Connections alone: a client of httpx would keep cookies, and log whole URLs."""
    limits = httpx.Limits(
        max_connections=MAX_CALLS, max_keepalive_connections=MAX_CALLS, keepalive_expiry=IDLE_S
    )
    return httpx.AsyncHTTPTransport(verify=tls, limits=limits, trust_env=False)


async def _hold(transport: httpx.AsyncHTTPTransport) -> None:
    """Close the connections when this task is ended."""
    try:
        await asyncio.Event().wait()
    finally:
        await transport.aclose()


def _is_sound(url: str) -> bool:
    """Whether a URL of the right characters can be called as it is written."""
    try:
        httpx.URL(url)
    except httpx.InvalidURL:  # an address that can't be
        return False
    return not {".", ".."}.intersection(_shown(url).split("/"))


def _shown(url: str) -> str:
    """Without the query, in which clients may hide secrets."""
    return url.partition("?")[0]
