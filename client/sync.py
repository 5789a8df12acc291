# Generated from client/aio.py by `make generate`: don't edit.
# ruff: noqa: E501 (texts in one piece)
"""The synchronous client: sends, waits and closes. Its twin is `aio`."""

import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, Unpack, overload

import msgspec

from mallee.client import calls, files, sessions
from mallee.client.base import (
    CUT_WAIT_S,
    DELETE_TIMEOUT_S,
    NO_HEADERS,
    READY_S,
    Connected,
    Listed,
    failing_as,
    ready_waits,
    retry_after_s,
    spelled,
    was_cut,
)
from mallee.client.calls import Call
from mallee.client.critic import Critic, Score
from mallee.client.errors import ConnectionFailed, StreamBroken, Timeout, from_body
from mallee.client.results import (
    BranchEvent,
    BranchState,
    CapsuleState,
    read_answer,
    read_as,
    read_health,
)
from mallee.client.sse import SseParser
from mallee.protocol.api.capsules import CapsuleCount, RequestLife
from mallee.protocol.api.capsules import NewCapsule as CapsuleData
from mallee.protocol.api.operator import Decisions, Worker, WorkerList
from mallee.protocol.api.sessions import BoundSession, SessionClosed, SessionFork
from mallee.protocol.api.sessions import Session as SessionData
from mallee.protocol.errors import InvalidParameter, MalleeError, NotFound, UnknownCapsule

if TYPE_CHECKING:
    from os import PathLike

    import httpx

    from mallee.client.graphs.blocking import GraphRun
    from mallee.client.graphs.builder import Graph
    from mallee.client.searches.local import LogprobScore, Value
    from mallee.client.searches.remote import ServiceUrl, Where
    from mallee.graphs.nodes import Handle
    from mallee.search.policy import Policy, SearchBudget
    from mallee.search.results import SearchResult
    from mallee.search.scores import Verifier


