"""The synchronous client: sends, waits and closes around `base`. Its twin is `aio`."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from mallee.client import calls
from mallee.client.base import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    BaseBranches,
    BaseCapsule,
    BaseMallee,
)
from mallee.client.calls import (
    DEFAULT_TTL_S,
    Call,
    Forks,
    Generation,
    Message,
    Prompt,
    Sampling,
    Terms,
)
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.results import (
    BranchEvent,
    BranchState,
    CapsuleData,
    read_answer,
    read_capsule,
    read_health,
)
from mallee.protocol.errors import MalleeError, UnknownCapsule

if TYPE_CHECKING:  # httpx costs 100 ms to import: loaded by the first client, not by the import
    import httpx


class Mallee(BaseMallee):
    """A client of one service. A context manager; not for use from several threads at once.

    `model` goes with every request that names none. `timeout_s` bounds every wait for bytes: a server
    that sends nothing for so long ends the call with ConnectionFailed or StreamBroken.
    Raises InvalidParameter for a `base_url` without http:// or https://.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        import httpx

        super().__init__(base_url, api_key, model)
        self._http = httpx.Client(
            base_url=self.base_url, headers=self._headers, timeout=timeout_s, transport=transport
        )

    def __enter__(self) -> "Mallee":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
        self._http.close()

    def health(self) -> dict[str, Any]:
        """The service's own account of itself, also when it is unavailable."""
        response = self._request(calls.HEALTH)
        return read_health(response.status_code, response.content, self.base_url)

    def models(self) -> list[str]:
        """Names of the models served."""
        return [entry["id"] for entry in self._send(calls.MODELS)["data"]]

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **params: Unpack[Generation],
    ) -> "list[Branch]":
        """The finished answers to one prompt or conversation: one branch, or `n`."""
        return self.stream(prompt, messages=messages, **params).wait()

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **params: Unpack[Generation],
    ) -> "Branches":
        """Start answering `prompt` or `messages`; n > 1 branches stream together."""
        return Branches(self, calls.generate(prompt, messages, self._with_model(params)))

    def prefill(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        ttl_s: float = DEFAULT_TTL_S,
        cache_salt: str | None = None,
        **terms: Unpack[Terms],
    ) -> "Capsule":
        """Compute a prompt once and keep its state as a capsule, until deleted or `ttl_s` idle.

        `ttl_s` 0 keeps it until it is deleted. A conversation is left open for suffixes with messages;
        `add_generation_prompt` ends it where the assistant's answer begins, for forks without any.
        """
        is_open = messages is not None and not add_generation_prompt
        params = self._with_model({"ttl_s": ttl_s, "cache_salt": cache_salt, **terms})
        call = calls.prefill(prompt, messages, params, is_open=is_open)
        return Capsule(self, read_capsule(self._send(call)), is_open=is_open)

    def capsule(self, capsule: str) -> "Capsule":
        """A capsule by id. Raises UnknownCapsule."""
        data = read_capsule(self._send(calls.get_capsule(capsule)))
        return Capsule(self, data, is_open=False)

    def _request(self, call: Call, *, stream: bool = False) -> "httpx.Response":
        import httpx

        request = self._http.build_request(call.method, call.path, content=call.content())
        try:
            return self._http.send(request, stream=stream)
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            raise ConnectionFailed(self.base_url, reason) from error

    def _send(self, call: Call) -> Any:
        response = self._request(call)
        return read_answer(response.status_code, response.content, self.base_url)

    def _fork(self, capsule: str, branches: Forks, params: Mapping[str, Any]) -> "Branches":
        return Branches(self, calls.fork(capsule, branches, self._with_model(params)))


class Capsule(BaseCapsule):
    """A prompt's state on its worker. As a context manager it is deleted at the end, come what may."""

    def __init__(self, client: Mallee, data: CapsuleData, *, is_open: bool) -> None:
        super().__init__(data, is_open=is_open)
        self._client = client

    def fork(
        self,
        branches: Forks,
        *,
        at: int | None = None,
        **params: Unpack[Sampling],
    ) -> "Branches":
        """Continue once per suffix (text, token ids, or {"messages": [...]}), or n times.

        Streaming begins at once. With `at` the branches continue the capsule's first so many tokens.
        {"type": "inherit"} as `response_format` goes on inside the object in which the capsule's branch
        was cut.
        """
        self._check_fork(branches)
        return self._client._fork(self.id, branches, {"at": at, **params})

    def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        self._client._send(calls.delete_capsule(self.id))

    def __enter__(self) -> "Capsule":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error of the block must not be hidden by one of its clean-up.
        with suppress(UnknownCapsule if kind is None else MalleeError):
            self.delete()


@dataclass(slots=True, repr=False)
class Branch(BranchState):
    """One branch's answer so far, which can be forked where it ended."""

    client: Mallee | None = field(default=None, compare=False)

    def fork(
        self,
        branches: Forks,
        *,
        at: int | None = None,
        **params: Unpack[Sampling],
    ) -> "Branches":
        """Continue where the branch ended, as `Capsule.fork` does. Raises NoCapsule."""
        capsule = self.need_capsule()
        assert self.client is not None
        return self.client._fork(capsule, branches, {"at": at, **params})


class Branches(BaseBranches[Branch]):
    """Branches of one request while they stream. Iterate for events as they arrive, or `wait`.

    `branches` maps index to the branch so far. Closing early (or leaving a `with` block) ends the
    branches that still run.
    """

    def __init__(self, client: Mallee, call: Call) -> None:
        super().__init__(client.base_url + call.path)
        self._client = client
        self._begin()
        self._response = client._request(call, stream=True)
        if self._response.status_code >= 400:
            self._refuse()
        self._events = self._read()

    def __iter__(self) -> Iterator[BranchEvent]:
        return self._events

    def wait(self) -> list[Branch]:
        """All branches, finished, by index. Raises what the stream raises."""
        for _ in self._events:
            pass
        return self._finished()

    def close(self) -> None:
        """End what still runs."""
        self._events.close()
        self._response.close()

    def __enter__(self) -> "Branches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_branch(self, index: int) -> Branch:
        return Branch(index, client=self._client)

    def _refuse(self) -> None:
        """Raise the error that the server answered with."""
        import httpx

        try:
            raw = self._response.read()
        except httpx.RequestError as error:
            raise StreamBroken(self._url, str(error) or type(error).__name__) from error
        finally:
            self._response.close()
        read_answer(self._response.status_code, raw, self._url)

    def _read(self) -> Generator[BranchEvent, None, None]:
        import httpx

        try:
            for chunk in self._response.iter_raw():
                yield from self._take(chunk)
                if self._reader.is_done:
                    break
            self._end()
        except httpx.RequestError as error:
            raise StreamBroken(self._url, str(error) or type(error).__name__) from error
        finally:
            self._response.close()
