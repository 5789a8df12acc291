"""The synchronous client. Its twin is `aio`; what both share is in `results`, `sse` and `errors`."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
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

if TYPE_CHECKING:  # httpx costs 100 ms to import: loaded by the first client, not by the import
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 120.0


class Mallee:
    """A client of one service. A context manager; not for use from several threads at once.

    `timeout_s` bounds every wait for bytes: a server that says nothing for so long ends the call with
    ConnectionFailed or StreamBroken.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.base_url, headers=headers, timeout=timeout_s, transport=transport
        )

    def __enter__(self) -> "Mallee":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
        self._http.close()

    def health(self) -> dict[str, Any]:
        """The service's own account of itself, also when it is unavailable."""
        body: dict[str, Any] = self._send("GET", "/health", accept_errors=True)
        return body

    def models(self) -> list[str]:
        """Names of the models served."""
        return [entry["id"] for entry in self._send("GET", "/v1/models")["data"]]

    def complete(self, prompt: Any = None, **params: Any) -> list[Branch]:
        """The finished answers to one prompt (or `messages=`): one branch, or `n`."""
        return self.stream(prompt, **params).wait()

    def stream(
        self,
        prompt: Any = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> "Branches":
        """Start answering `prompt` (text or token ids) or `messages`; n > 1 branches stream together."""
        body = prompt_body(prompt, messages, {**params, "stream": True})
        path = "/v1/completions" if messages is None else "/v1/chat/completions"
        return self._open(path, body)

    def prefill(
        self,
        prompt: Any = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
    ) -> "Capsule":
        """Compute a prompt once and keep its state as a capsule, until deleted or `ttl_s` idle."""
        body = prompt_body(prompt, messages, {"ttl_s": ttl_s, "cache_salt": cache_salt})
        return Capsule(self, convert_capsule(self._send("POST", "/v1/capsules", body)))

    def capsule(self, capsule: str) -> "Capsule":
        """A capsule by id. Raises UnknownCapsule."""
        return Capsule(self, convert_capsule(self._send("GET", f"/v1/capsules/{capsule}")))

    def _send(
        self, method: str, path: str, body: object = None, *, accept_errors: bool = False
    ) -> Any:
        import httpx

        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ConnectionFailed(self.base_url, str(error) or type(error).__name__) from error
        answer = json_of(response.content, response.status_code)
        if not accept_errors:
            raise_for(answer, response.status_code)
        return answer

    def _open(self, path: str, body: dict[str, Any], parent: "Capsule | None" = None) -> "Branches":
        import httpx

        url = self.base_url + path
        began = time.perf_counter()
        request = self._http.build_request("POST", path, json=body)
        try:
            response = self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise ConnectionFailed(url, str(error) or type(error).__name__) from error
        if response.status_code >= 400:
            try:
                raw = response.read()
            finally:
                response.close()
            raise_for(json_of(raw, response.status_code), response.status_code)
        return Branches(self, url, response, began, parent)


class Capsule:
    """A prompt's state on its worker. As a context manager it is deleted at the end."""

    def __init__(self, client: Mallee, data: CapsuleData) -> None:
        self._client = client
        self.id = data.id
        self.worker = data.worker
        self.tokens = data.tokens
        self.prefill_tokens = data.prefill_tokens
        self.cached_tokens = data.cached_tokens

    def fork(self, branches: Sequence[Any] | int, **params: Any) -> "Branches":
        """Continue once per suffix (text, token ids, or {"messages": [...]}), or n times.

        Streaming begins at once. `params`: max_tokens, temperature, top_p, top_k, seed, stop, logprobs,
        response_format, ... as in the server's API. {"type": "inherit"} as `response_format` goes on
        inside the object in which the capsule's branch was cut.
        """
        path = f"/v1/capsules/{self.id}/fork"
        return self._client._open(path, fork_body(branches, params), self)

    def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        self._client._send("DELETE", f"/v1/capsules/{self.id}")

    def __enter__(self) -> "Capsule":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.delete()

    def __repr__(self) -> str:
        return f"Capsule({self.id!r}, worker={self.worker!r}, tokens={self.tokens})"


class Branches:
    """Branches of one request while they stream. Iterate for events as they arrive, or `wait`.

    `branches` maps index to what has come so far. Closing early (or leaving a `with` block) ends the
    branches that still run.
    """

    def __init__(
        self,
        client: Mallee,
        url: str,
        response: "httpx.Response",
        began: float,
        parent: Capsule | None = None,
    ) -> None:
        self.parent = parent
        self.branches: dict[int, Branch] = {}
        self.total_ms: float | None = None
        self._client = client
        self._url = url
        self._response = response
        self._began = began
        self._events = self._read()

    def __iter__(self) -> Iterator[BranchEvent]:
        return self._events

    def wait(self) -> list[Branch]:
        """All branches, finished, by index. Raises what the stream raises."""
        for _ in self._events:
            pass
        return [self.branches[i] for i in sorted(self.branches)]

    def fork(self, index: int, branches: Sequence[Any] | int, **params: Any) -> "Branches":
        """Fork where branch `index` ended. Raises ValueError if it left no capsule."""
        capsule = need_capsule(self.branches.get(index), index)
        return self._client._open(f"/v1/capsules/{capsule}/fork", fork_body(branches, params))

    def close(self) -> None:
        """End what still runs."""
        self._events.close()
        self._response.close()

    def __enter__(self) -> "Branches":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> Generator[BranchEvent, None, None]:
        import httpx

        parser, reader = SseParser(), StreamReader(self._url)
        try:
            for chunk in self._response.iter_raw():
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
            self._response.close()

    def _elapsed_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)