@spelled
class Asking(ABC):
    """Requests for answers and capsules, of a client or of one of its sessions."""

    base_url: str
    model: str | None
    max_retries: int

    @overload
    def complete(
        self,
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        n: None = None,
        **params: Unpack[calls.Generation],
    ) -> "Branch": ...

    @overload
    def complete(
        self,
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        n: int,
        **params: Unpack[calls.Generation],
    ) -> "list[Branch]": ...

    def complete(
        self,
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        n: int | None = None,
        **params: Unpack[calls.Generation],
    ) -> "Branch | list[Branch]":
        """The finished answer to one prompt or conversation; with `n` a list of so many to each prompt.

        If the connection is cut, the rest of the same answer is fetched: nothing is computed twice.
        """
        call = calls.generate(prompt, messages, self._params({"n": n, **params}))
        if n is None and calls.is_several(prompt):
            raise InvalidParameter("n", n, "of several prompts give the number of answers to each")
        branches = self._open(call.keyed()).wait()
        return branches[0] if n is None else branches

    def stream(
        self,
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        n: int | None = None,
        **params: Unpack[calls.Generation],
    ) -> "Branches":
        """An answer to `prompt` or `messages`; n > 1 branches stream together."""
        return self._open(calls.generate(prompt, messages, self._params({"n": n, **params})))

    def prefill(
        self,
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        add_generation_prompt: bool = False,
        ttl_s: float | None = None,
        cache_salt: str | None = None,
        wait: bool = True,
        **terms: Unpack[calls.Prefilling],
    ) -> "Capsule":
        """Compute a prompt once and keep its state as a capsule, until deleted or `ttl_s` idle.

        Without `ttl_s` the server's default holds; 0 keeps it until it is deleted, where the server allows
        that. A conversation is left open for suffixes with messages;
        `add_generation_prompt` ends it where the assistant's answer begins, for forks without any.

        Without `wait` it returns at once, and can be forked: branches begin as soon as the tokens that they
        continue are there. `Capsule.wait` returns when all are, and raises what the prefill failed by.
        """
        is_open = messages is not None and (not add_generation_prompt)
        params = self._params({"ttl_s": ttl_s, "cache_salt": cache_salt, **terms})
        if not wait:
            params["wait"] = False
        call = calls.prefill(prompt, messages, params, is_open=is_open)
        return self._capsule(call, is_open=is_open)

    def capsule(self, capsule: str, *, cache_salt: str | None = None) -> "Capsule":
        """A capsule by id, and the salt that it was made with. Raises UnknownCapsule."""
        return self._capsule(calls.of_capsule("GET", capsule, cache_salt), is_open=False)

    def run(
        self,
        graph: "Graph",
        *,
        outputs: "Sequence[Handle]" = (),
        max_running: int | None = None,
        journal: "str | PathLike[str] | None" = None,
        cache_salt: str | None = None,
        **terms: Unpack[calls.Terms],
    ) -> "GraphRun":
        """Run a graph. `outputs`: by default the nodes that no other takes from.

        `journal`: a file that gets what is done, from which the same graph goes on; one run at a time has it.
        A `budget` bounds all of its nodes together. Raises InvalidGraph for one that can't run.
        """
        from mallee.client.graphs.blocking import GraphRun

        return GraphRun(
            self,
            graph,
            outputs,
            max_running=max_running,
            journal=journal,
            params=self._params({"cache_salt": cache_salt, **terms}),
        )

    def search(
        self,
        policy: "Policy | str",
        prompt: calls.Prompt | None = None,
        *,
        messages: Sequence[calls.Message] | None = None,
        score: "Value | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        cache_salt: str | None = None,
        **params: Unpack[calls.Stepping],
    ) -> "SearchResult":
        """Compute a prompt or conversation once and search for the best text that goes on from it.

        See `Capsule.search`. Its capsule is deleted at the end; those of the tree's nodes stay while
        there is room, as an answer's do.
        """
        from mallee.client.searches.remote import at_gateway, policy_of

        policy = policy_of(policy)
        asked: dict[str, Any] = {"score": score, "seed": seed, "budget": budget, "ends": ends}
        if at_gateway(where):
            begin = {"prompt": prompt, "messages": messages}
            asked["params"] = {"cache_salt": cache_salt, **params}
            return self._search(policy, begin, **asked)
        begun = self.prefill(
            prompt,
            messages=messages,
            add_generation_prompt=True,
            cache_salt=cache_salt,
            **calls.terms_of(params),
        )
        with begun as capsule:
            return capsule.search(policy, **asked, **params)

    def _search(
        self, policy: "Policy", begin: Mapping[str, Any], *, params: Mapping[str, Any], **asked: Any
    ) -> "SearchResult":
        """The result of a search that the gateway runs."""
        from mallee.client.searches.remote import read_search, search_call

        call = search_call(policy, begin, params=calls.nested(self._params(params)), **asked)
        response, url, parser = (self._begun(call), self.base_url + call.path, SseParser())
        try:
            with failing_as(StreamBroken, url):
                for chunk in response.iter_raw():
                    if (found := read_search(parser.feed(chunk), url)) is not None:
                        return found
        finally:
            response.close()
        raise StreamBroken(url)

    @abstractmethod
    def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        content: Iterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        limit_s: float | None = None,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """The answer; a body that is read but once (`content`) is never sent again."""

    def _send(
        self, call: Call, *, limit_s: float | None = None, max_retries: int | None = None
    ) -> Any:
        response = self._request(call.keyed(), limit_s=limit_s, max_retries=max_retries)
        raw, headers = (response.content, response.headers)
        return read_answer(response.status_code, raw, self.base_url, headers)

    def _begun(self, call: Call, limit_s: float | None = None) -> "httpx.Response":
        """A stream, once the server has accepted the call. Raises the server's error, StreamBroken."""
        response = self._request(call, stream=True, limit_s=limit_s)
        if response.status_code >= 400:
            url = self.base_url + call.path
            try:
                with failing_as(StreamBroken, url):
                    raw = response.read()
            finally:
                response.close()
            read_answer(response.status_code, raw, url, response.headers)
        return response

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, with those that all requests of this client have."""
        return {"model": self.model, **params}

    def _open(self, call: Call) -> "Branches":
        return Branches(self, call).__enter__()

    def _capsule(self, call: Call, *, is_open: bool) -> "Capsule":
        return self._made(call, is_open=is_open)

    def _made(self, call: Call, *, is_open: bool) -> "Capsule":
        data = read_as(self._send(call), CapsuleData)
        return Capsule(self, data, is_open=is_open, cache_salt=call.cache_salt)

    def _fork(self, capsule: str, branches: calls.Forks, params: Mapping[str, Any]) -> "Branches":
        return self._open(calls.fork(capsule, branches, self._params(params)))


@spelled
class Mallee(Connected["httpx.Client"], Asking):
    """A client of one service, and a context manager.

    The asynchronous one is for one event loop, the other for any number of threads; each stream is for one.
    `model` goes with every request that names none. `timeout` bounds every wait for bytes: a server
    that sends nothing for so many seconds ends the call with Timeout. A request that
    is refused with 429 or 503 and a time is sent again after it, up to `max_retries` times. `http_client` has
    proxies and certificates of yours; its owner closes it. `session`: of requests that name none, so that the
    web page shows them as one tree; True makes up a name.
    Raises InvalidParameter for a `base_url` without http:// or https://, and for a client of another kind;
    ConfigError for a proxy of the environment that can't be used. Loopback is reached without one.
    """

    @staticmethod
    def _kind() -> "type[httpx.Client]":
        import httpx

        return httpx.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return super()._params({"session": self.session_name, **params})

    def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
        if self._is_owner:
            self._http.close()

    def health(self) -> dict[str, Any]:
        """The service's own account of itself, also when it is unavailable."""
        response = self._request(calls.HEALTH, max_retries=0)
        return read_health(response.status_code, response.content, self.base_url)

    def models(self) -> list[str]:
        """Names of the models served."""
        return [entry["id"] for entry in self._send(calls.MODELS)["data"]]

    def capsules(
        self,
        *,
        after: str | None = None,
        limit: int = calls.MAX_PAGE,
        cache_salt: str | None = None,
        **wanted: Unpack[calls.Wanted],
    ) -> "Iterator[Capsule]":
        """The caller's capsules that are `wanted`, by id, those after `after`: `limit` of them a request."""

        def asked(after: str | None) -> Call:
            return calls.of_capsules("GET", wanted, cache_salt, limit=limit, after=after)

        for body in self._pages(asked, after):
            yield Capsule(self, read_as(body, CapsuleData), is_open=False, cache_salt=cache_salt)

    def count_capsules(
        self, *, cache_salt: str | None = None, **wanted: Unpack[calls.Wanted]
    ) -> CapsuleCount:
        """The number of the caller's capsules that are `wanted`, and of their tokens."""
        call = calls.of_capsules("GET", wanted, cache_salt, "/count")
        return read_as(self._send(call), CapsuleCount)

    def delete_capsules(
        self, *, all: bool = False, cache_salt: str | None = None, **wanted: Unpack[calls.Wanted]
    ) -> int:
        """Delete the caller's capsules that are `wanted`, or with `all` every one; returns how many.

        Raises the first error, with their number, after the others were deleted: call it again. It is
        not sent again by itself: a second answer would not count those that the first had deleted.
        """
        call = calls.of_capsules("DELETE", wanted, cache_salt, all=all or None)
        return int(self._send(call, max_retries=0)["deleted"])

    def sessions(
        self,
        *,
        after: str | None = None,
        limit: int = calls.MAX_PAGE,
        cache_salt: str | None = None,
    ) -> Iterator[SessionData]:
        """The caller's sessions by name, those after `after`: `limit` of them a request."""
        for body in self._pages(partial(sessions.list_sessions, limit, cache_salt), after):
            yield read_as(body, SessionData)

    def _pages(self, asked: Callable[[str | None], Call], after: str | None) -> Iterator[Any]:
        """The entries of all pages of a list; each page is asked for when the one before has been read."""
        has_more = True
        while has_more:
            page = self._send(asked(after))
            yield from page["data"]
            after, has_more = (page["last_id"], page["has_more"])

    def session(self, name: str | None = None, *, cache_salt: str | None = None) -> "Session":
        """A session by name, or one with a name that no other has. Nothing is sent yet."""
        return Session(self, sessions.made_up() if name is None else name, cache_salt)

    def request(self, request: str, *, cache_salt: str | None = None) -> RequestLife:
        """The course of a request, while it runs and afterwards: docs/api/requests.md. Raises NotFound."""
        call = Call("GET", f"/v1/requests/{calls.quoted(request)}", cache_salt=cache_salt)
        return read_as(self._send(call), RequestLife)

    def import_capsule(
        self,
        source: files.File,
        *,
        cache_salt: str | None = None,
        progress: files.Progress | None = None,
        **params: Unpack[calls.Importing],
    ) -> "Capsule":
        """A capsule from the file of an export, by path or open, of this model.

        Raises IncompatibleCapsule, CorruptExport; then nothing of it is kept.
        """
        call = calls.import_capsule({"model": self.model, **params}, cache_salt)
        return self._imported(call, source, progress)

    def _imported(
        self, call: Call, source: files.File, progress: files.Progress | None
    ) -> "Capsule":
        with files.opened(source) as file:
            total = files.length(file)
            content, headers = (
                _pieces(file, files.Counted(total, progress)),
                files.file_headers(total),
            )
            response = self._request(call, content=content, headers=headers)
        raw, url = (response.content, self.base_url)
        body = read_answer(response.status_code, raw, url, response.headers)
        data = read_as(body, CapsuleData)
        return Capsule(self, data, is_open=False, cache_salt=call.cache_salt)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The decoded answer to a call that has no method here, as `post("/tokenize", {"prompt": text})`."""
        return self._send(Call("POST", path, {**body}))

    def workers(self) -> list[Worker]:
        """The workers, as the gateway that answers sees them."""
        return read_as(self._send(calls.WORKERS), WorkerList).data

    def drain_worker(self, worker: str) -> None:
        """Have a worker take nothing new, finish or hand over what it has, and leave. Raises NotFound."""
        self._send(Call("POST", f"{calls.WORKERS.path}/{calls.quoted(worker)}/drain"))

    def explain(
        self, request: str | None = None, *, limit: int | None = None, candidates: int = 16
    ) -> Decisions:
        """The last decisions of the router, youngest first, or those of a request, and its course.

        Each has so many `candidates`, the cheapest workers. Raises NotFound.
        """
        return read_as(self._send(calls.explain(request, limit, candidates)), Decisions)

    def metrics(self) -> str:
        """The gateway's metrics, as Prometheus reads them."""
        response = self._request(calls.METRICS)
        if response.status_code >= 400:
            read_answer(response.status_code, response.content, self.base_url, response.headers)
        return response.text

    def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        content: Iterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        limit_s: float | None = None,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """The answer; a body that is read but once (`content`) is never sent again."""
        from time import sleep

        most = self.max_retries if max_retries is None else max_retries
        request = self._http.build_request(
            call.method,
            self.base_url + call.path,
            content=call.content() if content is None else content,
            headers={**self._headers, **call.headers, **headers},
            timeout=self.timeout if limit_s is None else limit_s,
        )
        for num_left in range(most if content is None else 0, -1, -1):
            try:
                with failing_as(ConnectionFailed, self.base_url):
                    response = self._http.send(request, stream=stream)
                    is_refused = num_left and response.status_code in (429, 503)
                    raw = response.read() if is_refused else b""
            except ConnectionFailed as error:
                if not (num_left and call.may_repeat and was_cut(error)):
                    raise
                sleep(CUT_WAIT_S)
                continue
            wait_s = retry_after_s(response.headers, response.status_code, raw)
            if not num_left or wait_s is None:
                break
            sleep(wait_s)
        if ignored := response.headers.get("warnings"):
            warnings.warn(ignored, stacklevel=2)
        return response


