"""Parts of both clients that wait for nothing: options, waits, errors of connections, and branches."""

import copy
import inspect
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, get_args, overload

from mallee.client.calls import Call, checked_retries, checked_url, num_branches
from mallee.client.errors import NO_END, ConnectionFailed, StreamBroken, Timeout
from mallee.client.html import tree_html
from mallee.client.results import BranchEvent, BranchState, StreamReader, Usage, told_wait_s
from mallee.client.sessions import made_up
from mallee.client.sse import SseParser
from mallee.protocol.errors import ConfigError, InvalidParameter, MalleeError

if TYPE_CHECKING:  # httpx costs 100 ms to import: loaded by the first client, not by the import
    import httpx
    import openai

    OpenAIClient: TypeAlias = openai.OpenAI | openai.AsyncOpenAI

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 120.0
NO_HEADERS: Mapping[str, str] = {}
DELETE_TIMEOUT_S = 10.0  # of a capsule at the end of its block
DEFAULT_MAX_RETRIES = 2
MAX_RETRY_WAIT_S = 60.0  # a server that asks for more is not waited for
READY_WAIT_S = 0.05  # between two questions for a capsule that is computing, and more each time,
MAX_READY_WAIT_S = 1.0  # up to this
READY_S = 600.0  # for a capsule to be computed
CUT_WAIT_S = 0.25  # after a cut connection, until the request is sent again
B = TypeVar("B", bound=BranchState)
C = TypeVar("C", bound="httpx.Client | httpx.AsyncClient")
T = TypeVar("T")
_FULL = ("capsules_full", "tier_full", "storage_full")  # that a short wait doesn't change

_LOOPBACK = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/.*)?")


def connections(kind: type[C], base_url: str) -> C:
    """Connections to a service, to one on loopback past any proxy. Raises ConfigError for an unusable one."""
    import httpx

    try:
        if _LOOPBACK.fullmatch(base_url) is None:
            return kind()
        # Authorities of the environment (SSL_CERT_FILE) hold on loopback too.
        is_tls = base_url.startswith("https")
        return kind(trust_env=False, verify=httpx.create_ssl_context() if is_tls else True)
    # SOCKS without its package, an unknown scheme, or no URL
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the proxy that the environment names can't be used: {error} Or name the host in no_proxy"
        ) from error


def growing_waits(first_s: float, most_s: float) -> Iterator[float]:
    """Seconds without end, twice as many each time, up to `most_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, most_s)


def ready_waits(capsule: str, timeout_s: float) -> Iterator[float]:
    """Seconds before each question for a capsule that is computing. Raises Timeout after `timeout_s`."""
    yield 0.0
    end = time.monotonic() + timeout_s
    for wait_s in growing_waits(READY_WAIT_S, MAX_READY_WAIT_S):
        if time.monotonic() + wait_s > end:
            break
        yield wait_s
    raise Timeout(f"{capsule!r} is still computing", timeout_s, "wait longer; it goes on")


@contextmanager
def failing_as(kind: type[ConnectionFailed] | type[StreamBroken], url: str) -> Iterator[None]:
    """Raises `kind` instead of httpx's own errors."""
    import httpx

    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        limit_s = error.request.extensions["timeout"]["read"]
        remedy = "raise the client's or wait's timeout, or prefill with wait=False and wait later"
        raise Timeout(f"nothing came from {url}", limit_s, remedy) from error
    except httpx.RequestError as error:
        raise kind(url, str(error) or type(error).__name__) from error


def was_cut(error: ConnectionFailed | StreamBroken) -> bool:
    """Whether the connection ended without the whole answer: the server may have run the request."""
    import httpx

    cuts = httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError
    return error.fields["reason"] == NO_END or isinstance(error.__cause__, cuts)


def retry_after_s(headers: Mapping[str, str], status: int, raw: bytes) -> float | None:
    """Seconds after which a refused request is worth sending again; None: it isn't, or was not refused.

    429 and 503 with `Retry-After` say that nothing was changed; a prompt may have been computed, and is
    computed again. `x-should-retry: false` says that it is not worth it.
    """
    if status not in (429, 503) or headers.get("x-should-retry") == "false":
        return None
    told = told_wait_s(headers)
    if told is None or told > MAX_RETRY_WAIT_S:
        return None
    return None if any(code.encode() in raw for code in _FULL) else told


def openai_options(client: "OpenAIClient") -> dict[str, Any]:
    """The address, key, time limit and retries of OpenAI's client. Raises InvalidParameter for another."""
    options = {name: getattr(client, name, None) for name in ("api_key", "max_retries")}
    if None in options.values() or not hasattr(client, "base_url"):
        remedy = "give an openai.OpenAI or openai.AsyncOpenAI"
        raise InvalidParameter("client", type(client).__name__, remedy)
    limit_s = getattr(client.timeout, "read", client.timeout)  # of either library that it may have
    return {**options, "base_url": str(client.base_url), "timeout": limit_s}


