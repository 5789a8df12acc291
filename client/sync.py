"""The synchronous client: sends, waits and closes around `base`. Its twin is `aio`."""

import time
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

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
    raise_refusal,
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
from mallee.client.critic import Critic, Score
from mallee.client.errors import ConnectionFailed, StreamBroken
from mallee.client.files import (
    Counted,
    File,
    Progress,
    file_headers,
    file_nbytes,
    length,
    opened,
    pieces,
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

if TYPE_CHECKING:  # httpx costs 100 ms to import: loaded by the first client, not by the import
    from os import PathLike

    import httpx
    import openai

    from mallee.client.graphs.blocking import GraphRun
    from mallee.client.graphs.builder import Graph
    from mallee.client.searches.local import LogprobScore, Value
    from mallee.client.searches.remote import ServiceUrl, Where
    from mallee.graphs.nodes import Handle
    from mallee.search.policy import Policy, SearchBudget
    from mallee.search.results import SearchResult
    from mallee.search.scores import Verifier


class Asking(BaseMallee["Branches", "Capsule"]):
    """Requests for answers and capsules, of a client or of one of its sessions."""

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **params: Unpack[Generation],
    ) -> "list[Branch]":
        """The finished answers to one prompt or conversation: one branch, or `n`.

        If the connection is cut, the rest of the same answer is fetched: nothing is computed twice.
        """
        call = calls.generate(prompt, messages, self._with_model(params))
        return self._open(call.keyed()).wait()

    def run(
        self,
        graph: "Graph",
        *,
        outputs: "Sequence[Handle]" = (),
        max_running: int | None = None,
        journal: "str | PathLike[str] | None" = None,
        cache_salt: str | None = None,
        **terms: Unpack[Terms],
    ) -> "GraphRun":
        """Run a graph. `outputs`: by default the nodes that no other takes from.

        `journal`: a file that gets what is done, from which the same graph goes on; one run at a time has it.
        A budget in `mallee` bounds all of its nodes together. Raises InvalidGraph for one that can't run.
        """
        from mallee.client.graphs.blocking import GraphRun

        return GraphRun(
            self,
            graph,
            outputs,
            max_running=max_running,
            journal=journal,
            params=self._with_model({"cache_salt": cache_salt, **terms}),
        )

    def search(
        self,
        policy: "Policy",
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        score: "Value | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        cache_salt: str | None = None,
        **params: Unpack[Stepping],
    ) -> "SearchResult":
        """Compute a prompt or conversation once and search for the best text that goes on from it.

        See `Capsule.search`. Its capsule is deleted at the end; those of the tree's nodes stay while there
        is room, as an answer's do.
        """
        from mallee.client.searches.remote import at_gateway

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
        from mallee.client.searches.remote import run, search_call

        call = search_call(policy, begin, params=self._with_model(params), **asked)
        return run(call, self.base_url, partial(self._request, stream=True))

    @abstractmethod
    def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        content: Iterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """The answer; a body that is read but once (`content`) is never sent again."""

    def _send(
        self, call: Call, *, timeout_s: float | None = None, max_retries: int | None = None
    ) -> Any:
        response = self._request(call.keyed(), timeout_s=timeout_s, max_retries=max_retries)
        raw, headers = response.content, response.headers
        return read_answer(response.status_code, raw, self.base_url, headers)

    def _open(self, call: Call) -> "Branches":
        return Branches(self, call)

    def _capsule(self, call: Call, *, is_open: bool) -> "Capsule":
        data = read_capsule(self._send(call))
        return Capsule(self, data, is_open=is_open, cache_salt=call.cache_salt)


