"""Base of both clients: parameters to calls, bytes to branches; no I/O but that of refused streams.

`sync` and `aio` add sending, waiting and closing.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack

from mallee.client import calls
from mallee.client.calls import (
    Call,
    Forks,
    Generation,
    Going,
    InjectMode,
    Message,
    Prefilling,
    Prompt,
    Sampling,
    Suffix,
)
from mallee.client.errors import NO_END, ConnectionFailed, StreamBroken, from_body
from mallee.client.html import tree_html
from mallee.client.results import (
    BranchEvent,
    BranchState,
    CapsuleData,
    StreamReader,
    Usage,
    read_answer,
    told_wait_s,
)
from mallee.client.sse import SseParser
from mallee.protocol.errors import InvalidParameter, Unavailable

if TYPE_CHECKING:
    import httpx

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
_FULL = ("capsules_full", "tier_full", "storage_full")  # that a short wait doesn't change

B = TypeVar("B", bound=BranchState)
S = TypeVar("S")  # a client's streams of branches
C = TypeVar("C")  # its capsules


def growing_waits(first_s: float, most_s: float) -> Iterator[float]:
    """Seconds without end, twice as many each time, up to `most_s`."""
    while True:
        yield first_s
        first_s = min(2 * first_s, most_s)


def ready_waits(capsule: str, timeout_s: float) -> Iterator[float]:
    """Seconds before each question for a capsule that is computing. Raises Unavailable after `timeout_s`."""
    yield 0.0
    end = time.monotonic() + timeout_s
    for wait_s in growing_waits(READY_WAIT_S, MAX_READY_WAIT_S):
        if time.monotonic() + wait_s > end:
            break
        yield wait_s
    raise Unavailable(f"{capsule!r} is still computing after {timeout_s:g} s; wait longer")


@contextmanager
def failing_as(kind: type[ConnectionFailed] | type[StreamBroken], url: str) -> Iterator[None]:
    """Raises `kind` instead of httpx's own errors."""
    import httpx

    try:
        yield
    except httpx.RequestError as error:
        raise kind(url, str(error) or type(error).__name__) from error


def raise_refusal(response: "httpx.Response", url: str) -> None:
    """Read and close a response with an error status. Raises that error, or StreamBroken."""
    try:
        with failing_as(StreamBroken, url):
            raw = response.read()
    finally:
        response.close()
    read_answer(response.status_code, raw, url, response.headers)


async def raise_refusal_async(response: "httpx.Response", url: str) -> None:
    """As `raise_refusal`."""
    try:
        with failing_as(StreamBroken, url):
            raw = await response.aread()
    finally:
        await response.aclose()
    read_answer(response.status_code, raw, url, response.headers)


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