class Session(Asking):
    """One session of a client, by its name `id`: all requests that are made through it name it.

    `root`: the capsule that it began with, if it is a fork of another session. `cache_salt` is that of
    its requests, where they give no other. As a context manager it is closed at the block's end, come
    what may.
    """

    def __init__(
        self, client: Mallee, name: str, cache_salt: str | None, root: str | None = None
    ) -> None:
        self.base_url, self.model = (client.base_url, client.model)
        self.max_retries = client.max_retries
        self.id = name
        self.cache_salt = cache_salt
        self.root = root
        self._client = client

    def capsule(self, capsule: str, *, cache_salt: str | None = None) -> "Capsule":
        """A capsule by id, whose forks belong to this session. Raises UnknownCapsule."""
        salt = self.cache_salt if cache_salt is None else cache_salt
        return super().capsule(capsule, cache_salt=salt)

    def show(self) -> sessions.SessionTree:
        """Its tree of capsules. Raises NotFound while it has none."""
        return read_as(
            self._send(sessions.show_session(self.id, self.cache_salt)), sessions.SessionTree
        )

    def give_budget(self, budget: calls.Budget, *, parent: str | None = None) -> BoundSession:
        """Bound all that is asked in this session and below it, from now on; it may be new, below `parent`.

        Given again, it changes the limits. Raises InvalidParameter for more than is left above, BudgetSpent.
        """
        call = sessions.bound_session(self.id, budget, parent, self.cache_salt)
        return read_as(self._send(call), BoundSession)

    def fork(
        self,
        new: str | None = None,
        *,
        capsule: str | None = None,
        budget: calls.Budget | None = None,
    ) -> "Session":
        """A session `new`, or of a made-up name, that begins with this one's newest capsule, or `capsule`.

        That is its `root`, from which requests go on. `budget` is reserved of what is left here. Raises
        NotFound, InvalidParameter, BudgetSpent.
        """
        call = sessions.fork_session(self.id, new, capsule, self.cache_salt, budget=budget)
        made = read_as(self._send(call, max_retries=0), SessionFork)
        return Session(self._client, made.id, self.cache_salt, made.capsule)

    def close(self) -> SessionClosed:
        """Release its capsules, end its requests and forget it. Raises NotFound."""
        call = sessions.close_session(self.id, self.cache_salt)
        return read_as(self._send(call, max_retries=0), SessionClosed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(*((NotFound,) if kind is None else (MalleeError, RuntimeError))):
            self.close()

    def _request(self, call: Call, **more: Any) -> "httpx.Response":
        return self._client._request(call, **more)

    def _params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        salt = params.get("cache_salt")
        salt = self.cache_salt if salt is None else salt
        return super()._params({"session": self.id, **params, "cache_salt": salt})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, root={self.root!r})"


