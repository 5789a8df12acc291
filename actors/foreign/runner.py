"""A `Runner` over vLLM's AsyncLLM: each branch of a request is a request of the engine, on token ids.

The engine shares KV by what is in its blocks, once these are computed. So of branches that begin with the
same blocks, which it does not hold, one goes first (`Flights`); the others follow when it has drawn a token.
A capsule is a text: its forks compute what the engine's cache has lost of it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import numpy as np

from mallee.actors.foreign.asking import (
    Output,
    finish_of,
    is_exact,
    logprobs_of,
    prompt_of,
    sampling_fields,
    stop_ids,
)
from mallee.actors.foreign.texts import CapsuleText, CapsuleTexts
from mallee.actors.front.pods.event_order import Arrival
from mallee.actors.front.pods.kv_events import PodContents
from mallee.actors.hosting.worker import STOP_S, Capacity, Identity, Results
from mallee.protocol.capabilities import needs, refusal
from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsulesFull,
    ContextLengthExceeded,
    InternalError,
    InvalidParameter,
    MalleeError,
    UnknownBranch,
    UnknownCapsule,
)
from mallee.protocol.events import (
    CapsuleReleased,
    CapsuleStored,
    Cleared,
    Event,
    EventBatch,
    Load,
    Snapshot,
    pack_hashes,
)
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens, block_hashes
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id, owner_of
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Capture,
    Command,
    Cut,
    Delete,
    EndToken,
    Fork,
    Frame,
    Generate,
    Grammar,
    Inspect,
    Kept,
    Limits,
    Pin,
    Prefill,
    Prioritize,
    Release,
    Rewind,
    Sampling,
    TokenLogprobs,
    Update,
    unpack_tokens,
)
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids, stack_of, told
from mallee.worker.records import StepResult

log = logging.getLogger(__name__)

MAX_BRANCHES = 4096  # of one request
_ONE_TOKEN = Limits(1, ignore_eos=True)  # of a prefill, which drops it


class AsyncEngine(Protocol):
    """The part of vLLM's `AsyncLLM` that a runner uses; `params` makes its `SamplingParams`."""

    @property
    def errored(self) -> bool:
        """Whether its core is dead."""
        ...

    def params(self, fields: Mapping[str, Any]) -> Any:
        """Raises ValueError for values that it does not take."""
        ...

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Output, None]:
        """Deltas of one answer. Its end, or cancellation, aborts what is left."""
        ...

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine's processes. Blocks."""
        ...


class TextLimits(NamedTuple):
    """Of the capsules of a worker."""

    max_left: int = 256
    max_kept_nbytes: int = 512 << 20


class _Branch:
    """One branch of a request, that runs or waits for others with its prompt."""

    __slots__ = (
        *("cached", "captures", "grammar", "index", "is_given", "job", "num_computed", "num_told"),
        *("prompt", "stream", "task", "tokens"),
    )

    def __init__(self, job: "_Job", index: int, prompt: Tokens, stream: int) -> None:
        self.job = job
        self.index = index
        self.prompt = prompt
        self.stream = stream  # of draws
        self.tokens: list[int] = []  # drawn here
        self.cached: int | None = None  # tokens of the prompt; None: it has drawn nothing
        self.num_computed = 0
        self.is_given = False  # to the engine
        self.captures: list[tuple[Capture, str]] = []
        self.task: asyncio.Task[None] | None = None

    @property
    def text(self) -> Tokens:
        """All of it, prompt and answer."""
        return np.concatenate((self.prompt, np.array(self.tokens, dtype="<u4")))


class _Job(NamedTuple):
    """A request for branches."""

    request: RequestId
    gateway: str
    command: Generate | Fork | Prefill
    salt: str
    sampling: Sampling
    limits: Limits
    branches: dict[int, _Branch]

    @property
    def grammar(self) -> Grammar | None:
        return None if isinstance(self.command, Prefill) else self.command.grammar

    @property
    def drawn(self) -> int:
        return self.command.drawn if isinstance(self.command, Generate) else 0

    @property
    def num_scores(self) -> int:
        """Likeliest tokens to tell in each place of the prompt; -1: none."""
        return self.command.prompt_logprobs if isinstance(self.command, Generate) else -1

    def capsule(self, index: int) -> CapsuleId:
        """The capsule that a branch leaves."""
        if isinstance(self.command, Prefill) and self.command.capsule:
            return CapsuleId(self.command.capsule)
        return capsule_id(self.request, index)