class BaseMallee(ABC, Generic[S, C]):
    """Address, key and model of a client, and the calls that it makes."""

    def __init__(
        self, base_url: str, api_key: str | None, model: str | None, max_retries: int
    ) -> None:
        if max_retries < 0:
            raise InvalidParameter("max_retries", max_retries, "give 0 or more")
        self.base_url = calls.checked_url(base_url)
        self.model = model
        self.max_retries = max_retries
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **params: Unpack[Generation],
    ) -> S:
        """An answer to `prompt` or `messages`; n > 1 branches stream together."""
        return self._open(calls.generate(prompt, messages, self._with_model(params)))

    def prefill(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
        **terms: Unpack[Prefilling],
    ) -> C:
        """Compute a prompt once and keep its state as a capsule, until deleted or `ttl_s` idle.

        Without `ttl_s` the server's default holds; 0 keeps it until it is deleted, where the server allows
        that. A conversation is left open for suffixes with messages;
        `add_generation_prompt` ends it where the assistant's answer begins, for forks without any.

        Without `wait` it returns at once, and can be forked: branches begin as soon as the tokens that they
        continue are there. `Capsule.wait` returns when all are, and raises what the prefill failed by.
        """
        is_open = messages is not None and not add_generation_prompt
        params = self._with_model({"ttl_s": ttl_s, "cache_salt": cache_salt, **terms})
        if not wait:
            params["wait"] = False
        call = calls.prefill(prompt, messages, params, is_open=is_open)
        return self._capsule(call, is_open=is_open)

    def capsule(self, capsule: str, *, cache_salt: str | None = None) -> C:
        """A capsule by id, and the salt that it was made with. Raises UnknownCapsule."""
        return self._capsule(calls.get_capsule(capsule, cache_salt), is_open=False)

    def _restore(self, capsule: str, params: Mapping[str, Any]) -> S:
        return self._open(calls.restore(capsule, self._with_model(params)))

    def _fork(self, capsule: str, branches: Forks, params: Mapping[str, Any]) -> S:
        return self._open(calls.fork(capsule, branches, self._with_model(params)))

    @abstractmethod
    def _open(self, call: Call) -> S: ...

    @abstractmethod
    def _send(self, call: Call, *, max_retries: int | None = None) -> Any: ...

    @abstractmethod
    def _capsule(self, call: Call, *, is_open: bool) -> C: ...

    def _with_model(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **params}

    def __repr__(self) -> str:
        model = "" if self.model is None else f", model={self.model!r}"
        return f"{type(self).__name__}({self.base_url!r}{model})"


class BaseSession(BaseMallee[S, C]):
    """One session of a client, by its name `id`: all requests that are made through it name it.

    `root`: the capsule that it began with, if it is a fork of another session. `cache_salt` is that of
    its requests, where they give no other.
    """

    def __init__(
        self, client: BaseMallee[S, C], name: str, cache_salt: str | None, root: str | None = None
    ) -> None:
        super().__init__(client.base_url, None, client.model, client.max_retries)
        self.id = name
        self.cache_salt = cache_salt
        self.root = root

    def capsule(self, capsule: str, *, cache_salt: str | None = None) -> C:
        """A capsule by id, whose forks belong to this session. Raises UnknownCapsule."""
        salt = self.cache_salt if cache_salt is None else cache_salt
        return super().capsule(capsule, cache_salt=salt)

    def _with_model(self, params: Mapping[str, Any]) -> dict[str, Any]:
        salt = params.get("cache_salt")
        terms = {"session": self.id, **params.get("mallee", {})}
        salt = self.cache_salt if salt is None else salt
        return {**super()._with_model(params), "mallee": terms, "cache_salt": salt}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, root={self.root!r})"