@spelled
class Forking(ABC):
    """A state that branches go on from: a capsule, or the end of a branch."""

    __slots__ = ()
    is_open: bool = False

    @abstractmethod
    def _origin(self) -> "tuple[Asking, str, str | None]":
        """The client, the capsule and its salt. Raises NoCapsule."""

    def fork(
        self,
        branches: calls.Forks | None = None,
        *,
        n: int | None = None,
        messages: calls.Messages | Sequence[calls.Messages] | None = None,
        suffixes: Sequence[calls.Suffix] | None = None,
        at: int | None = None,
        **params: Unpack[calls.Sampling],
    ) -> "Branches":
        """Continue once per suffix (text, token ids, or {"messages": [...]}), or n times.

        `fork("and")` is one branch: a lone text or object is one suffix. Token ids stand in a list of
        suffixes, as in `fork([[1, 2, 3]])`. `messages`: those of one branch, or a list of such for several.
        `n` beside suffixes or messages: so many branches of each, in a row.

        With `at` the branches continue the first so many tokens. {"type": "inherit"} as `response_format`
        goes on inside the object in which the branch was cut.
        Raises NoCapsule, and InvalidParameter for what is none of these, and for forks of an open
        conversation that add no message.
        """
        forks = calls.forks(branches, n, messages, suffixes)
        if isinstance(forks, int):
            self._need_closed("n", forks)
        client, capsule, salt = self._origin()
        return client._fork(capsule, forks, {"at": at, "cache_salt": salt, **params})

    @overload
    def ask(self, questions: str, **params: Unpack[calls.Sampling]) -> "Branch": ...

    @overload
    def ask(
        self, questions: list[str] | tuple[str, ...], **params: Unpack[calls.Sampling]
    ) -> "list[Branch]": ...

    def ask(
        self, questions: str | list[str] | tuple[str, ...], **params: Unpack[calls.Sampling]
    ) -> "Branch | list[Branch]":
        """The finished answer to a user's message that goes on in the conversation; of several a list."""
        asked = [questions] if isinstance(questions, str) else questions
        messages = [[{"role": "user", "content": each}] for each in asked]
        branches = self.fork(messages=messages, **params).wait()
        return branches[0] if isinstance(questions, str) else branches

    def restore(self, **params: Unpack[calls.Going]) -> "Branches":
        """Go on as the very branch that the state was taken from.

        Its sampling, stream of draws, limits, penalties and form go on; with `at` from an earlier token of
        its answer, with `max_tokens` for so many tokens more. Raises NoCapsule, and InvalidParameter for a
        prompt's capsule.
        """
        client, capsule, salt = self._origin()
        return client._open(calls.restore(capsule, client._params({"cache_salt": salt, **params})))

    def pin(self, *, ttl_s: float | None = None) -> "Capsule":
        """Keep it until it is deleted or unused for `ttl_s`: of a branch the capsule where it ended.

        Raises NoCapsule, CapsulesFull.
        """
        return self._changed("pin", is_open=self.is_open, ttl_s=ttl_s)

    def _changed(self, verb: str, *, is_open: bool, **params: Any) -> "Capsule":
        client, capsule, salt = self._origin()
        call = calls.change(capsule, verb, {**params, "cache_salt": salt})
        return client._capsule(call, is_open=is_open)

    def _need_closed(self, param: str, value: object) -> None:
        if self.is_open:
            remedy = "the conversation was left open; ask(...) it, fork it with messages=[...], or prefill it with add_generation_prompt=True"
            raise InvalidParameter(param, value, remedy)