class Mallee(Asking):
    """A client of one service, for any number of threads; each stream is for one. A context manager.

    `model` goes with every request that names none. `timeout_s` bounds every wait for bytes: a server
    that sends nothing for so long ends the call with ConnectionFailed or StreamBroken. A request that
    is refused with 429 or 503 and a time is sent again after it, up to `max_retries` times.
    Raises InvalidParameter for a `base_url` without http:// or https://.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        import httpx

        super().__init__(base_url, api_key, model, max_retries)
        self._transport = transport
        self._http = httpx.Client(
            base_url=self.base_url, headers=self._headers, timeout=timeout_s, transport=transport
        )

    @classmethod
    def from_openai(cls, client: "openai.OpenAI", *, model: str | None = None) -> "Mallee":
        """A client of the service that OpenAI's client speaks to, over that one's connections.

        Its key, time limit and retries are that client's, too. Raises InvalidParameter for another kind.
        """
        from mallee.client.transports.beside_openai import SyncTransport, settings

        given = settings(client, is_async=False)
        return cls(**given, model=model, transport=SyncTransport(client._client))

    def __enter__(self) -> "Mallee":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Capsules stay where they are."""
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
        limit: int = 20,
        cache_salt: str | None = None,
        **wanted: Unpack[Wanted],
    ) -> list[CapsuleData]:
        """The caller's capsules that are `wanted`, by id: at most `limit` of those after `after`."""
        page = self._send(calls.list_capsules(wanted, after, limit, cache_salt))
        return [read_capsule(body) for body in page["data"]]

    def count_capsules(
        self, *, cache_salt: str | None = None, **wanted: Unpack[Wanted]
    ) -> CapsuleCount:
        """The number of the caller's capsules that are `wanted`, and of their tokens."""
        return read_count(self._send(calls.count_capsules(wanted, cache_salt)))

    def delete_capsules(
        self, *, all: bool = False, cache_salt: str | None = None, **wanted: Unpack[Wanted]
    ) -> int:
        """Delete the caller's capsules that are `wanted`, or with `all` every one; returns how many.

        Raises the first error, with their number, after the others were deleted: call it again. It is
        not sent again by itself: a second answer would not count those that the first had deleted.
        """
        call = calls.delete_capsules(wanted, is_all=all, cache_salt=cache_salt)
        return int((self._send(call, max_retries=0))["deleted"])

    def sessions(
        self, *, after: str | None = None, limit: int = 20, cache_salt: str | None = None
    ) -> list[SessionData]:
        """The caller's sessions by name: at most `limit` of those after `after`."""
        page = self._send(list_sessions(after, limit, cache_salt))
        return [read_session(body, SessionData) for body in page["data"]]

    def session(self, name: str | None = None, *, cache_salt: str | None = None) -> "Session":
        """A session by name, or one with a name that no other has. Nothing is sent yet."""
        return Session(self, made_up() if name is None else name, cache_salt)

    def request(self, request: str, *, cache_salt: str | None = None) -> dict[str, Any]:
        """The course of a request, while it runs and afterwards: docs/api/requests.md. Raises NotFound."""
        found: dict[str, Any] = self._send(calls.show_request(request, cache_salt))
        return found

    def import_capsule(
        self,
        source: File,
        *,
        cache_salt: str | None = None,
        progress: Progress | None = None,
        **params: Unpack[Importing],
    ) -> "Capsule":
        """A capsule from the file of an export, by path or open, of this model.

        Raises IncompatibleCapsule, CorruptExport; then nothing of it is kept.
        """
        call = calls.import_capsule({"model": self.model, **params}, cache_salt)
        with opened(source) as file:
            total = length(file)
            counted, headers = Counted(total, progress), file_headers(total)
            response = self._request(call, content=pieces(file, counted), headers=headers)
        raw, url = response.content, self.base_url
        data = read_capsule(read_answer(response.status_code, raw, url, response.headers))
        return Capsule(self, data, is_open=False, cache_salt=cache_salt)

    def _request(
        self,
        call: Call,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        content: Iterator[bytes] | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        max_retries: int | None = None,
    ) -> "httpx.Response":
        """The answer; a body that is read but once (`content`) is never sent again."""
        most = self.max_retries if max_retries is None else max_retries
        request = self._http.build_request(
            *(call.method, call.path),
            content=call.content() if content is None else content,
            headers={**call.headers, **headers},
        )
        if timeout_s is not None:
            request.extensions["timeout"] = dict.fromkeys(request.extensions["timeout"], timeout_s)
        for num_left in range(most if content is None else 0, -1, -1):
            try:
                with failing_as(ConnectionFailed, self.base_url):
                    response = self._http.send(request, stream=stream)
                    is_refused = num_left and response.status_code in (429, 503)
                    raw = response.read() if is_refused else b""
            except ConnectionFailed as error:
                if not (num_left and call.may_repeat and was_cut(error)):
                    raise
                time.sleep(CUT_WAIT_S)
                continue
            wait_s = retry_after_s(response.headers, response.status_code, raw)
            if not num_left or wait_s is None:
                break
            time.sleep(wait_s)
        return response


