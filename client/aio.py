"""The asynchronous client: `sync`, with await. What both share is in `results`, `sse` and `errors`."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.results import (
    Branch,
    BranchEvent,
    CapsuleData,
    StreamReader,
    convert_capsule,
    fork_body,
    json_of,
    need_capsule,
    prompt_body,
    raise_for,
)
from mallee.client.sse import SseParser
from mallee.client.sync import DEFAULT_TIMEOUT_S, DEFAULT_URL

if TYPE_CHECKING:  # see sync
    import httpx


class AsyncMallee:
    """A client of one service, for one event loop. An async context manager; see `Mallee`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=timeout_s, transport=transport
        )

    async def __aenter__(self) -> "AsyncMallee":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
        await self._http.aclose()

    async def health(self) -> dict[str, Any]:
        """The service's own account of itself, also when it is unavailable."""
        body: dict[str, Any] = await self._send("GET", "/health", accept_errors=True)
        return body

    async def models(self) -> list[str]:
        """Names of the models served."""
        return [entry["id"] for entry in (await self._send("GET", "/v1/models"))["data"]]

    async def complete(self, prompt: Any = None, **params: Any) -> list[Branch]:
        """The finished answers to one prompt (or `messages=`): one branch, or `n`."""
        return await (await self.stream(prompt, **params)).wait()

    async def stream(
        self,
        prompt: Any = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> "AsyncBranches":
        """Start answering `prompt` (text or token ids) or `messages`; n > 1 branches stream together."""
        body = prompt_body(prompt, messages, {**params, "stream": True})
        path = "/v1/completions" if messages is None else "/v1/chat/completions"
        return await self._open(path, body)

    async def prefill(
        self,
        prompt: Any = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
    ) -> "AsyncCapsule":
        """Compute a prompt once and keep its state as a capsule, until deleted or `ttl_s` idle."""
        body = prompt_body(prompt, messages, {"ttl_s": ttl_s, "cache_salt": cache_salt})
        return AsyncCapsule(self, convert_capsule(await self._send("POST", "/v1/capsules", body)))

    async def capsule(self, capsule: str) -> "AsyncCapsule":
        """A capsule by id. Raises UnknownCapsule."""
        answer = await self._send("GET", f"/v1/capsules/{capsule}")
        return AsyncCapsule(self, convert_capsule(answer))

    async def _send(
        self, method: str, path: str, body: object = None, *, accept_errors: bool = False
    ) -> Any:
        import httpx

        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ConnectionFailed(self.base_url, str(error) or type(error).__name__) from error
        answer = json_of(response.content, response.status_code)
        if not accept_errors:
            raise_for(answer, response.status_code)
        return answer

    async def _open(self, path: str, body: dict[str, Any]) -> "AsyncBranches":
        import httpx

        url = self.base_url + path
        began = time.perf_counter()
        request = self._http.build_request("POST", path, json=body)
        try:
            response = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionFailed(url, str(error) or type(error).__name__) from error
        if response.status_code >= 400:
            try:
                raw = await response.aread()
            finally:
                await response.aclose()
            raise_for(json_of(raw, response.status_code), response.status_code)
        return AsyncBranches(self, url, response, began)


class AsyncCapsule:
    """A prompt's state on its worker. As an async context manager it is deleted at the end."""

    def __init__(self, client: AsyncMallee, data: CapsuleData) -> None:
        self._client = client
        self.id = data.id
        self.worker = data.worker
        self.tokens = data.tokens
        self.prefill_tokens = data.prefill_tokens
        self.cached_tokens = data.cached_tokens

    async def fork(self, branches: Sequence[Any] | int, **params: Any) -> "AsyncBranches":
        """Continue once per suffix (text, token ids, or {"messages": [...]}), or n times."""
        path = f"/v1/capsules/{self.id}/fork"
        return await self._client._open(path, fork_body(branches, params))

    async def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        await self._client._send("DELETE", f"/v1/capsules/{self.id}")

    async def __aenter__(self) -> "AsyncCapsule":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await self.delete()

    def __repr__(self) -> str:
        return f"AsyncCapsule({self.id!r}, worker={self.worker!r}, tokens={self.tokens})"


class AsyncBranches:
    """Branches of one request while they stream. Iterate for events as they arrive, or `wait`."""

    def __init__(
        self, client: AsyncMallee, url: str, response: "httpx.Response", began: float
    ) -> None:
        self.branches: dict[int, Branch] = {}
        self.total_ms: float | None = None
        self._client = client
        self._url = url
        self._response = response
        self._began = began
        self._events = self._read()

    def __aiter__(self) -> AsyncIterator[BranchEvent]:
        return self._events

    async def wait(self) -> list[Branch]:
        """All branches, finished, by index. Raises what the stream raises."""
        async for _ in self._events:
            pass
        return [self.branches[i] for i in sorted(self.branches)]

    async def fork(
        self, index: int, branches: Sequence[Any] | int, **params: Any
    ) -> "AsyncBranches":
        """Fork where branch `index` ended. Raises ValueError if it left no capsule."""
        capsule = need_capsule(self.branches.get(index), index)
        return await self._client._open(f"/v1/capsules/{capsule}/fork", fork_body(branches, params))

    async def close(self) -> None:
        """End what still runs."""
        await self._events.aclose()
        await self._response.aclose()

    async def __aenter__(self) -> "AsyncBranches":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _read(self) -> AsyncGenerator[BranchEvent, None]:
        import httpx

        parser, reader = SseParser(), StreamReader(self._url)
        try:
            async for chunk in self._response.aiter_raw():
                for data in parser.feed(chunk):
                    for event in reader.read(data):
                        branch = self.branches.setdefault(event.index, Branch(event.index))
                        branch.take(event, self._elapsed_ms())
                        yield event
                if reader.is_done:
                    break
            reader.end()
            self.total_ms = self._elapsed_ms()
        except httpx.TransportError as error:
            raise StreamBroken(self._url, str(error) or type(error).__name__) from error
        finally:
            await self._response.aclose()

    def _elapsed_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)