@spelled
class Capsule(CapsuleState, Forking):
    """A prompt's state on its worker, or a branch's.

    As a context manager it is kept inside the block, and deleted at its end, come what may. `is_open`: its
    conversation ends after its last message, not where an answer begins.
    """

    _client: Asking

    def wait(self, *, timeout: float = READY_S) -> Self:
        """Return once it is computed. Raises what its prefill failed by, Timeout after so many seconds."""
        from time import sleep

        for wait_s in ready_waits(self.id, timeout):
            sleep(wait_s)
            call = calls.of_capsule("GET", self.id, self._cache_salt)
            data = read_as(self._client._send(call), CapsuleData)
            if data.error:
                raise from_body({"error": msgspec.to_builtins(data.error)}, 200)
            self.worker, self.data = (data.worker, data)
            if data.status != "computing":
                break
        return self

    def _origin(self) -> "tuple[Asking, str, str | None]":
        return (self._client, self.id, self._cache_salt)

    def search(
        self,
        policy: "Policy | str",
        *,
        score: "Value | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        **params: Unpack[calls.Stepping],
    ) -> "SearchResult":
        """Search for the best text that goes on from here; see docs/sdk.md.

        `policy` may be the name of one, as "beam", with its defaults.
        `score`: a function of a text (from here on), a `Verifier`, "mean_logprob" or "sum_logprob". `ends`: a
        step with one of these texts ends an answer. One `seed` makes one tree. What `score` raises ends
        the search, and is raised here. `where="gateway"` runs the policy there, by one call, which no
        function can value. Raises InvalidParameter.
        """
        from mallee.client.searches.local import run
        from mallee.client.searches.remote import at_gateway, policy_of

        policy = policy_of(policy)
        self._need_closed("policy", policy)
        asked: dict[str, Any] = {"score": score, "seed": seed, "budget": budget, "ends": ends}
        asked["params"] = {"cache_salt": self._cache_salt, **params}
        if at_gateway(where):
            return self._client._search(policy, {"capsule": self.id}, **asked)
        return run(self._client._fork, self.id, policy, **asked)

    def text(self, start: int = 0) -> str:
        """Its text from token `start` on, special tokens as they are written. Raises NotFound."""
        salt = self._cache_salt
        call = calls.of_capsule("GET", self.id, salt, "/text", start=start or None)
        return str(self._client._send(call)["text"])

    def token_ids(self, start: int = 0) -> list[int]:
        """Its tokens from number `start` on. Raises NotFound."""
        salt, query = (self._cache_salt, {"start": start or None, "return_token_ids": True})
        call = calls.of_capsule("GET", self.id, salt, "/text", **query)
        return list(self._client._send(call)["token_ids"])

    def rewind(self, to: int, *, ttl_s: float | None = None) -> "Capsule":
        """A capsule of the first `to` tokens; this one stays as it is."""
        return self._changed("rewind", is_open=False, to=to, ttl_s=ttl_s)

    def unpin(self) -> "Capsule":
        """Keep it only while there is room."""
        call = calls.of_capsule("DELETE", self.id, self._cache_salt, "/pin")
        return self._client._capsule(call, is_open=self.is_open)

    def demote(self, tier: Literal["host", "disk"]) -> "Capsule":
        """Move it to host memory, or to disk; from there it outlives its worker.

        Returns once it is there. Raises InvalidParameter if the worker has no such tier, TierFull.
        """
        return self._changed("demote", is_open=self.is_open, tier=tier)

    def promote(self) -> "Capsule":
        """Bring it back to the device ahead of its next fork. Returns once it is there."""
        return self._changed("promote", is_open=self.is_open)

    def prune(self) -> list[str]:
        """Cancel all that went on from it, and forget the capsules that this left; returns their requests."""
        call = calls.change(self.id, "prune", {"cache_salt": self._cache_salt})
        return list(self._client._send(call)["requests"])

    def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        self._client._send(calls.of_capsule("DELETE", self.id, self._cache_salt))

    def export(self, target: files.File, *, progress: files.Progress | None = None) -> int:
        """Write it to a file, by path or open; returns the number of bytes.

        Another server with the same model goes on from it exactly: `import_capsule`. A path has its file
        only when all of it is there. Raises StreamBroken.
        """
        client = self._client
        call = calls.of_capsule("GET", self.id, self._cache_salt, "/export")
        response, url = (client._begun(call), client.base_url + call.path)
        counted = files.Counted(files.file_nbytes(response.headers), progress)
        try:
            with failing_as(StreamBroken, url), files.written(target) as file:
                for data in response.iter_raw():
                    file.write(data)
                    counted.add(len(data))
        finally:
            response.close()
        return counted.nbytes

    def __enter__(self) -> Self:
        """Pin it, if it isn't yet. Raises CapsulesFull, UnknownCapsule; then nothing is to be deleted."""
        if self.data.pinned is False:
            self.data = self.pin().data
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        call = calls.of_capsule("DELETE", self.id, self._cache_salt)
        with suppress(*((UnknownCapsule,) if kind is None else (MalleeError, RuntimeError))):
            self._client._send(call, limit_s=DELETE_TIMEOUT_S, max_retries=0)


