"""The asynchronous client: `sync`, with await. Both are shells around `base`."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Self, Unpack

from mallee.client import calls
from mallee.client.base import (
    CUT_WAIT_S,
    DEFAULT_MAX_RETRIES,
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    DELETE_TIMEOUT_S,
    NO_HEADERS,
    READY_S,
    BaseBranch,
    BaseBranches,
    BaseCapsule,
    BaseMallee,
    BaseSession,
    failing_as,
    raise_refusal_async,
    ready_waits,
    retry_after_s,
    was_cut,
)
from mallee.client.calls import (
    Budget,
    Call,
    Generation,
    Importing,
    InjectMode,
    Message,
    Prompt,
    Stepping,
    Suffix,
    Terms,
    Wanted,
)
from mallee.client.critic import AsyncCritic, AsyncScore
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.files import (
    PIECE_NBYTES,
    Counted,
    File,
    Progress,
    file_headers,
    file_nbytes,
    length,
    opened,
    written,
)
from mallee.client.results import (
    BranchEvent,
    CapsuleCount,
    CapsuleData,
    read_answer,
    read_capsule,
    read_count,
    read_health,
)
from mallee.client.sessions import (
    BoundSession,
    ClosedSession,
    SessionData,
    SessionFork,
    SessionTree,
    bound_session,
    close_session,
    fork_session,
    list_sessions,
    made_up,
    read_session,
    show_session,
)
from mallee.protocol.errors import MalleeError, NotFound, UnknownCapsule

if TYPE_CHECKING:  # see sync
    from os import PathLike

    import httpx
    import openai

    from mallee.client.graphs.builder import Graph
    from mallee.client.graphs.running import AsyncGraphRun
    from mallee.client.searches.local import AsyncValue, LogprobScore
    from mallee.client.searches.remote import ServiceUrl, Where
    from mallee.graphs.nodes import Handle
    from mallee.search.policy import Policy, SearchBudget
    from mallee.search.results import SearchResult
    from mallee.search.scores import Verifier


class AsyncAsking(BaseMallee["AsyncBranches", "PendingCapsule"]):
    """Requests for answers and capsules, of a client or of one of its sessions."""

    async def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **params: Unpack[Generation],
    ) -> "list[AsyncBranch]":
        """The finished answers to one prompt or conversation: one branch, or `n`; see `Mallee.complete`."""
        call = calls.generate(prompt, messages, self._with_model(params))
        return await self._open(call.keyed()).wait()

    def run(
        self,
        graph: "Graph",
        *,
        outputs: "Sequence[Handle]" = (),
        max_running: int | None = None,
        journal: "str | PathLike[str] | None" = None,
        cache_salt: str | None = None,
        **terms: Unpack[Terms],
    ) -> "AsyncGraphRun":
        """Run a graph; see `Asking.run`."""
        from mallee.client.graphs.running import AsyncGraphRun

        return AsyncGraphRun(
            self,
            graph,
            outputs,
            max_running=max_running,
            journal=journal,
            params=self._with_model({"cache_salt": cache_salt, **terms}),
        )

    async def search(
        self,
        policy: "Policy",
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        score: "AsyncValue | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        cache_salt: str | None = None,
        **params: Unpack[Stepping],
    ) -> "SearchResult":
        """As `Mallee.search` and `AsyncCapsule.search`."""
        from mallee.client.searches.remote import at_gateway

        asked: dict[str, Any] = {"score": score, "seed": seed, "budget": budget, "ends": ends}
        if at_gateway(where):
            begin = {"prompt": prompt, "messages": messages}
            asked["params"] = {"cache_salt": cache_salt, **params}
            return await self._search(policy, begin, **asked)
        begun = self.prefill(
            prompt,
            messages=messages,
            add_generation_prompt=True,
            cache_salt=cache_salt,
            **calls.terms_of(params),
        )
        async with begun as capsule:
            return await capsule.search(policy, **asked, **params)

    async def _search(
        self, policy: "Policy", begin: Mapping[str, Any], *, params: Mapping[str, Any], **asked: Any
    ) -> "SearchResult":
        """As `Asking._search`."""
        from mallee.client.searches.remote import run_async, search_call

        call = search_call(policy, begin, params=self._with_model(params), **asked)
        return await run_async(call, self.base_url, partial(self._request, stream=True))

    @abstractmethod
    async def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        content: AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """As `Asking._request`."""

    async def _send(self, call: Call, *, max_retries: int | None = None) -> Any:
        response = await self._request(call.keyed(), max_retries=max_retries)
        raw, headers = response.content, response.headers
        return read_answer(response.status_code, raw, self.base_url, headers)

    def _open(self, call: Call) -> "AsyncBranches":
        return AsyncBranches(self, call)

    def _capsule(self, call: Call, *, is_open: bool) -> "PendingCapsule":
        return PendingCapsule(self, call, is_open=is_open)


class AsyncMallee(AsyncAsking):
    """A client of one service, for one event loop. An async context manager; see `Mallee`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        transport: "httpx.AsyncBaseTransport | None" = None,
    ) -> None:
        import httpx

        super().__init__(base_url, api_key, model, max_retries)
        self._transport = transport
        self._http = httpx.AsyncClient(
            base_url=self.base_url, headers=self._headers, timeout=timeout_s, transport=transport
        )

    @classmethod
    def from_openai(
        cls, client: "openai.AsyncOpenAI", *, model: str | None = None
    ) -> "AsyncMallee":
        """As `Mallee.from_openai`."""
        from mallee.client.transports.beside_openai import AsyncTransport, settings

        given = settings(client, is_async=True)
        return cls(**given, model=model, transport=AsyncTransport(client._client))

    async def __aenter__(self) -> "AsyncMallee":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
        await self._http.aclose()

    async def health(self) -> dict[str, Any]:
        """The service's own account of itself, also when it is unavailable."""
        response = await self._request(calls.HEALTH, max_retries=0)
        return read_health(response.status_code, response.content, self.base_url)

    async def models(self) -> list[str]:
        """Names of the models served."""
        return [entry["id"] for entry in (await self._send(calls.MODELS))["data"]]

    async def capsules(
        self,
        *,
        after: str | None = None,
        limit: int = 20,
        cache_salt: str | None = None,
        **wanted: Unpack[Wanted],
    ) -> list[CapsuleData]:
        """The caller's capsules that are `wanted`, by id: at most `limit` of those after `after`."""
        page = await self._send(calls.list_capsules(wanted, after, limit, cache_salt))
        return [read_capsule(body) for body in page["data"]]

    async def count_capsules(
        self, *, cache_salt: str | None = None, **wanted: Unpack[Wanted]
    ) -> CapsuleCount:
        """The number of the caller's capsules that are `wanted`, and of their tokens."""
        return read_count(await self._send(calls.count_capsules(wanted, cache_salt)))

    async def delete_capsules(
        self, *, all: bool = False, cache_salt: str | None = None, **wanted: Unpack[Wanted]
    ) -> int:
        """Delete the caller's capsules that are `wanted`, or with `all` every one; returns how many.

        Raises the first error, with their number, after the others were deleted: call it again. It is
        not sent again by itself: a second answer would not count those that the first had deleted.
        """
        call = calls.delete_capsules(wanted, is_all=all, cache_salt=cache_salt)
        return int((await self._send(call, max_retries=0))["deleted"])

    async def sessions(
        self, *, after: str | None = None, limit: int = 20, cache_salt: str | None = None
    ) -> list[SessionData]:
        """The caller's sessions by name: at most `limit` of those after `after`."""
        page = await self._send(list_sessions(after, limit, cache_salt))
        return [read_session(body, SessionData) for body in page["data"]]

    def session(self, name: str | None = None, *, cache_salt: str | None = None) -> "AsyncSession":
        """A session by name, or one with a name that no other has. Nothing is sent yet."""
        return AsyncSession(self, made_up() if name is None else name, cache_salt)

    async def request(self, request: str, *, cache_salt: str | None = None) -> dict[str, Any]:
        """The course of a request, while it runs and afterwards; see `Mallee.request`. Raises NotFound."""
        found: dict[str, Any] = await self._send(calls.show_request(request, cache_salt))
        return found

    def import_capsule(
        self,
        source: File,
        *,
        cache_salt: str | None = None,
        progress: Progress | None = None,
        **params: Unpack[Importing],
    ) -> "PendingCapsule":
        """A capsule from the file of an export, sent when it is awaited; see `Mallee.import_capsule`."""
        call = calls.import_capsule({"model": self.model, **params}, cache_salt)
        return PendingCapsule(self, call, is_open=False, sends=(source, progress))

    async def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        content: AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """As `Asking._request`."""
        from anyio import sleep

        most = self.max_retries if max_retries is None else max_retries
        request = self._http.build_request(
            *(call.method, call.path),
            content=call.content() if content is None else content,
            headers={**call.headers, **headers},
        )
        for num_left in range(most if content is None else 0, -1, -1):
            try:
                with failing_as(ConnectionFailed, self.base_url):
                    response = await self._http.send(request, stream=stream)
                    is_refused = num_left and response.status_code in (429, 503)
                    raw = await response.aread() if is_refused else b""
            except ConnectionFailed as error:
                if not (num_left and call.may_repeat and was_cut(error)):
                    raise
                await sleep(CUT_WAIT_S)
                continue
            wait_s = retry_after_s(response.headers, response.status_code, raw)
            if not num_left or wait_s is None:
                break
            await sleep(wait_s)
        return response