class Session(BaseSession["Branches", "Capsule"], Asking):
    """One session of a client, by its name `id`: all requests that are made through it name it.

    `root`: the capsule that it began with, if it is a fork of another session. `cache_salt` is that of
    its requests, where they give no other. As a context manager it is closed at the block's end, come
    what may.
    """

    def __init__(
        self, client: Mallee, name: str, cache_salt: str | None, root: str | None = None
    ) -> None:
        super().__init__(client, name, cache_salt, root)
        self._client = client

    def show(self) -> SessionTree:
        """Its tree of capsules. Raises NotFound while it has none."""
        return read_session(self._send(show_session(self.id, self.cache_salt)), SessionTree)

    def give_budget(self, budget: Budget, *, parent: str | None = None) -> BoundSession:
        """Bound all that is asked in this session and below it, from now on; it may be new, below `parent`.

        Given again, it changes the limits. Raises InvalidParameter for more than is left above, BudgetSpent.
        """
        call = bound_session(self.id, budget, parent, self.cache_salt)
        return read_session(self._send(call), BoundSession)

    def fork(
        self,
        new: str | None = None,
        *,
        capsule: str | None = None,
        budget: Budget | None = None,
    ) -> "Session":
        """A session `new`, or of a made-up name, that begins with this one's newest capsule, or `capsule`.

        That is its `root`, from which requests go on. `budget` is reserved of what is left here. Raises
        NotFound, InvalidParameter, BudgetSpent.
        """
        call = fork_session(self.id, new, capsule, self.cache_salt, budget=budget)
        made = read_session(self._send(call, max_retries=0), SessionFork)
        return Session(self._client, made.id, self.cache_salt, made.capsule)

    def close(self) -> ClosedSession:
        """Release its capsules, end its requests and forget it. Raises NotFound."""
        call = close_session(self.id, self.cache_salt)
        return read_session(self._send(call, max_retries=0), ClosedSession)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # As a capsule's end; a session that nothing was asked in is unknown.
        with suppress(*((NotFound,) if kind is None else (MalleeError, RuntimeError))):
            self.close()

    def _request(self, call: Call, **more: Any) -> "httpx.Response":
        return self._client._request(call, **more)


class Capsule(BaseCapsule["Branches", "Capsule"]):
    """A prompt's state on its worker, or a branch's.

    As a context manager it is kept inside the block, and deleted at its end, come what may.
    """

    _client: Asking

    def wait(self, *, timeout_s: float = READY_S) -> Self:
        """Return once it is computed. Raises what its prefill failed by, Unavailable after `timeout_s`."""
        for wait_s in ready_waits(self.id, timeout_s):
            time.sleep(wait_s)
            if self._hear(read_capsule(self._client._send(self._shown()))):
                break
        return self

    def search(
        self,
        policy: "Policy",
        *,
        score: "Value | Verifier | LogprobScore | ServiceUrl" = "mean_logprob",
        seed: int = 0,
        budget: "SearchBudget | None" = None,
        ends: Sequence[str] = (),
        where: "Where" = "client",
        **params: Unpack[Stepping],
    ) -> "SearchResult":
        """Search for the best text that goes on from here; see docs/sdk.md.

        `score`: a function of a text (from here on), a `Verifier`, "mean_logprob" or "sum_logprob". `ends`: a
        step with one of these texts ends an answer. One `seed` makes one tree. What `score` raises ends
        the search, and is raised here. `where="gateway"` runs the policy there, by one call, which no
        function can value. Raises InvalidParameter.
        """
        from mallee.client.searches.local import run
        from mallee.client.searches.remote import at_gateway

        self._need_closed("policy", policy)
        asked: dict[str, Any] = {"score": score, "seed": seed, "budget": budget, "ends": ends}
        asked["params"] = {"cache_salt": self._cache_salt, **params}
        if at_gateway(where):
            return self._client._search(policy, {"capsule": self.id}, **asked)
        return run(self._client._fork, self.id, policy, **asked)

    def text(self, start: int = 0) -> str:
        """Its text from token `start` on, special tokens as they are written. Raises NotFound."""
        answer = self._client._send(calls.capsule_text(self.id, start, self._cache_salt))
        return str(answer["text"])

    def prune(self) -> list[str]:
        """Cancel all that went on from it, and forget the capsules that this left; returns their requests."""
        answer = self._client._send(calls.prune_below(self.id, self._cache_salt))
        return list(answer["requests"])

    def delete(self) -> None:
        """Forget the state. Raises UnknownCapsule if it is gone already."""
        self._client._send(calls.delete_capsule(self.id, self._cache_salt))

    def export(self, target: File, *, progress: Progress | None = None) -> int:
        """Write it to a file, by path or open; returns the number of bytes.

        Another server with the same model goes on from it exactly: `import_capsule`. A path has its file
        only when all of it is there. Raises StreamBroken.
        """
        client, call = self._client, calls.export(self.id, self._cache_salt)
        response = client._request(call, stream=True)
        try:
            with failing_as(StreamBroken, client.base_url + call.path):
                if response.status_code >= 400:
                    raw, headers = response.read(), response.headers
                    read_answer(response.status_code, raw, client.base_url, headers)
                counted = Counted(file_nbytes(response.headers), progress)
                with written(target) as file:
                    for data in response.iter_raw():
                        file.write(data)
                        counted.add(len(data))
        finally:
            response.close()
        return counted.nbytes

    def __enter__(self) -> "Capsule":
        """Pin it, if it isn't yet. Raises CapsulesFull, UnknownCapsule; then nothing is to be deleted."""
        if self.data.pinned is False:
            self.data = self.pin().data
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        call = calls.delete_capsule(self.id, self._cache_salt)
        # An error of the block must not be hidden by one of its clean-up; a closed client's is RuntimeError.
        with suppress(*((UnknownCapsule,) if kind is None else (MalleeError, RuntimeError))):
            self._client._send(call, timeout_s=DELETE_TIMEOUT_S, max_retries=0)