def _pieces(file: BinaryIO, counted: files.Counted) -> Iterator[bytes]:
    """The bytes of `file` from its position on."""
    while data := file.read(files.PIECE_NBYTES):
        counted.add(len(data))
        yield data


@dataclass(slots=True, repr=False)
class Branch(BranchState, Forking):
    """One branch's answer so far, which can be forked where it ended, and captured while it runs."""

    client: Asking | None = field(default=None, compare=False)
    cache_salt: str | None = field(default=None, compare=False)

    def _origin(self) -> "tuple[Asking, str, str | None]":
        return (self._asking, self.need_capsule(), self.cache_salt)

    def capture(self, *, ttl_s: float | None = None) -> Capsule:
        """A capsule of the running branch at its next token; it goes on as if nothing had happened.

        Raises UnknownBranch if it is over; then `fork` and `restore` continue where it ended.
        """
        params = {"branch": self.index, "ttl_s": ttl_s, "cache_salt": self.cache_salt}
        call = calls.of_request(self.need_request(), "capsules", params)
        return self._asking._capsule(call, is_open=False)

    def inject(self, suffix: calls.Suffix, *, mode: calls.InjectMode = "append") -> int:
        """Have the running branch go on after `suffix` at its next token, as if it had drawn it.

        Returns the tokens of the answer before it, once it is there. With mode "replace" what waits to be
        injected is dropped. Raises UnknownBranch if the branch is over.
        """
        params = {"suffix": suffix, "mode": mode, "cache_salt": self.cache_salt}
        call = calls.of_request(self.need_request(), f"branches/{self.index}/inject", params)
        return int(self._asking._send(call)["at"])

    def prune(self) -> bool:
        """End the running branch alone; the others go on. False: it had ended. Raises UnknownRequest."""
        return self._among("prune")

    def prioritize(self, priority: int) -> bool:
        """Have the running branch go before those of its session with less, from the next step on.

        Returns whether it still ran. Raises UnknownRequest if none of its request does.
        """
        return self._among("prioritize", priority=priority)

    def _among(self, verb: str, **more: Any) -> bool:
        """Change this branch alone; whether it was still running."""
        params = {"branches": [self.index], "cache_salt": self.cache_salt, **more}
        call = calls.of_request(self.need_request(), verb, params)
        return self.index in self._asking._send(call)["branches"]

    @property
    def _asking(self) -> Asking:
        assert self.client is not None
        return self.client


