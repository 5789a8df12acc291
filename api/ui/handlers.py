"""The handlers of `/ui` and `/v1/watch`."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking, read_count
from mallee.api.entry.middleware import caller_of
from mallee.api.openapi.operations import MAX_WATCH_S
from mallee.api.serve import Server
from mallee.api.sse import DONE, EventStream, event
from mallee.api.ui.elsewhere import Elsewhere, Others
from mallee.api.ui.watching import SessionWatch
from mallee.protocol.errors import NotFound, Unavailable

LOOK_S: Final = 0.25
MAX_SHARE: Final = 0.05  # of the event loop's time, for all watchers together
MAX_WATCHERS: Final = 128
MAX_OF_TENANT: Final = 32
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS: Final = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class UiHandlers:
    """Sends the page, and the changes that it draws."""

    def __init__(self, server: Server, asking: Asking) -> None:
        self._server = server
        self._asking = asking
        self._elsewhere = Elsewhere(server)
        self._watchers: Counter[str] = Counter()  # by tenant

    async def page(self, _: Request) -> Response:
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        """Raises NotFound."""
        return _file(request.path_params["file"])

    async def watch(self, request: Request) -> Response:
        """The caller's sessions as events, all at first and then what changes, for some seconds.

        A watcher asks again then, so that a gateway that ends waits for none. Raises Unavailable.
        """
        seconds = read_count(
            request.query_params.get("seconds"), "seconds", MAX_WATCH_S, MAX_WATCH_S
        )
        tenant = caller_of(request).tenant
        for num, most in (
            (self._watchers[tenant], MAX_OF_TENANT),
            (self._watchers.total(), MAX_WATCHERS),
        ):
            if num >= most:
                raise Unavailable(f"{num} clients watch this gateway already; try again later")
        scope = self._asking.scope(request)
        watch = SessionWatch(self._server.gateway, self._server.tokenizer, scope, tenant)
        self._watchers[tenant] += 1

        async def leave() -> None:
            self._watchers[tenant] -= 1
            if not self._watchers[tenant]:
                del self._watchers[tenant]

        others = Others(self._server, self._elsewhere, scope, tenant)
        return EventStream(self._events(watch, others, seconds), leave, {})

    async def _events(
        self, watch: SessionWatch, others: Others, seconds: int
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        end, took = loop.time() + seconds, 0.0
        with suppress(Unavailable):  # what is known here is shown
            await others.begin()
        first = watch.changes(await others.look())
        yield event(first or {"object": "watch.sessions", "sessions": [], "gone": []})
        while loop.time() < end:
            await asyncio.sleep(max(LOOK_S, took * self._watchers.total() / MAX_SHARE))
            running = await others.look()
            begun = loop.time()
            body = watch.changes(running)
            took = loop.time() - begun
            if body is not None:
                yield event(body)
        yield DONE


@cache
def _files() -> dict[str, bytes]:
    folder = files("mallee.api.ui") / "page"
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


def _file(name: str) -> Response:
    raw = _files().get(name)
    kind = _TYPES.get(name.rpartition(".")[2])
    if raw is None or kind is None:
        raise NotFound("no such file of the page", param="file")
    return Response(raw, media_type=kind, headers=_HEADERS)