class Connected(Generic[C]):
    """A client of one service: its options, and the connections that it makes or is given."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: "float | httpx.Timeout | None" = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        default_headers: Mapping[str, str] = NO_HEADERS,
        http_client: C | None = None,
        session: str | bool = False,
    ) -> None:
        kind = self._kind()
        if not isinstance(http_client, kind | None):
            remedy = f"give httpx's {kind.__name__}"
            raise InvalidParameter("http_client", type(http_client).__name__, remedy)
        self.base_url = checked_url(base_url)
        self.model = model
        self.session_name = made_up() if session is True else session or None
        self.timeout = timeout
        self.max_retries = checked_retries(max_retries)
        self._headers = {"Content-Type": "application/json", **default_headers}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._given = http_client
        self._http = http_client or connections(kind, self.base_url)
        self._is_owner = http_client is None

    @classmethod
    def from_openai(
        cls,
        client: "OpenAIClient",
        *,
        model: str | None = None,
        http_client: C | None = None,
    ) -> Self:
        """A client of the service that OpenAI's client speaks to, with its key, time limit and retries.

        Its connections are its own. Raises InvalidParameter for another kind of client.
        """
        return cls(**openai_options(client), model=model, http_client=http_client)

    def with_options(
        self,
        *,
        model: str | None = None,
        timeout: "float | httpx.Timeout | None" = None,
        max_retries: int | None = None,
    ) -> Self:
        """This client with other options, over the same connections, which this one closes."""
        other = copy.copy(self)
        other._is_owner = False
        other.model = self.model if model is None else model
        other.timeout = self.timeout if timeout is None else timeout
        if max_retries is not None:
            other.max_retries = checked_retries(max_retries)
        return other

    @staticmethod
    @abstractmethod
    def _kind() -> type[C]:
        """httpx's class, which is imported when a client is made."""

    def __repr__(self) -> str:
        model = "" if self.model is None else f", model={self.model!r}"
        return f"{type(self).__name__}({self.base_url!r}{model})"


def spelled(kind: type[T]) -> type[T]:
    """`kind`, whose methods show `help` and editors the keywords behind their `**params`."""
    for method in filter(inspect.isfunction, vars(kind).values()):
        signature = inspect.signature(method)
        *others, last = signature.parameters.values()
        if last.kind is last.VAR_KEYWORD and (fields := get_args(last.annotation)):
            named = (
                inspect.Parameter(name, last.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in fields[0].__annotations__.items()
                if name not in signature.parameters
            )
            method.__signature__ = signature.replace(parameters=[*others, *named])  # type: ignore[attr-defined]
    return kind


class Received(Generic[B]):
    """The branches of one request, as far as they have come. `branches`: by index."""

    def __init__(self, url: str, call: Call) -> None:
        self.branches: dict[int, B] = {}
        self.total_ms: float | None = None
        self._call = call
        self._url = url
        self._began = 0.0
        self._parser = SseParser()
        self._reader = StreamReader(url)
        self._num_read = 0  # bytes
        self._num_known = 0  # of the next bytes: read before the stream was cut
        self._error: MalleeError | None = None  # of the stream

    @abstractmethod
    def _branch(self, index: int) -> B:
        """A branch of which nothing has come."""

    @property
    def request_id(self) -> str | None:
        """The request's id on the server; None until the first event."""
        return self._reader.request_id

    @property
    def usage(self) -> Usage | None:
        """Tokens of the request, all branches together; None until the last has ended."""
        return self._reader.usage

    def _take(self, chunk: bytes) -> Iterator[BranchEvent]:
        """Events in `chunk`, each added to its branch. Raises the server's error, StreamBroken."""
        fresh = chunk[self._num_known :]
        self._num_known -= len(chunk) - len(fresh)
        self._num_read += len(fresh)
        for data in self._parser.feed(fresh):
            for event in self._reader.read(data):
                branch = self.branches.get(event.index)
                if branch is None:
                    branch = self.branches[event.index] = self._branch(event.index)
                    branch.request_id, branch.form = self._reader.request_id, self._call.form
                branch.take(event, self._elapsed_ms())
                yield event

    def _end(self) -> None:
        """End the stream. Raises StreamBroken if it broke off."""
        self._reader.end()
        self.total_ms = self._elapsed_ms()
        for branch in self.branches.values():
            branch.usage = self._reader.usage

    def _elapsed_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)

    def _repr_html_(self) -> str:
        """The tree of its branches, as notebooks show it."""
        return tree_html(f"{type(self).__name__} {self.request_id or ''}", self.branches)

    def __repr__(self) -> str:
        ended = sum(branch.finish_reason is not None for branch in self.branches.values())
        num = max(num_branches(self._call), len(self.branches))
        known = "".join(f", {self.branches[index]!r}" for index in sorted(self.branches))
        return f"{type(self).__name__}({self.request_id!r}, {ended} of {num} ended{known})"


class Listed(Received[B], Sequence[B]):
    """Branches of a client that blocks, as the list of them finished. Dropped before their end, they end."""

    _events: Any
    _response: Any

    @abstractmethod
    def wait(self) -> list[B]: ...

    def __iter__(self) -> Iterator[B]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    @overload
    def __getitem__(self, index: int) -> B: ...

    @overload
    def __getitem__(self, index: slice) -> list[B]: ...

    def __getitem__(self, index: int | slice) -> B | list[B]:
        return self.wait()[index]

    def __del__(self) -> None:
        response = getattr(self, "_response", None)
        if response is not None and self._events is None and not sys.is_finalizing():
            # In a thread: a collection of garbage may begin where this one holds the connections' lock.
            threading.Thread(target=response.close, name="dropped", daemon=True).start()


class AsyncListed(Received[B], ABC):
    """Branches of an asynchronous client, awaited as the list of them finished, or iterated as that."""

    @abstractmethod
    async def wait(self) -> list[B]: ...

    def __await__(self) -> Generator[Any, Any, list[B]]:
        return self.wait().__await__()

    async def __aiter__(self) -> AsyncIterator[B]:
        for branch in await self.wait():
            yield branch