class Branches(Listed["Branch"]):
    """Branches of one request. Iterated, or awaited, they are the list of them finished, as `wait` gives it.

    `events` gives what arrives as it does, and `branches` maps index to the branch so far. Closing early (or
    leaving a `with` block) ends the branches that still run. Asynchronously the request is sent when first
    awaited, iterated or entered.
    """

    def __init__(self, client: Asking, call: Call) -> None:
        super().__init__(client.base_url + call.path, call)
        self._client = client
        self._response: httpx.Response | None = None
        self._events: Generator[BranchEvent, None, None] | None = None

    def _branch(self, index: int) -> Branch:
        return Branch(index, client=self._client, cache_salt=self._call.cache_salt)

    def events(self) -> Generator[BranchEvent, None, None]:
        """New text, reasoning and calls of the branches as they arrive, and their ends."""
        reading = self._reading()
        while (event := next(reading, None)) is not None:
            yield event

    def wait(
        self, *, score: Score | None = None, below: float = 0.0, timeout: float | None = None
    ) -> list[Branch]:
        """All branches, finished, by index. Raises what the stream raises.

        `score(branch)`: a critic, in a thread or task beside the reading, again and again with what is there
        of a branch. One that it gives less than `below` is pruned; the others go on undisturbed. What it
        raises ends all that still runs, and is raised here. Asynchronously it may be a coroutine function.
        `timeout`: after so many seconds the branches that still run end, and Timeout is raised. A client that
        blocks has waited for the first token already, as long as its own `timeout` allows.
        """
        if score is None:
            for _ in self._timely(timeout):
                pass
        else:
            with self, Critic(self.branches, score, below) as critic:
                for event in self._timely(timeout):
                    critic.see(event)
        if self._error is not None:
            raise self._error
        return [self.branches[index] for index in sorted(self.branches)]

    def close(self) -> None:
        """End what still runs."""
        self._reading().close()
        self._drop()

    def _timely(self, limit_s: float | None) -> Iterator[BranchEvent]:
        """The events. Raises Timeout if they last longer; silence is told after as long again at most."""
        if limit_s is None:
            for event in self.events():
                yield event
            return
        end = time.perf_counter() + limit_s
        limits = self._opened(limit_s).request.extensions["timeout"]
        limits["read"] = min(limit_s, limits["read"] or limit_s)
        for event in self.events():
            yield event
            if time.perf_counter() > end and (not self._reader.is_done):
                self.close()
                remedy = "raise wait's timeout; texts so far are in `branches`"
                self._error = Timeout(f"{self!r} had not ended", limit_s, remedy)
                raise self._error

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reading(self) -> Generator[BranchEvent, None, None]:
        """The one reader of the stream. It holds no branches, so that these end where they are dropped."""
        if self._events is None:
            self._events = Branches._read(weakref.proxy(self))
        return self._events

    def _read(self) -> Generator[BranchEvent, None, None]:
        num_left = self._client.max_retries if self._call.may_repeat else 0
        response = None
        try:
            while not self._reader.is_done:
                response = self._opened()
                try:
                    with failing_as(StreamBroken, self._url):
                        for chunk in response.iter_raw():
                            yield from Branches._take(self, chunk)
                            if self._reader.is_done:
                                break
                        self._end()
                except StreamBroken as error:
                    if not (num_left and was_cut(error)):
                        raise
                    num_left -= 1
                    self._again()
        except MalleeError as error:
            self._error = error
            raise
        finally:
            if response is not None:
                response.close()

    def _opened(self, limit_s: float | None = None) -> "httpx.Response":
        if self._response is None:
            self._began = time.perf_counter()
            self._response = self._client._begun(self._call, limit_s)
        return self._response

    def _again(self) -> None:
        """Ask for the same answer again. Raises the server's error, StreamBroken if it is another answer."""
        from time import sleep

        self._drop()
        sleep(CUT_WAIT_S)
        self._response = self._client._begun(self._call)
        if self._num_read and self._response.headers.get("idempotent-replayed") != "true":
            self._drop()
            raise StreamBroken(self._url, "another gateway knows nothing of it")
        self._num_known = self._num_read

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