class BaseCapsule(Generic[S, C]):
    """A prompt's state on its worker, or a branch's.

    `is_open`: the capsule's conversation ends after its last message, not where an answer begins.
    """

    def __init__(
        self,
        client: BaseMallee[S, C],
        data: CapsuleData,
        *,
        is_open: bool,
        cache_salt: str | None = None,
    ) -> None:
        self._client = client
        self._cache_salt = cache_salt
        self.id = data.id
        self.worker = data.worker
        self.tokens = data.tokens
        self.model = data.model
        self.prefill_tokens = data.prefill_tokens
        self.cached_tokens = data.cached_tokens
        self.is_open = is_open
        self.data = data

    def _shown(self) -> Call:
        return calls.get_capsule(self.id, self._cache_salt)

    def _hear(self, data: CapsuleData) -> bool:
        """Take what the server tells of it now; whether it is there. Raises what its prefill failed by."""
        if data.error is not None:
            raise from_body({"error": data.error}, 200)
        self.worker, self.data = data.worker, data
        return data.status != "computing"

    def restore(self, **params: Unpack[Going]) -> S:
        """Go on as the very branch that the capsule was taken from.

        Its sampling, stream of draws, limits, penalties and form go on; with `at` from an earlier token of
        its answer, with `max_tokens` for so many tokens more. Raises InvalidParameter for a prompt's capsule.
        """
        salt = {"cache_salt": self._cache_salt}
        return self._client._restore(self.id, {**salt, **params})

    def rewind(self, to: int, *, ttl_s: float | None = None) -> C:
        """A capsule of the first `to` tokens; this one stays as it is."""
        params = {"to": to, "ttl_s": ttl_s, "cache_salt": self._cache_salt}
        return self._client._capsule(calls.rewind(self.id, params), is_open=False)

    def pin(self, *, ttl_s: float | None = None) -> C:
        """Keep it until it is deleted or unused for `ttl_s`. Raises CapsulesFull."""
        params = {"ttl_s": ttl_s, "cache_salt": self._cache_salt}
        return self._client._capsule(calls.pin(self.id, params), is_open=self.is_open)

    def unpin(self) -> C:
        """Keep it only while there is room."""
        call = calls.unpin(self.id, self._cache_salt)
        return self._client._capsule(call, is_open=self.is_open)

    def demote(self, tier: Literal["host", "disk"]) -> C:
        """Move it to host memory, or to disk; from there it outlives its worker.

        Returns once it is there. Raises InvalidParameter if the worker has no such tier, TierFull.
        """
        params = {"tier": tier, "cache_salt": self._cache_salt}
        return self._client._capsule(calls.demote(self.id, params), is_open=self.is_open)

    def promote(self) -> C:
        """Bring it back to the device ahead of its next fork. Returns once it is there."""
        call = calls.promote(self.id, {"cache_salt": self._cache_salt})
        return self._client._capsule(call, is_open=self.is_open)

    def fork(
        self,
        branches: Forks,
        *,
        at: int | None = None,
        **params: Unpack[Sampling],
    ) -> S:
        """Continue once per suffix (text, token ids, or {"messages": [...]}), or n times.

        `fork("and")` is one branch: a lone text or object is one suffix. Token ids stand in a list of
        suffixes, as in `fork([[1, 2, 3]])`.

        With `at` the branches continue the capsule's first so many tokens. {"type": "inherit"} as
        `response_format` goes on inside the object in which the capsule's branch was cut.
        Raises InvalidParameter for what is none of these, and for forks of an open conversation that add no
        message.
        """
        if isinstance(branches, int):
            self._need_closed("branches", branches)
        salt = {"cache_salt": self._cache_salt}
        return self._client._fork(self.id, branches, {"at": at, **salt, **params})

    def _need_closed(self, param: str, value: object) -> None:
        if self.is_open:
            remedy = (
                'the conversation was left open; fork it with {"messages": [...]}, or prefill it with'
                " add_generation_prompt=True"
            )
            raise InvalidParameter(param, value, remedy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, worker={self.worker!r}, tokens={self.tokens})"


@dataclass(slots=True, repr=False)
class BaseBranch(BranchState, Generic[S, C]):
    """One branch's answer so far, which can be forked where it ended, and captured while it runs."""

    client: BaseMallee[S, C] | None = field(default=None, compare=False)
    cache_salt: str | None = field(default=None, compare=False)

    def fork(
        self,
        branches: Forks,
        *,
        at: int | None = None,
        **params: Unpack[Sampling],
    ) -> S:
        """Continue where the branch ended, as `Capsule.fork` does. Raises NoCapsule."""
        capsule = self.need_capsule()
        assert self.client is not None
        salt = {"cache_salt": self.cache_salt}
        return self.client._fork(capsule, branches, {"at": at, **salt, **params})

    def capture(self, *, ttl_s: float | None = None) -> C:
        """A capsule of the running branch at its next token; it goes on as if nothing had happened.

        Raises UnknownBranch if it is over; then `fork` and `restore` continue where it ended.
        """
        assert self.client is not None
        assert self.request_id is not None, "it was not begun"
        params = {"ttl_s": ttl_s, "cache_salt": self.cache_salt}
        call = calls.capture(self.request_id, self.index, params)
        return self.client._capsule(call, is_open=False)

    def _inject(self, suffix: Suffix, mode: InjectMode) -> Any:
        """The answer to an inject, or what awaits it."""
        assert self.client is not None
        assert self.request_id is not None, "it was not begun"
        params = {"suffix": suffix, "mode": mode, "cache_salt": self.cache_salt}
        return self.client._send(calls.inject(self.request_id, self.index, params))

    def _prune(self) -> Any:
        """The answer to a prune of this branch, or what awaits it."""
        assert self.client is not None
        assert self.request_id is not None, "it was not begun"
        return self.client._send(calls.prune(self.request_id, [self.index], self.cache_salt))

    def _prioritize(self, priority: int) -> Any:
        """The answer to another priority of this branch, or what awaits it."""
        assert self.client is not None
        assert self.request_id is not None, "it was not begun"
        call = calls.prioritize(self.request_id, [self.index], priority, self.cache_salt)
        return self.client._send(call)

    def pin(self, *, ttl_s: float | None = None) -> C:
        """The capsule where the branch ended, kept as `Capsule.pin` does. Raises NoCapsule, CapsulesFull."""
        capsule = self.need_capsule()
        assert self.client is not None
        params = {"ttl_s": ttl_s, "cache_salt": self.cache_salt}
        return self.client._capsule(calls.pin(capsule, params), is_open=False)

    def restore(self, **params: Unpack[Going]) -> S:
        """Go on as this very branch, as `Capsule.restore` does. Raises NoCapsule."""
        capsule = self.need_capsule()
        assert self.client is not None
        return self.client._restore(capsule, {"cache_salt": self.cache_salt, **params})


