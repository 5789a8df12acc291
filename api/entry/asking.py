"""Requests as handlers read them: the body as a struct, its scope and terms; long work off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from starlette.requests import Request

from mallee.api.entry.bodies import LEAST_BYTES, Bodies
from mallee.api.entry.decoding import LEAST_VALUES, decode, meant, read
from mallee.api.entry.middleware import HEADERS, caller_of, header, read_body, warn_of
from mallee.api.sse import unless_gone
from mallee.api.terms import read_terms
from mallee.gateway.access.scopes import Scopes
from mallee.protocol.api.shared import MAX_SALT, AnyBody, AnyRequest
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.ids import Scope
from mallee.router.dispatch.jobs import QueueTerms
from mallee.runtime.config import HttpSettings

SALT_HEADER: Final = "x-cache-salt"  # where the body has no cache_salt
_SALT: Final = SALT_HEADER.encode()
INLINE_BODY_BYTES: Final = 32 << 10  # larger bodies are read off the event loop

R = TypeVar("R", bound=AnyRequest)
J = TypeVar("J")
B = TypeVar("B", bound=AnyBody)


class Asked(NamedTuple, Generic[R]):
    """A request that was read."""

    body: R
    scope: Scope
    terms: QueueTerms
    is_large: bool


IGNORED: Final = "fields that this server does not know were ignored"


class Asking:
    """Reads the requests of all routes. `pool` reads large ones, by default the loop's own."""

    def __init__(
        self, scopes: Scopes, limits: HttpSettings, *, max_model_len: int, pool: Executor | None
    ) -> None:
        self._scopes = scopes
        self._max_body_bytes = limits.max_body_bytes
        self._strict = limits.strict
        # The ids of a prompt as long as the window, and the rest of a body.
        self._max_values = max(LEAST_VALUES, max_model_len + LEAST_VALUES // 2)
        self._pool = pool
        self._bodies = Bodies()

    async def read(self, request: Request, kind: type[R]) -> Asked[R]:
        """The request, whose body is a `kind`. Raises BadRequest and as `read_body`."""
        raw = await read_body(request, self._max_body_bytes)
        if len(raw) <= INLINE_BODY_BYTES:
            return self._read(request, kind, raw)
        return await self.off_loop(request, partial(self._read, request, kind, raw))

    def _read(self, request: Request, kind: type[R], raw: bytes) -> Asked[R]:
        caller, salt = caller_of(request), _salt(request)
        if kind.history and len(raw) > LEAST_BYTES:
            given = self._bodies.decode(raw, kind, f"{caller.tenant}\0{salt}", self._max_values)
        else:
            given = decode(raw, self._max_values)
        body = self._known(request, given, kind)
        if not kind.is_bounded:
            _check_unbounded(body)
        scope = self._scopes.scope(caller.tenant, body.cache_salt or salt)
        terms = read_terms(body, caller, request)
        return Asked(body, scope, terms, len(raw) > INLINE_BODY_BYTES)

    async def read_plain(self, request: Request, kind: type[B]) -> B:
        """The body without an owner or terms. Raises BadRequest and as `read_body`."""
        raw = await read_body(request, self._max_body_bytes)
        return self._known(request, decode(raw, self._max_values), kind)

    def _known(self, request: Request, body: dict[str, Any], kind: type[B]) -> B:
        """The body; its answer names the fields that are ignored. Raises BadRequest."""
        is_strict = self._strict == "all" or (self._strict == "ours" and not kind.is_others)
        found = read(body, kind, is_strict=is_strict)
        if found.ignored:
            warn_of(request, IGNORED, found.ignored, lambda name: meant(name, kind))
        return found.body

    async def make(
        self, request: Request, asked: Asked[R], make: Callable[[R, Scope, QueueTerms], J]
    ) -> J:
        """The result of `make`, given a request that was read."""
        body, scope, terms, is_large = asked
        if not is_large:
            return make(body, scope, terms)
        return await self.off_loop(request, partial(make, body, scope, terms))

    async def off_loop(self, request: Request, work: Callable[[], J]) -> J:
        """The result of `work`: seconds of tokenizing must not hold up the tokens of other requests."""
        return await unless_gone(request.receive, self.in_pool(work))

    async def in_pool(self, work: Callable[[], J]) -> J:
        """The result of `work`, made off the event loop whether its client is there or not."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def scope(self, request: Request) -> Scope:
        """The scope of a request without a body."""
        return self._scopes.scope(caller_of(request).tenant, _salt(request))


def _check_unbounded(body: AnyRequest) -> None:
    for name in ("budget", "stop_when"):
        if (given := getattr(body.mallee, name)) is not None:
            remedy = "completions, chat, messages, forks and restores have it; leave it out"
            raise InvalidParameter(f"mallee.{name}", given, remedy)


def _salt(request: Request) -> str:
    """The salt that its header has. Raises InvalidParameter if it is too long."""
    if _SALT not in request.scope[HEADERS]:
        return ""
    salt = header(request.scope, SALT_HEADER) or ""
    if len(salt) > MAX_SALT:
        raise InvalidParameter(SALT_HEADER, salt, f"give at most {MAX_SALT} characters")
    return salt


def read_count(text: str | None, name: str, default: int, most: int) -> int:
    """A query parameter from 1 to `most`. Raises InvalidParameter."""
    if text is None:
        return default
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not is_short or not 1 <= int(text) <= most:
        raise InvalidParameter(name, text, f"give a whole number from 1 to {most}")
    return int(text)