class AsyncSession(BaseSession["AsyncBranches", "PendingCapsule"], AsyncAsking):
    """One session of a client; see `Session`. An async context manager."""

    def __init__(
        self, client: AsyncMallee, name: str, cache_salt: str | None, root: str | None = None
    ) -> None:
        super().__init__(client, name, cache_salt, root)
        self._client = client

    async def show(self) -> SessionTree:
        """As `Session.show`."""
        return read_session(await self._send(show_session(self.id, self.cache_salt)), SessionTree)

    async def give_budget(self, budget: Budget, *, parent: str | None = None) -> BoundSession:
        """As `Session.give_budget`."""
        call = bound_session(self.id, budget, parent, self.cache_salt)
        return read_session(await self._send(call), BoundSession)

    async def fork(
        self,
        new: str | None = None,
        *,
        capsule: str | None = None,
        budget: Budget | None = None,
    ) -> "AsyncSession":
        """As `Session.fork`."""
        call = fork_session(self.id, new, capsule, self.cache_salt, budget=budget)
        made = read_session(await self._send(call, max_retries=0), SessionFork)
        return AsyncSession(self._client, made.id, self.cache_salt, made.capsule)

    async def close(self) -> ClosedSession:
        """As `Session.close`."""
        call = close_session(self.id, self.cache_salt)
        return read_session(await self._send(call, max_retries=0), ClosedSession)

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from anyio import move_on_after

        # As a capsule's end.
        with move_on_after(DELETE_TIMEOUT_S, shield=True):
            with suppress(*((NotFound,) if kind is None else (MalleeError, RuntimeError))):
                await self.close()

    async def _request(self, call: Call, **more: Any) -> "httpx.Response":
        return await self._client._request(call, **more)


