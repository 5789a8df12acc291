"""Checks before every route: its turn, the caller and its limits, the body's size; the net under bugs."""

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mallee.api.errors import (
    BodyTooLarge,
    ClientGone,
    SlowBody,
    UnsupportedEncoding,
    answer_to,
    error_response,
)
from mallee.api.errors import unexpected as unexpected_error
from mallee.gateway.access.access import NOBODY, TENANT_HEADER, Access, Caller
from mallee.gateway.access.visits import UNLIMITED
from mallee.protocol.errors import InvalidParameter, MalleeError, Unauthorized, shown

_log = logging.getLogger(__name__)

BODY_S: Final = 20.0
"""Time of a body, to which each MIN_BODY_RATE bytes that have come add a second."""
MIN_BODY_RATE: Final = 16 << 10
LINGER_S: Final = 5.0
PER_TURN: Final = 16  # requests that begin in one turn of the loop: some 5 ms

CountAnswer: TypeAlias = Callable[[str, int], None]
"""Called with the path's template (not the path) and the HTTP status when an answer begins."""

# Told to everybody: the state of the gateway, though not whole, and the API's description and the page's
# files, alike everywhere.
_OPEN = frozenset(("/health", "/health/live", "/health/ready", "/openapi.json", "/docs", "/ui"))
_OPEN_FILES = "/ui/"
KEY_HEADER: Final = b"idempotency-key"
SEARCH: Final = "/v1/search"  # the requests that it makes count, each by itself
_CALLER = "mallee.caller"  # in the scope of a request
_BEGUN = "mallee.begun"  # in loop seconds
_WARNINGS = "mallee.warnings"
HEADERS: Final = "mallee.headers"
"""The last value of each header by its name, in the scope of a request."""
_TENANT: Final = TENANT_HEADER.encode()
_ASKED_AS: Final = b"x-request-id"  # of a client, or the proxy before the gateways
_NAME: Final = re.compile(rb"[\w.:-]{1,128}")
MAX_WARNED: Final = 16  # fields that an answer names


def caller_of(request: Request) -> Caller:
    """The sender of `request`, as the middleware found it."""
    caller: Caller = request.scope[_CALLER]
    return caller


def age_s(request: Request) -> float:
    """Seconds since the head of `request` came."""
    begun: float = request.scope[_BEGUN]
    return asyncio.get_running_loop().time() - begun


def warn_of(
    request: Request, what: str, names: Sequence[str], meant: Callable[[str], str] | None = None
) -> None:
    """Have the answer to `request` say `what` of the fields of these names, and what is `meant` by each."""
    hints = ((name, "" if meant is None else meant(name)) for name in names[:MAX_WARNED])
    shown_names = ", ".join(shown(name) + (f" ({hint})" if hint else "") for name, hint in hints)
    more = f", and {len(names) - MAX_WARNED} more" if len(names) > MAX_WARNED else ""
    text = f"{what}: {shown_names}{more}".encode("ascii", "backslashreplace")
    before = request.scope.get(_WARNINGS)
    request.scope[_WARNINGS] = text if before is None else before + b"; " + text


class Turns:
    """Lets a few callers go on in each turn of the event loop, in order.

    A thousand requests that come at once would else be read in one turn, for which all streams wait.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._num_left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def wait(self) -> None:
        """Return in a turn that has room."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin, loop)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_left = self._per_turn
        while self._num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its caller has gone
                turn.set_result(None)
                self._num_left -= 1
        self._is_due = bool(self._waiting) or self._num_left < self._per_turn
        if self._is_due:
            loop.call_soon(self._begin, loop)


class AuthMiddleware:
    """ASGI middleware. Finds each request's caller, counts answers, writes refusals, catches bugs.

    A bug is logged with a fresh id and answered by a 500 that names the id and nothing else. At debug each
    request has a line at its end. `replays` takes requests with an idempotency key.
    """

    def __init__(
        self,
        app: ASGIApp,
        replays: ASGIApp,
        *,
        access: Access,
        new_id: Callable[[], str],
        count_answer: CountAnswer,
    ) -> None:
        self._app = app
        self._replays = replays
        self._access = access
        self._turns = Turns()
        self._new_id = new_id
        self._count_answer = count_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's start and end, and sockets, which no route takes
            await self._app(scope, receive, send)
            return
        status = 0  # until an answer begins
        scope[_BEGUN] = asyncio.get_running_loop().time()
        headers = scope[HEADERS] = dict(scope["headers"])

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count_answer(_route_of(scope), status)
                if (warnings := scope.get(_WARNINGS)) is not None:
                    message["headers"] = [*message["headers"], (b"warnings", warnings)]
            await send(message)

        try:
            try:
                caller = scope[_CALLER] = self._find_caller(scope)
                is_post = scope["method"] == "POST"
                if is_post:
                    await self._turns.wait()
                app = self._replays if is_post and KEY_HEADER in headers else self._app
                if caller.visit is UNLIMITED or not is_post or scope["path"] == SEARCH:
                    await app(scope, receive, counted_send)
                else:
                    await caller.visit.ready()
                    with caller.visit:
                        await app(scope, receive, counted_send)
            except (MalleeError, HTTPException, ClientGone) as error:
                if status:
                    raise
                await answer_to(error, scope)(scope, receive, counted_send)
        except Exception:
            request_id = self._new_id()
            _log.exception("request %s failed", request_id)
            if status:
                raise  # the server cuts the connection
            await error_response(unexpected_error(request_id))(scope, receive, counted_send)
        finally:
            if _log.isEnabledFor(logging.DEBUG):
                _log_answer(scope, status)

    def _find_caller(self, scope: Scope) -> Caller:
        """Raises Unauthorized, Forbidden."""
        try:
            headers = scope[HEADERS]
            has_token = b"authorization" in headers or b"x-api-key" in headers
            tenant = header(scope, TENANT_HEADER) if _TENANT in headers else None
            return self._access.caller(_bearer(scope) if has_token else None, tenant)
        except Unauthorized:
            if scope["path"] in _OPEN or scope["path"].startswith(_OPEN_FILES):
                return NOBODY
            raise