class Branch(BaseBranch["Branches", Capsule]):
    """One branch's answer so far, which can be forked where it ended."""

    __slots__ = ()

    def inject(self, suffix: Suffix, *, mode: InjectMode = "append") -> int:
        """Have the running branch go on after `suffix` at its next token, as if it had drawn it.

        Returns the tokens of the answer before it, once it is there. With mode "replace" what waits to be
        injected is dropped. Raises UnknownBranch if the branch is over.
        """
        return int(self._inject(suffix, mode)["at"])

    def prune(self) -> bool:
        """End the running branch alone; the others go on. False: it had ended. Raises UnknownRequest."""
        return self.index in self._prune()["branches"]

    def prioritize(self, priority: int) -> bool:
        """Have the running branch go before those of its session with less, from the next step on.

        Returns whether it still ran. Raises UnknownRequest if none of its request does.
        """
        return self.index in self._prioritize(priority)["branches"]


class Branches(BaseBranches[Branch]):
    """Branches of one request while they stream. Iterate for events as they arrive, or `wait`.

    `branches` maps index to the branch so far. Closing early (or leaving a `with` block) ends the
    branches that still run.
    """

    def __init__(self, client: Asking, call: Call) -> None:
        super().__init__(client.base_url + call.path)
        self._client = client
        self._call = call
        self._begin()
        self._response = client._request(call, stream=True)
        if self._response.status_code >= 400:
            raise_refusal(self._response, self._url)
        self._events = self._read()

    def __iter__(self) -> Iterator[BranchEvent]:
        return self._events

    def wait(self, *, score: Score | None = None, below: float = 0.0) -> list[Branch]:
        """All branches, finished, by index. Raises what the stream raises.

        `score(branch)`: a critic, in a thread beside the reading, again and again with what is there of
        a branch. One that it gives less than `below` is pruned; the others go on undisturbed. What it
        raises ends all that still runs, and is raised here.
        """
        if score is None:
            for _ in self._events:
                pass
            return self._finished()
        with self, Critic(self.branches, score, below) as critic:
            for event in self._events:
                critic.see(event)
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
        return Branch(index, client=self._client, cache_salt=self._call.cache_salt)

    def _read(self) -> Generator[BranchEvent, None, None]:
        num_left = self._client.max_retries if self._call.may_repeat else 0
        try:
            while not self._reader.is_done:
                try:
                    with failing_as(StreamBroken, self._url):
                        for chunk in self._response.iter_raw():
                            yield from self._take(chunk)
                            if self._reader.is_done:
                                break
                        self._end()
                except StreamBroken as error:
                    if not (num_left and was_cut(error)):
                        raise
                    num_left -= 1
                    self._again()
        finally:
            self._response.close()

    def _again(self) -> None:
        """Ask for the same answer again. Raises the server's error, StreamBroken."""
        self._response.close()
        time.sleep(CUT_WAIT_S)
        self._response = self._client._request(self._call, stream=True)
        if self._response.status_code >= 400:
            raise_refusal(self._response, self._url)
        self._resume(self._response.headers)