class AsyncCapsule(BaseCapsule["AsyncBranches", "PendingCapsule"]):
    """A prompt's state on its worker, or a branch's; see `Capsule`."""

    _client: AsyncAsking

    async def wait(self, *, timeout_s: float = READY_S) -> Self:
        """As `Capsule.wait`."""
        from anyio import sleep

        for wait_s in ready_waits(self.id, timeout_s):
            await sleep(wait_s)
            if self._hear(read_capsule(await self._client._send(self._shown()))):
                break
        return self

    async def search(
        self,
        policy: "Policy",
        *,
        score: "AsyncValue | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        **params: Unpack[Stepping],
    ) -> "SearchResult":
        """As `Capsule.search`. `score` may be a coroutine function; a plain one runs in a thread."""
        from mallee.client.searches.local import run_async
        from mallee.client.searches.remote import at_gateway

        self._need_closed("policy", policy)
        asked: dict[str, Any] = {"score": score, "seed": seed, "budget": budget, "ends": ends}
        asked["params"] = {"cache_salt": self._cache_salt, **params}
        if at_gateway(where):
            return await self._client._search(policy, {"capsule": self.id}, **asked)
        return await run_async(self._client._fork, self.id, policy, **asked)

    async def text(self, start: int = 0) -> str:
        """As `Capsule.text`."""
        answer = await self._client._send(calls.capsule_text(self.id, start, self._cache_salt))
        return str(answer["text"])

    async def prune(self) -> list[str]:
        """As `Capsule.prune`."""
        answer = await self._client._send(calls.prune_below(self.id, self._cache_salt))
        return list(answer["requests"])

    async def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        await self._client._send(calls.delete_capsule(self.id, self._cache_salt))

    async def export(self, target: File, *, progress: Progress | None = None) -> int:
        """Write it to a file, by path or open; see `Capsule.export`."""
        from anyio.to_thread import run_sync

        client, call = self._client, calls.export(self.id, self._cache_salt)
        response = await client._request(call, stream=True)
        try:
            with failing_as(StreamBroken, client.base_url + call.path):
                if response.status_code >= 400:
                    raw, headers = await response.aread(), response.headers
                    read_answer(response.status_code, raw, client.base_url, headers)
                counted = Counted(file_nbytes(response.headers), progress)
                with written(target) as file:
                    async for data in response.aiter_raw():
                        await run_sync(file.write, data)
                        counted.add(len(data))
        finally:
            await response.aclose()
        return counted.nbytes

    async def __aenter__(self) -> "AsyncCapsule":
        """As `Capsule.__enter__`."""
        if self.data.pinned is False:
            self.data = (await self.pin()).data
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from anyio import move_on_after  # httpx needs it too

        # A cancelled block still deletes; an error of the block is not hidden by one of its clean-up.
        with move_on_after(DELETE_TIMEOUT_S, shield=True):
            with suppress(*((UnknownCapsule,) if kind is None else (MalleeError, RuntimeError))):
                await self.delete()