class BaseBranches(ABC, Generic[B]):
    """Branches of one request while they stream. `branches` maps index to the branch so far."""

    def __init__(self, url: str) -> None:
        self.branches: dict[int, B] = {}
        self.total_ms: float | None = None
        self._url = url
        self._began = 0.0
        self._parser = SseParser()
        self._reader = StreamReader(url)
        self._num_read = 0  # bytes
        self._num_known = 0  # of the next bytes: read before the stream was cut

    @property
    def request_id(self) -> str | None:
        """The request's id on the server; None until the first event."""
        return self._reader.request_id

    @property
    def usage(self) -> Usage | None:
        """Tokens of the request, all branches together; None until the last has ended."""
        return self._reader.usage

    @abstractmethod
    def _new_branch(self, index: int) -> B: ...

    def _begin(self) -> None:
        """Note that the request is sent now."""
        self._began = time.perf_counter()

    def _take(self, chunk: bytes) -> Iterator[BranchEvent]:
        """Events in `chunk`, each added to its branch. Raises the server's error, StreamBroken."""
        fresh = chunk[self._num_known :]
        self._num_known -= len(chunk) - len(fresh)
        self._num_read += len(fresh)
        for data in self._parser.feed(fresh):
            for event in self._reader.read(data):
                branch = self.branches.get(event.index)
                if branch is None:
                    branch = self.branches[event.index] = self._new_branch(event.index)
                    branch.request_id = self._reader.request_id
                branch.take(event, self._elapsed_ms())
                yield event

    def _resume(self, headers: Mapping[str, str]) -> None:
        """Go on by the same answer's bytes, sent again. Raises StreamBroken if it is another answer."""
        if self._num_read and headers.get("idempotent-replayed") != "true":
            raise StreamBroken(self._url, "another gateway knows nothing of it")
        self._num_known = self._num_read

    def _end(self) -> None:
        """End the stream. Raises StreamBroken if it broke off."""
        self._reader.end()
        self.total_ms = self._elapsed_ms()
        for branch in self.branches.values():
            branch.usage = self._reader.usage

    def _finished(self) -> list[B]:
        return [self.branches[i] for i in sorted(self.branches)]

    def _elapsed_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began)

    def _repr_html_(self) -> str:
        """The tree of its branches, as notebooks show it."""
        return tree_html(f"{type(self).__name__} {self.request_id or ''}", self.branches)

    def __repr__(self) -> str:
        ended = sum(branch.finish_reason is not None for branch in self.branches.values())
        return f"{type(self).__name__}({self.request_id!r}, {ended} of {len(self.branches)} ended)"