class Flights:
    """Blocks that are being computed for the first time, each by one branch."""

    def __init__(self, holds: Callable[[int], bool]) -> None:
        self._holds = holds
        self._flights: dict[int, asyncio.Future[bool]] = {}  # by block

    async def join(self, hashes: Sequence[int]) -> asyncio.Future[bool]:
        """Wait for the blocks of a prompt that others compute; begin a flight with those of its own."""
        had = 0
        while True:
            at = next((i for i in range(len(hashes), had, -1) if hashes[i - 1] in self._flights), 0)
            if not at:
                break
            # One that was given up has computed nothing: then another goes first.
            if await asyncio.shield(self._flights[hashes[at - 1]]):
                had = at
        flight: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for each in hashes[had:]:
            if each not in self._flights and not self._holds(each):
                self._flights[each] = flight
        return flight

    def land(self, flight: asyncio.Future[bool], hashes: Iterable[int], *, is_done: bool) -> None:
        """End a flight. Ignored if it has ended."""
        if flight.done():
            return
        for each in hashes:
            if self._flights.get(each) is flight:
                del self._flights[each]
        flight.set_result(is_done)

    def check(self) -> None:
        """Raises AssertionError if a flight that has ended is kept."""
        assert not any(flight.done() for flight in self._flights.values())