class PendingCapsule:
    """A capsule that is requested when awaited, or by `async with`, which also deletes it."""

    def __init__(
        self,
        client: AsyncAsking,
        call: Call,
        *,
        is_open: bool,
        sends: tuple[File, Progress | None] | None = None,
    ) -> None:
        """`sends`: a file that is the body, and who is told of its bytes."""
        self._client = client
        self._call = call
        self._is_open = is_open
        self._sends = sends
        self._capsule: AsyncCapsule | None = None

    def __await__(self) -> Generator[Any, Any, AsyncCapsule]:
        return self._send().__await__()

    async def __aenter__(self) -> AsyncCapsule:
        self._capsule = await (await self._send()).__aenter__()
        return self._capsule

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        assert self._capsule is not None
        await self._capsule.__aexit__(kind, *error)

    async def _send(self) -> AsyncCapsule:
        data = read_capsule(await self._answer())
        salt = self._call.cache_salt
        return AsyncCapsule(self._client, data, is_open=self._is_open, cache_salt=salt)

    async def _answer(self) -> Any:
        if self._sends is None:
            return await self._client._send(self._call)
        source, progress = self._sends
        with opened(source) as file:
            total = length(file)
            content, headers = _pieces(file, Counted(total, progress)), file_headers(total)
            response = await self._client._request(self._call, content=content, headers=headers)
        raw, url = response.content, self._client.base_url
        return read_answer(response.status_code, raw, url, response.headers)


async def _pieces(file: BinaryIO, counted: Counted) -> AsyncIterator[bytes]:
    from anyio.to_thread import run_sync

    while data := await run_sync(file.read, PIECE_NBYTES):
        counted.add(len(data))
        yield data


class AsyncBranch(BaseBranch["AsyncBranches", PendingCapsule]):
    """One branch's answer so far, which can be forked where it ended."""

    __slots__ = ()

    async def inject(self, suffix: Suffix, *, mode: InjectMode = "append") -> int:
        """As `Branch.inject`."""
        return int((await self._inject(suffix, mode))["at"])

    async def prune(self) -> bool:
        """As `Branch.prune`."""
        return self.index in (await self._prune())["branches"]

    async def prioritize(self, priority: int) -> bool:
        """As `Branch.prioritize`."""
        return self.index in (await self._prioritize(priority))["branches"]


class AsyncBranches(BaseBranches[AsyncBranch]):
    """Branches of one request while they stream: `async for` events, or `await ... .wait()`.

    The request is sent when first awaited, iterated or entered; `await` alone sends it.
    """

    def __init__(self, client: AsyncAsking, call: Call) -> None:
        super().__init__(client.base_url + call.path)
        self._client = client
        self._call = call
        self._response: httpx.Response | None = None
        self._events = self._read()

    def __await__(self) -> "Generator[Any, Any, AsyncBranches]":
        return self.__aenter__().__await__()

    def __aiter__(self) -> AsyncIterator[BranchEvent]:
        return self._events

    async def wait(
        self, *, score: AsyncScore | None = None, below: float = 0.0
    ) -> list[AsyncBranch]:
        """All branches, finished, by index; see `Branches.wait`.

        `score` may be a coroutine function; a plain one runs in a thread.
        """
        if score is None:
            async for _ in self._events:
                pass
            return self._finished()
        async with self, AsyncCritic(self.branches, score, below) as critic:
            async for event in self._events:
                critic.see(event)
        return self._finished()

    async def close(self) -> None:
        """End what still runs."""
        await self._events.aclose()
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> "AsyncBranches":
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _new_branch(self, index: int) -> AsyncBranch:
        return AsyncBranch(index, client=self._client, cache_salt=self._call.cache_salt)

    async def _opened(self) -> "httpx.Response":
        """The response, once sent. Raises the error that the server answered with."""
        if self._response is None:
            self._begin()
            self._response = await self._client._request(self._call, stream=True)
            if self._response.status_code >= 400:
                await raise_refusal_async(self._response, self._url)
        return self._response

    async def _read(self) -> AsyncGenerator[BranchEvent, None]:
        response = await self._opened()
        num_left = self._client.max_retries if self._call.may_repeat else 0
        try:
            while not self._reader.is_done:
                try:
                    with failing_as(StreamBroken, self._url):
                        async for chunk in response.aiter_raw():
                            for event in self._take(chunk):
                                yield event
                            if self._reader.is_done:
                                break
                        self._end()
                except StreamBroken as error:
                    if not (num_left and was_cut(error)):
                        raise
                    num_left -= 1
                    response = await self._again(response)
        finally:
            await response.aclose()

    async def _again(self, cut: "httpx.Response") -> "httpx.Response":
        """As `Branches._again`."""
        from anyio import sleep

        await cut.aclose()
        await sleep(CUT_WAIT_S)
        self._response = response = await self._client._request(self._call, stream=True)
        if response.status_code >= 400:
            await raise_refusal_async(response, self._url)
        self._resume(response.headers)
        return response
