"""A `Runner` over vLLM's AsyncLLM: each branch of a request is a request of the engine, on token ids.

The engine shares KV by what is in its blocks, once these are computed. So of branches that begin with the
same blocks, which it does not hold, one goes first (`Flights`); the others follow when it has drawn a token.
A capsule is a text: its forks compute what the engine's cache has lost of it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mallee.actors.foreign.asking import (
    Output,
    finish_of,
    logprobs_of,
    prompt_of,
    sampling_fields,
    stop_ids,
)
from mallee.actors.foreign.flights import Flights
from mallee.actors.foreign.jobs import Branch, Job
from mallee.actors.foreign.texts import CapsuleText, CapsuleTexts, TextLimits
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
    EngineUse,
    Event,
    EventBatch,
    Load,
    Removed,
    Snapshot,
    pack_hashes,
)
from mallee.protocol.hashing import NO_HASHES, Hashes, Tokens, block_hashes
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id, owner_of
from mallee.protocol.messages import (
    Cancel,
    CapsuleReply,
    CapsuleStatus,
    Capture,
    Command,
    Cut,
    Delete,
    EndToken,
    FinishReason,
    Fork,
    Generate,
    Inspect,
    Kept,
    Limits,
    Pin,
    Prefill,
    Release,
    Rewind,
    TokenLogprobs,
    Update,
    check_branches,
    unpack_tokens,
)
from mallee.runtime.tasks import Tasks
from mallee.runtime.telemetry.logs import ids, stack_of, told
from mallee.worker.records import StepResult
from mallee.worker.updates import FrameSink

log = logging.getLogger(__name__)

_ONE_TOKEN = Limits(1, ignore_eos=True)  # of a prefill, which drops it


class AsyncEngine(Protocol):
    """The part of vLLM's `AsyncLLM` that a runner uses; `params` makes its `SamplingParams`.

    `errored`: its core is dead. `generate` gives deltas of one answer; to close it aborts what is left.
    Both raise ValueError for what the engine does not take, Unavailable while it takes no more.
    """

    @property
    def errored(self) -> bool: ...

    def params(self, fields: Mapping[str, Any]) -> Any: ...

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Output, None]: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


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
        self.tasks = Tasks(f"foreign engine of {identity.worker}")
        self.flights = Flights(contents.names.holds)
        self.texts = CapsuleTexts(
            limits,
            clock=clock,
            stored=lambda text: self._tell_events(self._stored(text)),
            released=lambda capsule: self._tell_events(CapsuleReleased(capsule)),
        )
        self._jobs: dict[RequestId, Job] = {}
        self._making: dict[CapsuleId, Branch] = {}  # prefills
        self._given: set[Branch] = set()  # to the engine
        self._sink = FrameSink()
        self._events: list[Event] = []
        self._is_flushing = False
        self._step = 0
        self._usage = 0.0  # of the engine's blocks, those in use
        self._counts: Counter[str] = Counter()  # fields of `EngineUse`
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

    @property
    def _branches(self) -> list[Branch]:
        return [branch for job in self._jobs.values() for branch in job.branches.values()]

    def turn_age(self, now: float) -> float:
        """Seconds for which the engine has made no progress with what it has."""
        return now - self._progress_at if self._given else 0.0

    def progressed(self, usage: float, num_preempted: int = 0) -> None:
        """The engine has done a step; `usage`: the share of its blocks that are in use."""
        self._counts["num_preemptions"] += num_preempted
        now = self._clock()
        if self.on_step is not None and self._step:
            self.on_step(now - self._progress_at)
        self._usage, self._progress_at = usage, now
        self._flush_soon()

    def abort(self, error: Exception) -> None:
        self.is_alive = False
        for branch in self._branches:
            self._retire(branch)

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
                if missing := needs(command).intersection(self._identity.lacks):
                    raise refusal(missing)
                self._take(gateway, command)
            except MalleeError as error:
                self._refuse(gateway, command, error)
        self._flush_soon()

    def _refuse(self, gateway: str, command: Command, error: MalleeError) -> None:
        match command:
            case Generate(request=request) | Fork(request=request) | Prefill(request=request):
                if RequestId(request) not in self._jobs:  # else the update would end that one
                    self._sink.refuse(gateway, request, error)
                    return
            case Capture() | Rewind() | Pin() | Inspect() | Delete():
                self._sink.reply(gateway, CapsuleReply(command.request, error=error.to_wire()))
                return
            case _ if needs(command):  # about a branch or a capsule, too
                request = getattr(command, "request", "")
                self._sink.reply(gateway, CapsuleReply(request, error=error.to_wire()))
                return
        text = "a command of gateway %s was refused: %s"
        log.warning(text, gateway, told(error), extra=ids(gateway=gateway))

    def _take(self, gateway: str, command: Command) -> None:
        match command:
            case Generate() | Prefill():
                self._open(gateway, command)
            case Fork():
                self._fork(gateway, command)
            case Cancel(request=request, branch=index):
                job = self._jobs.get(RequestId(request))
                for branch in [] if job is None else [*job.branches.values()]:
                    if index in (None, branch.index):
                        self._end(branch, "cancelled")
            case Release(capsule=capsule):
                self._forget(capsule)
            case Cut():
                self._cut(gateway, command)
            case Capture(request=request, of=of, branch=index, ttl_s=ttl_s):
                taken = self._branch(gateway, of, index)
                if taken is None:
                    raise UnknownBranch(of, index)
                self._keep(gateway, request, taken.text(capsule_id(RequestId(request)), ttl_s))
            case Rewind(request=request, ttl_s=ttl_s):
                whole, name = self.texts.get(command.capsule), capsule_id(RequestId(request))
                self._keep(gateway, request, whole.first(command.at, name, ttl_s))
            case Pin(request=request, ttl_s=ttl_s, is_pinned=is_pinned):
                whole = self.texts.get(command.capsule)
                self._keep(gateway, request, replace(whole, ttl_s=ttl_s if is_pinned else None))
            case Inspect(request=request, capsule=capsule):
                self._sink.reply(gateway, CapsuleReply(request, self._status(capsule)))
            case Delete(request=request, capsule=capsule):
                self._sink.reply(gateway, CapsuleReply(request, self._status(capsule)))
                self._forget(capsule)
            case _:
                raise InternalError(f"a {type(command).__name__} is lacked, and does not say so")

    def drop(self, gateway: str) -> None:
        for branch in self._branches:
            if branch.job.gateway == gateway:
                self._retire(branch)
        self._sink.drop(gateway)
        # Its tasks notice that they are cancelled first.
        asyncio.get_running_loop().call_soon(self._results.dropped, gateway)

    # Beginnings

    def _open(self, gateway: str, command: Generate | Prefill) -> None:
        tokens, request = unpack_tokens(command.tokens), RequestId(command.request)
        if not len(tokens):
            raise InvalidParameter("tokens", [], "give at least one token")
        command.validate(len(tokens))
        if isinstance(command, Generate):
            job = Job(
                request=request,
                gateway=gateway,
                salt=command.salt,
                limits=command.limits,
                sampling=command.sampling,
                grammar=command.grammar,
                drawn=command.drawn,
                num_scores=command.prompt_logprobs,
                ttl_s=command.keep_s,
            )
            self._begin(job, [tokens] * command.n, command.first_branch)
            return
        job = Job(
            request=request,
            gateway=gateway,
            salt=command.salt,
            limits=_ONE_TOKEN,
            ttl_s=None if command.replaceable else command.ttl_s,
            leaves=CapsuleId(command.capsule) if command.capsule else capsule_id(request),
        )
        self._begin(job, [tokens], 0)
        job.made = asyncio.get_running_loop().create_future()
        self._making[job.capsule(0)] = job.branches[0]

    def _fork(self, gateway: str, command: Fork) -> None:
        making = self._making.get(CapsuleId(command.capsule))
        source = (
            self.texts.get(command.capsule)
            if making is None
            else making.text(making.job.capsule(0), None)
        )
        if command.at is not None:
            source = source.first(command.at, source.id)
        job = Job(
            request=RequestId(command.request),
            gateway=gateway,
            salt=source.salt,
            limits=command.limits,
            sampling=command.sampling,
            grammar=command.grammar,
            ttl_s=command.keep_s,
            made=None if making is None else making.job.made,
        )
        prompts = [np.concatenate((source.tokens, unpack_tokens(s))) for s in command.suffixes]
        self._begin(job, prompts, command.first_branch, source.id)

    def _begin(self, job: Job, prompts: Sequence[Tokens], first: int, source: str = "") -> None:
        """Begin a branch for each prompt; the first one draws as the branch `first`."""
        limits = job.limits
        job.sampling.validate(self._model.vocab_size)
        limits.validate(self._model.vocab_size)
        check_branches("n", len(prompts))
        if job.request in self._jobs:
            raise InvalidParameter("request", job.request, "this id is in use; ids are used once")
        longest, room = max(map(len, prompts)), self._model.max_model_len
        if longest + limits.max_tokens - job.drawn > room:
            raise ContextLengthExceeded(longest, limits.max_tokens - job.drawn, room)
        params = [self._params(job, first + index) for index in range(len(prompts))]
        self._jobs[job.request] = job
        known: dict[int, list[int]] = {}  # hashes, by prompt: siblings share theirs
        for index, prompt in enumerate(prompts):
            branch = job.branches[index] = Branch(job, index, prompt)
            if id(prompt) not in known:
                known[id(prompt)] = self._hashes(prompt, job.salt).tolist()
            run = self._run(branch, params[index], known[id(prompt)], source)
            branch.task = self.tasks.spawn(run, name=f"branch {index} of {job.request}")

    def _params(self, job: Job, branch: int) -> Any:
        """The engine's parameters of a branch. Raises InvalidParameter."""
        fields = sampling_fields(
            job.sampling, job.limits, job.grammar, self._model, branch=branch, drawn=job.drawn
        )
        if job.num_scores >= 0:
            fields["prompt_logprobs"] = job.num_scores
        try:
            return self._engine.params(fields)
        except ValueError as error:
            raise _refused(error) from None

    def _hashes(self, tokens: Tokens, scope: str) -> Hashes:
        return block_hashes(tokens, self._capacity.block_size, salt=self._model.salt(scope))

    # A branch

    async def _run(self, branch: Branch, params: Any, hashes: list[int], source: str) -> None:
        """Have the engine compute a branch, and pass on what it draws."""
        job = branch.job
        if source and job.made is not None and not await asyncio.shield(job.made):
            self._end(branch, "error", error=CapsuleAbandoned(source).to_wire())
            return
        flight = await self.flights.join(hashes)
        if not self._given:
            self._progress_at = self._clock()
        self._given.add(branch)
        prompt = prompt_of(branch.prompt, self._model.salt(job.salt))
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
            known = _refused(error) if isinstance(error, ValueError) else error
            if not isinstance(known, MalleeError):
                extra = ids(request=job.request) | stack_of(error)
                log.error("the engine failed at request %s", job.request, extra=extra)
                known = InternalError(f"the engine failed: {type(error).__name__}")
            if branch.index in job.branches:
                self._end(branch, "error", error=known.to_wire())
        finally:
            self.flights.land(flight, hashes, is_done=False)

    def _take_output(self, branch: Branch, output: Output) -> None:
        job, found = branch.job, output.outputs[0]
        if branch.index not in job.branches:
            return
        if branch.cached is None:
            branch.cached = min(output.num_cached_tokens or 0, len(branch.prompt))
            self._counts["num_cached_tokens"] += branch.cached
            self._counts["num_prefill_tokens"] += len(branch.prompt) - branch.cached
        finish = finish_of(found.finish_reason)
        if finish == "error":
            raise InternalError(f"the engine ended the answer: {found.finish_reason}")
        if job.leaves is not None:
            if finish is not None:
                self._end(branch, "stop")
            return
        tokens = list(found.token_ids)
        end: EndToken | None = None
        logprobs = logprobs_of(tokens, found.logprobs, job.sampling.logprobs)
        if finish == "stop" and tokens and tokens[-1] in stop_ids(job.limits, self._model):
            end = (tokens.pop(), logprobs[-1] if logprobs else None)
            logprobs = logprobs[: len(tokens)]
        scores: tuple[TokenLogprobs, ...] = ()
        if output.prompt_logprobs and job.num_scores >= 0:  # those of the first token are None
            prompt = branch.prompt.tolist()
            scores = logprobs_of(prompt[1:], output.prompt_logprobs[1:], job.num_scores)
        position = len(branch.tokens)
        branch.tokens += tokens
        self._counts["num_output_tokens"] += len(tokens) + (end is not None)
        news: dict[str, Any] = {"tokens": tuple(tokens), "logprobs": logprobs}
        news |= {"position": position, "prompt_logprobs": scores}
        if finish is not None:
            self._end(branch, finish, end_token=end, **news)
        elif tokens:
            self._tell(branch, branch.update(**news))

    def _end(self, branch: Branch, finish: FinishReason, **more: Any) -> None:
        """The last update of a branch."""
        left: CapsuleId | None = None
        kept: Kept = ""
        ttl_s = branch.job.ttl_s
        if finish in ("stop", "length"):
            try:
                text = branch.text(branch.job.capsule(branch.index), ttl_s)
                left = text.id if self.texts.put(text) else None
                kept = "" if ttl_s is None else "kept"
            except CapsulesFull:
                kept = "refused"
        self._retire(branch, is_made=left is not None)
        boundary = 0 if finish == "error" else len(branch.prompt) + len(branch.tokens)
        more = {"position": len(branch.tokens), "capsule": left, "boundary": boundary} | more
        self._tell(branch, branch.update(finish=finish, kept=kept, **more))

    def _retire(self, branch: Branch, *, is_made: bool = False) -> None:
        """A branch is over: nothing more of it is told."""
        job = branch.job
        self._given.discard(branch)
        del job.branches[branch.index]
        if not job.branches:
            del self._jobs[job.request]
        if job.leaves is not None and self._making.get(job.leaves) is branch:
            del self._making[job.leaves]
        if job.leaves is not None and job.made is not None:
            job.made.set_result(is_made)
        if branch.task is not None and branch.task is not asyncio.current_task():
            self.tasks.cancel(branch.task)

    # Changes

    def _branch(self, gateway: str, request: str, index: int) -> Branch | None:
        job = self._jobs.get(RequestId(request))
        return None if job is None or job.gateway != gateway else job.branches.get(index)

    def _forget(self, capsule: str) -> None:
        if (making := self._making.get(CapsuleId(capsule))) is not None:
            self._end(making, "cancelled")
        self.texts.drop(capsule)

    def _cut(self, gateway: str, command: Cut) -> None:
        name = capsule_id(RequestId(command.request), command.branch)
        branch = self._branch(gateway, command.request, command.branch)
        whole = self.texts.peek(name) if branch is None else branch.text(name, branch.job.ttl_s)
        if whole is not None and command.at <= len(whole.tokens):
            begun = whole.first(command.at, name, whole.ttl_s)
            residue = unpack_tokens(command.residue)
            drawn = None if begun.drawn is None else begun.drawn + len(residue)
            tokens = np.concatenate((begun.tokens, residue))
            try:
                self.texts.put(replace(begun, tokens=tokens, drawn=drawn))
            except CapsulesFull as error:
                log.info("a cut answer leaves no capsule: %s", told(error))
        if branch is not None:
            self._end(branch, "cancelled")

    def _keep(self, gateway: str, request: str, text: CapsuleText) -> None:
        """Keep `text`, or leave it, and answer with its status."""
        self.texts.put(text)
        self._sink.reply(gateway, CapsuleReply(request, self._status(text.id)))

    def _status(self, capsule: str) -> CapsuleStatus:
        text, making = self.texts.peek(capsule), self._making.get(CapsuleId(capsule))
        if text is None and making is None:
            raise UnknownCapsule(capsule)
        if text is None:
            assert making is not None
            return CapsuleStatus(capsule, len(making.prompt), 0, 0, is_pinned=True, computed=0)
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
        for event in events:
            if isinstance(event, Removed):
                self._counts["num_evicted_blocks"] += len(event.hashes) // 8  # bytes of each
        if any(isinstance(event, Cleared) for event in events):  # texts stay
            events += map(self._stored, self.texts)
        self._tell_events(*events)

    def _stored(self, text: CapsuleText) -> CapsuleStored:
        hashes = NO_HASHES if text.ttl_s is None else self._hashes(text.tokens, text.salt)
        scope = owner_of(text.salt)
        return CapsuleStored(text.id, len(text.tokens), pack_hashes(hashes), scope)

    def snapshot(self) -> asyncio.Future[Snapshot]:
        self._flush()
        answer: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        device, host, disk = map(self.contents.names.held, range(3))
        answer.set_result(
            Snapshot(
                worker=self._identity.worker,
                incarnation=self._identity.incarnation,
                next_seq=self.next_seq,
                hashes=device,
                capsules=tuple(map(self._stored, self.texts)),
                host_hashes=host,
                disk_hashes=disk,
            )
        )
        return answer

    def load(self) -> asyncio.Future[Load]:
        """Also the time to look whether the engine is there still."""
        self.texts.expire()
        answer: asyncio.Future[Load] = asyncio.get_running_loop().create_future()
        if self.is_alive and self._engine.errored:
            self._results.fail("its engine is dead")
        if not self.is_alive:
            answer.cancel()
            return answer
        branches = self._branches
        waiting = [branch for branch in branches if branch.cached is None]
        answer.set_result(
            Load(
                rows=len(branches) - len(waiting),
                waiting=len(waiting),
                active_blocks=round(self._usage * self._capacity.num_blocks),
                prefill_tokens=sum(len(each.prompt) for each in waiting if each in self._given),
                use=self._use(),
            )
        )
        return answer

    def _use(self) -> EngineUse:
        """Its use of memory and its work; what vLLM does not tell is 0."""
        num, held = self._capacity.num_blocks, len(self.contents.names)
        live = round(self._usage * num)
        return EngineUse(
            total_blocks=num,
            live_blocks=live,
            shared_blocks=0,
            cached_blocks=max(0, held - live),
            readers=len(self._given),
            kept_capsules=self.texts.num_kept,
            num_copied_blocks=0,
            num_evicted_blocks=self._counts["num_evicted_blocks"],
            num_preemptions=self._counts["num_preemptions"],
            num_faults=0,
            num_prefill_tokens=self._counts["num_prefill_tokens"],
            num_cached_tokens=self._counts["num_cached_tokens"],
            num_output_tokens=self._counts["num_output_tokens"],
        )

    # What is told

    def _tell(self, branch: Branch, update: Update) -> None:
        self._sink.tell(branch.job.gateway, update)
        self._flush_soon()

    def _tell_events(self, *events: Event) -> None:
        self._events += events
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
        batch = None
        if self._events:
            worker, life = self._identity.worker, self._identity.incarnation
            batch = EventBatch(worker, life, self.next_seq, tuple(self._events))
            self._events, self.next_seq = [], batch.next_seq
        frames = self._sink.drain(self._step)
        self._results.deliver(StepResult(frames, batch, self._step), self.next_seq)

    def check(self) -> None:
        """Raises AssertionError on a broken invariant."""
        self.flights.check()
        assert all(job.branches for job in self._jobs.values()), "a job without branches"
        assert self._given <= set(self._branches), "the engine has a branch that is over"
        assert set(self._making.values()) <= set(self._branches), "a capsule's prefill is over"


def _refused(error: ValueError) -> InvalidParameter:
    """A refusal of the engine."""
    return InvalidParameter("request", "", f"the engine refuses it: {error}")