class ForeignRunner:
    """Requests of one worker on one engine. Belongs to one event loop, the engine's.

    `contents` has the engine's cache, by its events (`take_events`); `progressed` notes its steps.
    """

    grammars = None  # the engine compiles them
    lend = None

    def __init__(
        self,
        engine: AsyncEngine,
        identity: Identity,
        capacity: Capacity,
        results: Results,
        *,
        contents: PodContents,
        limits: TextLimits,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._capacity = capacity
        self._results = results
        self.contents = contents
        self._clock = clock
        self._model = identity.model
        self._lacks = frozenset(identity.lacks)
        self.tasks = Tasks(f"foreign engine of {identity.worker}")
        self.flights = Flights(contents.names.holds)
        self.texts = CapsuleTexts(
            max_left=limits.max_left,
            max_kept_nbytes=limits.max_kept_nbytes,
            clock=clock,
            stored=lambda text: self._tell_event(self._stored(text)),
            released=lambda capsule: self._tell_event(CapsuleReleased(capsule)),
        )
        self._jobs: dict[RequestId, _Job] = {}
        self._making: dict[CapsuleId, tuple[_Branch, asyncio.Future[bool]]] = {}
        self._updates: dict[str, list[Update]] = {}
        self._replies: dict[str, list[CapsuleReply]] = {}
        self._events: list[Event] = []
        self._is_flushing = False
        self._step = 0
        self._usage = 0.0  # of the engine's blocks, those in use
        self._progress_at = 0.0
        self._follow: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.is_alive = False
        self.next_seq = 0
        self.on_step: Callable[[float], None] | None = None

    # Life

    def start(self) -> None:
        self.is_alive = True
        if self._follow is not None:
            self.tasks.spawn(self._follow(), name="the engine's cache events")

    def follow(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `run`, which reads the engine's events, in a task from the start on."""
        self._follow = run

    def turn_age(self, now: float) -> float:
        """Seconds for which the engine has made no progress with what it has."""
        has_work = any(b.is_given for job in self._jobs.values() for b in job.branches.values())
        return now - self._progress_at if has_work else 0.0

    def progressed(self, usage: float) -> None:
        """The engine has done a step; `usage`: the share of its blocks that are in use."""
        now = self._clock()
        if self.on_step is not None and self._step:
            self.on_step(now - self._progress_at)
        self._usage, self._progress_at = usage, now
        self._flush_soon()

    def abort(self, error: Exception) -> None:
        self.is_alive = False
        for job in list(self._jobs.values()):
            self._end_job(job)
        self._updates.clear()
        self._replies.clear()

    async def stop(self, error: Exception, *, within_s: float = STOP_S) -> bool:
        """Abort, and end the engine's processes."""
        self.abort(error)
        await self.tasks.close()
        await asyncio.to_thread(self._engine.shutdown, within_s)
        return True

    # Commands

    def submit(self, gateway: str, commands: Sequence[Command]) -> None:
        for command in commands:
            try:
                if missing := needs(command) & self._lacks:
                    raise refusal(missing)
                self._take(gateway, command)
            except MalleeError as error:
                self._refuse(gateway, command, error)

    def _refuse(self, gateway: str, command: Command, error: MalleeError) -> None:
        match command:
            case Generate(request=request) | Fork(request=request) | Prefill(request=request):
                if RequestId(request) in self._jobs:  # the update would end that one
                    text = "a command of gateway %s was refused: %s"
                    log.warning(text, gateway, told(error), extra=ids(gateway=gateway))
                    return
                wire = error.to_wire()
                self._tell(gateway, Update(request, ALL_BRANCHES, finish="error", error=wire))
            case Prioritize() | Cancel() | Release() | Cut():
                log.warning("%s was refused: %s", type(command).__name__, told(error))
            case _:
                self._reply(gateway, CapsuleReply(command.request, error=error.to_wire()))

    def _take(self, gateway: str, command: Command) -> None:
        match command:
            case Generate() | Prefill():
                self._open(gateway, command)
            case Fork():
                self._fork(gateway, command)
            case Cancel(request=request, branch=index):
                self._cancel(RequestId(request), index)
            case Release(capsule=capsule):
                self._forget(capsule)
            case Cut():
                self._cut(gateway, command)
            case Capture():
                self._capture(gateway, command)
            case Rewind():
                text = self.texts.get(command.capsule)
                name = capsule_id(RequestId(command.request))
                self._keep(gateway, command, text.first(command.at, name), command.ttl_s)
            case Pin():
                text = self.texts.get(command.capsule)
                ttl_s = command.ttl_s if command.is_pinned else None
                self._keep(gateway, command, text, ttl_s)
            case Inspect():
                self._reply(gateway, CapsuleReply(command.request, self._status(command.capsule)))
            case Delete():
                status = self._status(command.capsule)
                self._forget(command.capsule)
                self._reply(gateway, CapsuleReply(command.request, status))
            case _:
                raise InternalError(f"a {type(command).__name__} is lacked, and does not say so")

    def drop(self, gateway: str) -> None:
        for job in [job for job in self._jobs.values() if job.gateway == gateway]:
            self._end_job(job)
        self._updates.pop(gateway, None)
        self._replies.pop(gateway, None)
        # Its tasks notice that they are cancelled first.
        asyncio.get_running_loop().call_soon(self._results.dropped, gateway)

    # Beginnings

    def _open(self, gateway: str, command: Generate | Prefill) -> None:
        tokens = unpack_tokens(command.tokens)
        if not len(tokens):
            raise InvalidParameter("tokens", [], "give at least one token")
        command.validate(len(tokens))
        is_prefill = isinstance(command, Prefill)
        job = self._job(
            gateway,
            command,
            command.salt,
            Sampling() if isinstance(command, Prefill) else command.sampling,
            _ONE_TOKEN if isinstance(command, Prefill) else command.limits,
        )
        prompts = [tokens] if isinstance(command, Prefill) else [tokens] * command.n
        self._begin(job, prompts, 0 if isinstance(command, Prefill) else command.first_branch)
        if is_prefill:
            made: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._making[job.capsule(0)] = job.branches[0], made

    def _fork(self, gateway: str, command: Fork) -> None:
        making = self._making.get(CapsuleId(command.capsule))
        if making is None:
            source = self.texts.get(command.capsule)
        else:
            branch = making[0]
            source = CapsuleText(CapsuleId(command.capsule), branch.prompt, branch.job.salt)
        if command.at is not None:
            source = source.first(command.at, source.id)
        job = self._job(gateway, command, source.salt, command.sampling, command.limits)
        prompts = [np.concatenate((source.tokens, unpack_tokens(s))) for s in command.suffixes]
        self._begin(job, prompts, command.first_branch, None if making is None else making[1])

    def _job(
        self,
        gateway: str,
        command: Generate | Fork | Prefill,
        salt: str,
        sampling: Sampling,
        limits: Limits,
    ) -> _Job:
        command.share.validate()
        sampling.validate()
        if limits.max_tokens < 1:
            raise InvalidParameter("max_tokens", limits.max_tokens, "give at least 1")
        if not 0 <= limits.min_tokens <= limits.max_tokens:
            raise InvalidParameter("min_tokens", limits.min_tokens, "give 0 to max_tokens")
        return _Job(RequestId(command.request), gateway, command, salt, sampling, limits, {})

    def _begin(
        self,
        job: _Job,
        prompts: Sequence[Tokens],
        first_stream: int,
        made: asyncio.Future[bool] | None = None,
    ) -> None:
        """Begin a branch for each prompt; `made`: of the capsule that they go on from."""
        if job.request in self._jobs:
            remedy = "this id is in use; ids are used once"
            raise InvalidParameter("request", job.request, remedy)
        if not 1 <= len(prompts) <= MAX_BRANCHES:
            raise InvalidParameter("n", len(prompts), f"give 1 to {MAX_BRANCHES} branches")
        longest, room = max(map(len, prompts)), self._model.max_model_len
        if longest + job.limits.max_tokens - job.drawn > room:
            raise ContextLengthExceeded(longest, job.limits.max_tokens - job.drawn, room)
        params = []
        for index in range(len(prompts)):
            fields = sampling_fields(
                job.sampling,
                job.limits,
                job.grammar,
                self._model,
                branch=first_stream + index,
                drawn=job.drawn,
            )
            if job.num_scores >= 0:
                fields["prompt_logprobs"] = job.num_scores
            try:
                params.append(self._engine.params(fields))
            except ValueError as error:
                text = f"the engine does not take it: {error}"
                raise InvalidParameter("sampling", "", text) from None
        self._jobs[job.request] = job
        known: dict[int, list[int]] = {}  # hashes, by prompt: siblings share theirs
        for index, prompt in enumerate(prompts):
            branch = job.branches[index] = _Branch(job, index, prompt, first_stream + index)
            if id(prompt) not in known:
                known[id(prompt)] = self._hashes(prompt, job.salt).tolist()
            run = self._run(branch, params[index], known[id(prompt)], made)
            branch.task = self.tasks.spawn(run, name=f"branch {index} of {job.request}")

    def _hashes(self, tokens: Tokens, scope: str) -> Hashes:
        return block_hashes(tokens, self._capacity.block_size, salt=self._model.salt(scope))

    # A branch

    async def _run(
        self,
        branch: _Branch,
        params: Any,
        hashes: list[int],
        made: asyncio.Future[bool] | None,
    ) -> None:
        """Have the engine compute a branch, and pass on what it draws."""
        job = branch.job
        if made is not None and not await asyncio.shield(made):
            assert isinstance(job.command, Fork), "others go on from no capsule"
            self._fail(branch, CapsuleAbandoned(job.command.capsule))
            return
        flight = await self.flights.join(hashes)
        if not any(b.is_given for each in self._jobs.values() for b in each.branches.values()):
            self._progress_at = self._clock()
        branch.is_given = True
        salt = self._model.salt(job.salt)
        prompt = prompt_of(branch.prompt, salt)
        name = f"{job.request}/{branch.index}"
        try:
            async with aclosing(self._engine.generate(prompt, params, name)) as outputs:
                async for output in outputs:
                    self._progress_at = self._clock()
                    self.flights.land(flight, hashes, is_done=True)
                    self._take_output(branch, output)
            if branch.index in job.branches:
                raise InternalError("the engine ended an answer without a reason")
        except Exception as error:  # loop top of a branch: the engine may raise anything
            if self._engine.errored:
                self._results.fail(f"its engine is dead: {type(error).__name__}: {error}")
                return
            if not isinstance(error, MalleeError):
                text = "the engine failed at request %s: %s"
                extra = ids(request=job.request) | stack_of(error)
                log.error(text, job.request, type(error).__name__, extra=extra)
            self._fail(branch, _read(error))
        finally:
            self.flights.land(flight, hashes, is_done=False)

    def _take_output(self, branch: _Branch, output: Output) -> None:
        job, found = branch.job, output.outputs[0]
        if branch.index not in job.branches:
            return
        if branch.cached is None:
            branch.cached = min(output.num_cached_tokens or 0, len(branch.prompt))
            branch.num_computed = len(branch.prompt) - branch.cached
        finish = finish_of(found.finish_reason)
        if finish == "error":
            text = f"the engine ended the answer: {found.finish_reason}"
            self._fail(branch, InternalError(text))
            return
        if isinstance(job.command, Prefill):
            if finish is not None:
                self._end(branch, "stop")
            return
        tokens = list(found.token_ids)
        logprobs = logprobs_of(tokens, found.logprobs, job.sampling.logprobs)
        end: EndToken | None = None
        if finish == "stop" and tokens and tokens[-1] in stop_ids(job.limits, self._model):
            end = (tokens.pop(), logprobs[-1] if logprobs else None)
            logprobs = logprobs[: len(tokens)]
        scores: tuple[TokenLogprobs, ...] = ()
        if output.prompt_logprobs and job.num_scores >= 0:  # those of the first token are None
            prompt = branch.prompt.tolist()
            scores = logprobs_of(prompt[1:], output.prompt_logprobs[1:], job.num_scores)
        position = len(branch.tokens)
        branch.tokens += tokens
        captures, branch.captures = branch.captures, []
        for capture, gateway in captures:
            self._capture(gateway, capture)
        if finish is not None:
            self._end(
                branch,
                finish,
                tuple(tokens),
                logprobs,
                position,
                end_token=end,
                prompt_logprobs=scores,
            )
        elif tokens:
            self._tell(
                job.gateway,
                Update(
                    job.request,
                    branch.index,
                    tuple(tokens),
                    cached_tokens=branch.cached,
                    prefill_tokens=branch.num_computed,
                    logprobs=logprobs,
                    position=position,
                    prompt_logprobs=scores,
                    resampled=self._is_resampled(job),
                ),
            )

    def _is_resampled(self, job: _Job) -> bool:
        return job.drawn > 0 and not is_exact(job.sampling)

    def _end(
        self,
        branch: _Branch,
        finish: Any,
        tokens: tuple[int, ...] = (),
        logprobs: Any = (),
        position: int | None = None,
        error: MalleeError | None = None,
        **more: Any,
    ) -> None:
        """The last update of a branch."""
        job = branch.job
        left: CapsuleId | None = None
        kept: Kept = ""
        if finish in ("stop", "length"):
            left, kept = self._leave(branch)
        update = Update(
            request=job.request,
            branch=branch.index,
            tokens=tokens,
            finish=finish,
            cached_tokens=branch.cached or 0,
            prefill_tokens=branch.num_computed,
            capsule=left,
            boundary=0 if finish == "error" else len(branch.prompt) + len(branch.tokens),
            error=None if error is None else error.to_wire(),
            logprobs=logprobs,
            position=len(branch.tokens) if position is None else position,
            kept=kept,
            resampled=self._is_resampled(job),
            **more,
        )
        self._retire(branch, is_made=left is not None)
        self._tell(job.gateway, update)

    def _leave(self, branch: _Branch) -> tuple[CapsuleId | None, Kept]:
        """The capsule of a branch that has ended by itself, and whether it is kept."""
        job, command = branch.job, branch.job.command
        ttl_s, drawn = None, job.drawn + len(branch.tokens)
        if isinstance(command, Prefill):
            ttl_s = None if command.replaceable else command.ttl_s
        else:
            ttl_s = command.keep_s
        text = CapsuleText(
            job.capsule(branch.index),
            branch.text,
            job.salt,
            drawn=None if isinstance(command, Prefill) else drawn,
            ttl_s=ttl_s,
        )
        try:
            is_left = self.texts.put(text)
        except CapsulesFull:
            return None, "refused"
        return (text.id if is_left else None), "" if ttl_s is None else "kept"

    def _fail(self, branch: _Branch, error: MalleeError) -> None:
        if branch.index in branch.job.branches:
            self._end(branch, "error", error=error)

    def _retire(self, branch: _Branch, *, is_made: bool = False) -> None:
        """A branch is over: nothing more of it is told."""
        job = branch.job
        del job.branches[branch.index]
        if not job.branches:
            del self._jobs[job.request]
        for capture, gateway in branch.captures:
            error = UnknownBranch(job.request, branch.index)
            self._reply(gateway, CapsuleReply(capture.request, error=error.to_wire()))
        making = self._making.get(job.capsule(branch.index))
        if making is not None and making[0] is branch:
            del self._making[job.capsule(branch.index)]
            making[1].set_result(is_made)
        if branch.task is not None and branch.task is not asyncio.current_task():
            self.tasks.cancel(branch.task)

    def _end_job(self, job: _Job) -> None:
        for branch in list(job.branches.values()):
            self._retire(branch)

    # Changes

    def _cancel(self, request: RequestId, index: int | None) -> None:
        job = self._jobs.get(request)
        if job is None:
            return  # it ended while the cancel was under way
        for branch in list(job.branches.values()):
            if index in (None, branch.index):
                self._end(branch, "cancelled")

    def _forget(self, capsule: str) -> None:
        making = self._making.get(CapsuleId(capsule))
        if making is not None:
            self._end(making[0], "cancelled")
        self.texts.drop(capsule)

    def _cut(self, gateway: str, command: Cut) -> None:
        name = capsule_id(RequestId(command.request), command.branch)
        job = self._jobs.get(RequestId(command.request))
        branch = None if job is None else job.branches.get(command.branch)
        if branch is None or job is None:
            found = self.texts.peek(name)
            if found is not None and command.at <= len(found.tokens):
                self._put_cut(found, command)
            return
        if job.gateway != gateway:
            return
        if command.at <= len(branch.prompt) + len(branch.tokens):
            ttl_s = None if isinstance(job.command, Prefill) else job.command.keep_s
            drawn = job.drawn + len(branch.tokens)
            self._put_cut(CapsuleText(name, branch.text, job.salt, drawn, ttl_s), command)
        self._end(branch, "cancelled")

    def _put_cut(self, whole: CapsuleText, command: Cut) -> None:
        text = whole.first(command.at, whole.id)
        tokens = np.concatenate((text.tokens, unpack_tokens(command.residue)))
        try:
            self.texts.put(CapsuleText(text.id, tokens, text.salt, text.drawn, text.ttl_s))
        except CapsulesFull as error:
            log.info("a cut answer leaves no capsule: %s", told(error))

    def _capture(self, gateway: str, command: Capture) -> None:
        job = self._jobs.get(RequestId(command.of))
        branch = None if job is None else job.branches.get(command.branch)
        if job is None or branch is None or job.gateway != gateway:
            raise UnknownBranch(command.of, command.branch)
        if not branch.tokens:
            branch.captures.append((command, gateway))
            return
        name, drawn = capsule_id(RequestId(command.request)), job.drawn + len(branch.tokens)
        text = CapsuleText(name, branch.text, job.salt, drawn)
        self._keep(gateway, command, text, command.ttl_s)

    def _keep(
        self, gateway: str, command: Capture | Rewind | Pin, text: CapsuleText, ttl_s: float | None
    ) -> None:
        """Keep `text`, or leave it, and answer with its status."""
        kept = CapsuleText(text.id, text.tokens, text.salt, text.drawn, ttl_s)
        try:
            self.texts.put(kept)
            reply = CapsuleReply(command.request, self._status(kept.id))
        except MalleeError as error:
            reply = CapsuleReply(command.request, error=error.to_wire())
        self._reply(gateway, reply)

    def _status(self, capsule: str) -> CapsuleStatus:
        text, making = self.texts.peek(capsule), self._making.get(CapsuleId(capsule))
        if text is None and making is None:
            raise UnknownCapsule(capsule)
        if text is None:
            assert making is not None
            length = len(making[0].prompt)
            return CapsuleStatus(capsule, length, 0, 0, is_pinned=True, computed=0)
        hashes = self._hashes(text.tokens, text.salt).tolist()
        is_there = all(map(self.contents.names.holds, hashes))
        return CapsuleStatus(
            capsule=capsule,
            boundary=len(text.tokens),
            nbytes=0,  # it holds no block
            shared_nbytes=0,
            is_pinned=text.ttl_s is not None,
            ttl_s=self.texts.ttl_left(text),
            drawn=text.drawn,
            tier="device" if is_there else "none",
        )

    # The engine's cache

    def take_events(self, arrival: Arrival) -> None:
        """Take in what the engine says of its blocks."""
        events = self.contents.take(arrival)
        if any(isinstance(event, Cleared) for event in events):  # texts stay
            events += map(self._stored, self.texts)
        self._events += events
        if events:
            self._flush_soon()

    def _stored(self, text: CapsuleText) -> CapsuleStored:
        hashes = NO_HASHES if text.ttl_s is None else self._hashes(text.tokens, text.salt)
        scope = owner_of(text.salt)
        return CapsuleStored(text.id, len(text.tokens), pack_hashes(hashes), scope)

    def snapshot(self) -> asyncio.Future[Snapshot]:
        self._flush()
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        answer.set_result(
            Snapshot(
                worker=self._identity.worker,
                incarnation=self._identity.incarnation,
                next_seq=self.next_seq,
                hashes=self.contents.names.held(0),
                capsules=tuple(map(self._stored, self.texts)),
                host_hashes=self.contents.names.held(1),
                disk_hashes=self.contents.names.held(2),
            )
        )
        return answer

    def load(self) -> asyncio.Future[Load]:
        """Also the time to look whether the engine is there still."""
        self.texts.expire()
        answer: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
        if not self.is_alive:
            answer.cancel()
        elif self._engine.errored:
            answer.cancel()
            self._results.fail("its engine is dead")
        else:
            branches = [b for job in self._jobs.values() for b in job.branches.values()]
            waiting = [branch for branch in branches if branch.cached is None]
            answer.set_result(
                Load(
                    rows=len(branches) - len(waiting),
                    waiting=len(waiting),
                    active_blocks=round(self._usage * self._capacity.num_blocks),
                    prefill_tokens=sum(len(b.prompt) for b in waiting if b.is_given),
                )
            )
        return answer

    # What is told

    def _tell(self, gateway: str, update: Update) -> None:
        self._updates.setdefault(gateway, []).append(update)
        self._flush_soon()

    def _reply(self, gateway: str, reply: CapsuleReply) -> None:
        self._replies.setdefault(gateway, []).append(reply)
        self._flush_soon()

    def _tell_event(self, event: Event) -> None:
        self._events.append(event)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """One result for all that comes in this turn of the loop."""
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if not self.is_alive:
            return
        self._step += 1
        updates, self._updates = self._updates, {}
        replies, self._replies = self._replies, {}
        frames = {
            gateway: Frame(
                self._step, tuple(updates.get(gateway, ())), tuple(replies.get(gateway, ()))
            )
            for gateway in updates.keys() | replies.keys()
        }
        batch = None
        if self._events:
            events, self._events = tuple(self._events), []
            worker, life = self._identity.worker, self._identity.incarnation
            batch = EventBatch(worker, life, self.next_seq, events)
            self.next_seq = batch.next_seq
        self._results.deliver(StepResult(frames, batch, self._step), self.next_seq)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self.flights.check()
        assert all(job.branches for job in self._jobs.values()), "a job without branches"
        making = {branch for branch, _ in self._making.values()}
        open_ = {b for job in self._jobs.values() for b in job.branches.values()}
        assert making <= open_, "a capsule's prefill is over"

    @property
    def num_open(self) -> int:
        return len(self._jobs)


def _read(error: Exception) -> MalleeError:
    """An exception of the engine as an error of ours."""
    if isinstance(error, MalleeError):
        return error
    if isinstance(error, ValueError):  # vLLM's refusals are
        return InvalidParameter("request", "", f"the engine refuses it: {error}")
    return InternalError(f"the engine failed: {type(error).__name__}")