def _route_of(scope: Scope) -> str:
    """The template of the path, which has no name of a client's."""
    return getattr(scope.get("route"), "path", "other")


def _log_answer(scope: Scope, status: int) -> None:
    """Log a request that is over, with the id that its client or a proxy gave it."""
    name, seconds = scope[HEADERS].get(_ASKED_AS, b""), age_s(Request(scope))
    asked_as = f", x-request-id {name.decode()}" if _NAME.fullmatch(name) else ""
    line = "%s %s %s in %.3f s%s"
    _log.debug(line, scope["method"], _route_of(scope), status or "unanswered", seconds, asked_as)


def given(scope: Scope, name: bytes) -> list[str]:
    """The values of a header, whose name is in lower case."""
    found = []
    for each, value in scope["headers"]:
        if each == name:
            found.append(value.decode("latin-1"))
    return found


def header(scope: Scope, name: str) -> str | None:
    """A header that names an owner. Raises InvalidParameter if it comes twice: one may be a stranger's."""
    values = given(scope, name.encode())
    if len(values) > 1:
        raise InvalidParameter(name, values, "give it once")
    return values[0] if values else None


def _bearer(scope: Scope) -> str | None:
    """The key that was sent, if exactly one was: OpenAI's header before Anthropic's."""
    bearers = given(scope, b"authorization")
    if not bearers and len(keys := given(scope, b"x-api-key")) == 1:
        return keys[0].strip()
    kind, _, token = bearers[0].partition(" ") if len(bearers) == 1 else ("", "", "")
    return token.strip() if kind.lower() == "bearer" else None


async def body_pieces(
    request: Request, limit: int, too_large: type[BodyTooLarge]
) -> AsyncGenerator[bytes, None]:
    """The body as it comes; `too_large` is raised for one of more than `limit` bytes.

    Its time stands still while nothing is asked for. Raises as `read_body`.
    """
    try:
        _check_head(request, limit, too_large)
    except BodyTooLarge:
        await _drop_rest(request)
        raise
    loop = asyncio.get_running_loop()
    left_s, nbytes, has_more = BODY_S, 0, True
    while has_more:
        begin = loop.time()
        try:
            async with asyncio.timeout(left_s):
                message = await request.receive()
        except TimeoutError:
            raise SlowBody(nbytes, BODY_S, MIN_BODY_RATE) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        nbytes += len(chunk)
        has_more = message.get("more_body", False)
        if nbytes > limit:
            if has_more:
                await _drop_rest(request)
            raise too_large(limit)
        left_s = min(BODY_S, left_s - (loop.time() - begin) + len(chunk) / MIN_BODY_RATE)
        yield chunk


async def _drop_rest(request: Request) -> None:
    """Let a client that is refused send on for a moment: one that is cut off may never read why."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (message := await request.receive())["type"] != "http.disconnect":
                if not message.get("more_body", False):
                    return


def _check_head(request: Request, limit: int, too_large: type[BodyTooLarge]) -> None:
    """Raises UnsupportedEncoding, and `too_large` if the body is said to be."""
    headers = request.scope[HEADERS]
    declared = headers.get(b"content-length", b"")
    # A sane server passes digits only; for anything else the bytes that arrive are counted.
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large(limit)
    encoding = headers.get(b"content-encoding", b"")
    if encoding not in (b"identity", b""):
        raise UnsupportedEncoding(encoding.decode("latin-1"))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises BodyTooLarge before holding more than `limit` bytes, SlowBody, UnsupportedEncoding, ClientGone.
    """
    _check_head(request, limit, BodyTooLarge)
    begin = asyncio.get_running_loop().time()
    chunks: list[bytes] = []
    nbytes = 0
    try:
        async with asyncio.timeout_at(begin + BODY_S) as due:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                nbytes += len(chunk)
                if nbytes > limit:
                    raise BodyTooLarge(limit)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
                due.reschedule(begin + BODY_S + nbytes / MIN_BODY_RATE)
    except TimeoutError:
        seconds = asyncio.get_running_loop().time() - begin
        raise SlowBody(nbytes, seconds, MIN_BODY_RATE) from None
