"""OpenAI's own client as a transport: its connections, proxies and certificates are used for ours.

Its newer versions bring an HTTP library of their own (httpx2), so nothing of it is handed on but bytes, and
errors by their names, which are the same. The package itself is never imported here.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from mallee.client.base import DEFAULT_TIMEOUT_S
from mallee.protocol.errors import InvalidParameter


def settings(client: Any, *, is_async: bool) -> dict[str, Any]:
    """The address, key, time limit and retries of OpenAI's client. Raises InvalidParameter."""
    http = getattr(client, "_client", None)
    if http is None or hasattr(http, "aclose") != is_async:
        kind = "openai.AsyncOpenAI" if is_async else "openai.OpenAI"
        raise InvalidParameter("client", type(client).__name__, f"give an {kind}")
    limit = getattr(client.timeout, "read", client.timeout)
    return {
        "base_url": str(client.base_url),
        "api_key": client.api_key,
        "timeout_s": limit if isinstance(limit, int | float) else DEFAULT_TIMEOUT_S,
        "max_retries": client.max_retries,
    }


class SyncTransport(httpx.BaseTransport):
    """Sends by the HTTP client of an `openai.OpenAI`, and leaves it open."""

    def __init__(self, http: Any) -> None:
        self._http = http

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _httpx_errors(request):
            found = self._http.send(self._http.build_request(**_parts(request)), stream=True)
        return httpx.Response(
            found.status_code, headers=found.headers.raw, stream=_Body(found, request)
        )


class AsyncTransport(httpx.AsyncBaseTransport):
    """Sends by the HTTP client of an `openai.AsyncOpenAI`, and leaves it open."""

    def __init__(self, http: Any) -> None:
        self._http = http

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _httpx_errors(request):
            found = await self._http.send(self._http.build_request(**_parts(request)), stream=True)
        return httpx.Response(
            found.status_code, headers=found.headers.raw, stream=_AsyncBody(found, request)
        )


class _Body(httpx.SyncByteStream):
    """The bytes of another library's response."""

    def __init__(self, found: Any, request: httpx.Request) -> None:
        self._found = found
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        with _httpx_errors(self._request):
            yield from self._found.iter_raw()

    def close(self) -> None:
        self._found.close()


class _AsyncBody(httpx.AsyncByteStream):
    """As `_Body`."""

    def __init__(self, found: Any, request: httpx.Request) -> None:
        self._found = found
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _httpx_errors(self._request):
            async for data in self._found.aiter_raw():
                yield data

    async def aclose(self) -> None:
        await self._found.aclose()


def _parts(request: httpx.Request) -> dict[str, Any]:
    is_whole = isinstance(request.stream, httpx.ByteStream)
    return {
        "method": request.method,
        "url": str(request.url),
        "headers": request.headers.raw,
        "content": request.content if is_whole else request.stream,
        "extensions": {"timeout": request.extensions["timeout"]},
    }


@contextmanager
def _httpx_errors(request: httpx.Request) -> Iterator[None]:
    """Raises the error of httpx that has the same name as another library's."""
    try:
        yield
    except Exception as error:
        kind = getattr(httpx, type(error).__name__, None)
        if not (isinstance(kind, type) and issubclass(kind, httpx.RequestError)):
            raise
        raise kind(str(error), request=request) from error
