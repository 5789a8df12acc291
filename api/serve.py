"""Runs a plan against the gateway and answers with one body or a stream of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.answers import (
    Envelope,
    UsageCounter,
    capsule_body,
    usage_body,
)
from mallee.api.branches.budgets import Bound, Budgets
from mallee.api.branches.watch import Watch
from mallee.api.callbacks.callbacks import Callbacks
from mallee.api.deltas import TextDelta, TextStream, TokenBytes
from mallee.api.entry.middleware import age_s, caller_of, warn_of
from mallee.api.errors import unexpected
from mallee.api.jobs import Plan
from mallee.api.sse import MAX_RUN, EventStream, unless_gone, watch_late
from mallee.api.text.tokenizer import Tokenizer
from mallee.gateway.access.access import Caller
from mallee.gateway.access.visits import UNLIMITED, Visit
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.observers import Observer
from mallee.gateway.requests.request import RunningRequest
from mallee.protocol.api.capsules import Imported
from mallee.protocol.api.shared import OMITTED
from mallee.protocol.errors import InternalError, MalleeError
from mallee.protocol.ids import CapsuleId, RequestId, Scope, account_of, capsule_id
from mallee.router.dispatch.jobs import ForkJob, PrefillJob, QueueTerms
from mallee.router.dispatch.recovery.pending import not_kept

TURN_TOKENS: Final = 2048  # of a backlog, written without a turn of the loop: a few milliseconds
LOGPROBS_COST: Final = 16  # of a token's log-probabilities, as tokens
FREED: Final = "arguments of tools are free, since no answer can be held to"
_WORKER: Final = attrgetter("worker")

_log = logging.getLogger(__name__)


class Whole(Protocol):
    """Collects an answer that is sent in one body."""

    def add(self, delta: TextDelta) -> None: ...

    def choices(self) -> Iterable[Any]:
        """The parts of the finished answer, one after the other."""

    def body(self, envelope: Envelope, choices: list[Any], usage: UsageCounter) -> object: ...


class Writer(Protocol):
    """Writes the events of an answer that is streamed; any may be none."""

    @property
    def idle(self) -> bytes:
        """The event of a stream that has none for a while."""
        ...

    def events(self, delta: TextDelta, usage: UsageCounter) -> bytes:
        """Those of a delta, which `usage` has counted."""

    def end(self, usage: UsageCounter) -> bytes: ...

    def failure(self, error: MalleeError, left: Collection[int]) -> bytes:
        """The last one of an answer that fails after its beginning; `left` are choices that end by it."""


class Keeper(Protocol):
    """Keeps an answer of one choice; `observers` see its request, `ended` is awaited before its end."""

    @property
    def observers(self) -> Sequence[Observer]: ...

    def add(self, delta: TextDelta) -> None: ...

    async def ended(self, name: str) -> None:
        """`name`: the answer's."""


class Named(NamedTuple):
    """The name of a request to come, and the account that bounds it."""

    name: RequestId
    bound: Bound | None


class AnswerFormat(Protocol):
    """The shape of an API's answers. With `token_bytes` they have log-probabilities."""

    def begin_whole(
        self, plan: Plan, token_bytes: TokenBytes | None, *, names_workers: bool
    ) -> Whole: ...

    def begin_stream(
        self, plan: Plan, token_bytes: TokenBytes | None, envelope: Envelope, *, names_workers: bool
    ) -> Writer: ...


@dataclass(frozen=True, slots=True)
class Server:
    """Runs plans. `clock` gives seconds since the epoch; `new_id` names failures in the log."""

    gateway: Gateway
    tokenizer: Tokenizer
    model_name: str
    clock: Callable[[], float]
    new_id: Callable[[], str]
    budgets: Budgets
    callbacks: Callbacks

    def warn_of_tools(self, request: Request, plan: Plan) -> None:
        """Have the answer to `request` name what keeps tools' arguments from being held to their schemas."""
        if freed := plan.output.freed:
            self.gateway.context.metrics.free_tools.inc(len(freed))
            warn_of(request, FREED, freed)

    async def answer(
        self,
        request: Request,
        plan: Plan,
        answer_format: AnswerFormat,
        keeper: Keeper | None = None,
        *,
        is_admitted: bool = False,
    ) -> Response:
        """The whole answer, or a stream whose first delta is there: failures before it are raised.

        Raises MalleeError, and ClientGone with every branch cancelled.
        """
        caller = caller_of(request)
        self.warn_of_tools(request, plan)
        if not is_admitted:
            await self.admit(caller, plan)
        if keeper is None and not plan.keeps:
            watch_late(request.receive)
        prepare_s = age_s(request)
        if plan.returns_ids:
            plan = await unless_gone(request.receive, self.with_prefix(plan))
        if not plan.stream:
            whole = self._whole(plan, prepare_s, answer_format, caller, keeper)
            return await unless_gone(request.receive, whole)
        usage = self._usage(plan, caller)
        text, first = await unless_gone(request.receive, self._opened(plan, prepare_s, keeper))
        token_bytes = self.tokenizer.token_bytes if plan.logprobs else None
        writer = answer_format.begin_stream(
            plan, token_bytes, self._envelope(text, plan), names_workers=caller.is_operator
        )
        events = self._events(first, text, usage, plan, writer, keeper)
        headers = _worker_header(map(_WORKER, text.streams), caller)
        return EventStream(events, text.aclose, headers, idle=writer.idle)

    async def admit(self, caller: Caller, plan: Plan) -> None:
        """Count the request in the use of its key. Raises QuotaExceeded, QuotaTooSmall, StoreAway."""
        if caller.visit is not UNLIMITED:
            await caller.visit.ready(**plan.needs)
            caller.visit.begin(plan.num_choices, plan.prompt_tokens)

    async def with_prefix(self, plan: Plan) -> Plan:
        """With the tokens of its capsule, if it goes on from one. Raises UnknownText."""
        job = plan.jobs[0]
        if not isinstance(job, ForkJob):
            return plan
        tokens = await self.gateway.capsules.tokens(job.capsule, job.scope)
        return msgspec.structs.replace(plan, prefix=tokens[: job.at])

    def _usage(self, plan: Plan, caller: Caller) -> UsageCounter:
        """Raises QuotaExceeded, if capsules of the answer are to be kept and its key may keep no more."""
        charge = None if caller.visit is UNLIMITED else caller.visit.charge
        if not plan.keeps:
            return UsageCounter(plan.prompt_tokens, charge)
        with caller.visit.making(plan.prompt_tokens, self.gateway.capsules.is_kept) as keep:
            return UsageCounter(plan.prompt_tokens, charge, keep)

    async def make(self, job: PrefillJob, visit: Visit, prepare_s: float = 0.0) -> Delta:
        """The last delta of `job`, which names the capsule; it counts in `visit`. Raises MalleeError."""
        tokens = len(job.tokens)
        await visit.ready(capsules=1, capsule_tokens=tokens)
        with visit.making(tokens, self.gateway.capsules.is_kept) as keep:
            visit.begin(1, tokens)
            made = await prefill(self.gateway, job, prepare_s, await self._prefill_name(job))
            assert made.capsule is not None
            keep(made.capsule)
        return made

    async def capsule(
        self, request: Request, job: PrefillJob, file_nbytes: int | None = None
    ) -> Response:
        """The answer to `POST /v1/capsules`, or to an import of so many bytes. Raises as `answer`."""
        caller, tokens = caller_of(request), len(job.tokens)
        made = await unless_gone(request.receive, self.make(job, caller.visit, age_s(request)))
        assert made.capsule is not None
        assert made.worker is not None
        info = CapsuleInfo(made.capsule, made.worker, made.boundary, self.clock())
        imported = OMITTED
        if file_nbytes is not None:
            # Nothing but its own file can have what its private salt finds.
            imported = Imported(
                fetched_tokens=made.cached_tokens,
                computed_tokens=made.prefill_tokens,
                bytes=file_nbytes,
            )
        body = capsule_body(
            info,
            self.model_name,
            names_workers=caller.is_operator,
            prefill_tokens=made.prefill_tokens,
            cached_tokens=made.cached_tokens,
            ttl_s=job.ttl_s or None,
            usage=usage_body(tokens, 0, made.cached_tokens),
            imported=imported,
        )
        return json_response(body, headers=_worker_header([made.worker], caller))

    async def promise(self, request: Request, job: PrefillJob) -> Response:
        """The answer to `POST /v1/capsules` before its prefill has ended, which goes on after it.

        Raises as `answer`, if it is refused.
        """
        caller, tokens = caller_of(request), len(job.tokens)
        name = await self._prefill_name(job)
        capsule = capsule_id(name)
        await caller.visit.ready(capsules=1, capsule_tokens=tokens)
        with ExitStack() as stay:
            visit = stay.enter_context(caller.visit.staying())
            keep = stay.enter_context(visit.making(tokens, self.gateway.capsules.is_kept))
            visit.begin(1, tokens)
            promised = replace(job, makes=capsule)
            stream = await self.gateway.requests.begin(promised, age_s(request), name=name)
            # Nothing is awaited before the task has it all.
            work = self._keep_promise(stream, capsule, keep, stay.pop_all())
            self.gateway.tasks.spawn(work, name="prefill")
        info = await self.gateway.capsules.show(capsule, job.scope)
        body = capsule_body(
            info, self.model_name, names_workers=caller.is_operator, ttl_s=job.ttl_s or None
        )
        workers = () if info.worker is None else (info.worker,)
        return json_response(body, 202, _worker_header(workers, caller))

    async def _keep_promise(
        self,
        stream: RunningRequest,
        capsule: CapsuleId,
        keep: Callable[[CapsuleId], None],
        stay: ExitStack,
    ) -> None:
        """Wait for a capsule that was promised; its failure is told by its id."""
        with stay:
            try:
                await stream.opened()
                await _prefilled(stream)
            except MalleeError as error:
                _log.info("capsule %s could not be made: %s", capsule, error)
            else:
                keep(capsule)

    async def start(
        self,
        plan: Plan,
        prepare_s: float,
        *,
        named: Named | None = None,
        observers: Sequence[Observer] = (),
    ) -> TextStream:
        """The running answer, ended where its budget and its conditions say. The caller closes it.

        `named`: a plan with one job has a name already. `observers` see each of its requests.
        Raises MalleeError.
        """
        bound = await self.bound(plan) if named is None else named.bound
        watch = None
        if bound is not None or plan.conditions is not None:
            watch = await Watch.begin(
                plan, self.budgets, bound, self.tokenizer.token_bytes, callbacks=self.callbacks
            )
            plan = watch.within(plan)
        streams: list[RunningRequest] = []
        try:
            for job in plan.jobs:
                name = named.name if named is not None else None
                if named is None and bound is not None:
                    name = self.named(job.scope, bound).name
                stream = await self.gateway.requests.start(
                    job, prepare_s, name=name, observers=observers
                )
                streams.append(stream)
                if watch is not None:
                    watch.started(stream.request)
        except BaseException:
            if watch is not None:
                watch.close()
            for stream in streams:
                await stream.aclose()
            raise
        return TextStream(streams, plan, self.tokenizer, watch)

    async def read(
        self,
        plan: Plan,
        prepare_s: float,
        take: Callable[[TextDelta], None],
        observers: Sequence[Observer] = (),
    ) -> TextStream:
        """The answer, which has come to its end: `take` had each delta. Raises MalleeError."""
        text, owed = await self.start(plan, prepare_s, observers=observers), 0
        cost = LOGPROBS_COST if plan.logprobs else 1
        try:
            async for delta in text:
                take(delta)
                owed += delta.num_tokens * cost
                if owed >= TURN_TOKENS:
                    owed = 0
                    await asyncio.sleep(0)  # nothing else suspends while there is a backlog
        finally:
            await text.aclose()
        return text

    async def bound(self, plan: Plan, after: CapsuleId | None = None) -> Bound | None:
        """The account that bounds a plan: its own, its capsule's (or that of `after`), its session's."""
        job = plan.jobs[0]  # of all
        capsule = job.capsule or after or ""
        if plan.budget is None and not capsule and not job.terms.session:
            return None
        session = await self._session_budget(job.scope, job.terms)
        return self.budgets.bound(plan.budget, job.scope, capsule, session)

    def named(self, scope: Scope, bound: Bound | None) -> Named:
        """A name for a request to come, from which its account can be told."""
        account = "" if bound is None else bound.key
        return Named(self.gateway.requests.new_name(scope, account), bound)

    async def _prefill_name(self, job: PrefillJob) -> RequestId:
        """A name for a prefill to come. It draws nothing; what goes on from its capsule is bounded."""
        account = account_of(await self._session_budget(job.scope, job.terms))
        return self.gateway.requests.new_name(job.scope, account)

    async def _session_budget(self, scope: Scope, terms: QueueTerms) -> str:
        """The name of the budget of a session, or of one above it; "" if there is none."""
        if not terms.session:
            return ""
        return await self.gateway.sessions.budget(terms.session, scope, terms.parent_session)

    async def _whole(
        self,
        plan: Plan,
        prepare_s: float,
        answer_format: AnswerFormat,
        caller: Caller,
        keeper: Keeper | None,
    ) -> Response:
        token_bytes = self.tokenizer.token_bytes if plan.logprobs else None
        answer = answer_format.begin_whole(plan, token_bytes, names_workers=caller.is_operator)
        usage = self._usage(plan, caller)

        def take(delta: TextDelta) -> None:
            answer.add(delta)
            usage.add(delta)
            if keeper is not None:
                keeper.add(delta)

        text = await self.read(plan, prepare_s, take, keeper.observers if keeper else ())
        if keeper is not None:
            await keeper.ended(text.streams[0].request)
        choices = []
        for choice in answer.choices():
            choices.append(choice)
            if plan.logprobs:
                await asyncio.sleep(0)
        body = answer.body(self._envelope(text, plan), choices, usage)
        return json_response(body, headers=_worker_header(map(_WORKER, text.streams), caller))

    async def _opened(
        self, plan: Plan, prepare_s: float, keeper: Keeper | None
    ) -> tuple[TextStream, TextDelta]:
        """The answer begun, and its first delta; the caller closes it."""
        observers = keeper.observers if keeper is not None else ()
        text = await self.start(plan, prepare_s, observers=observers)
        try:
            return text, await anext(text)
        except BaseException:
            await text.aclose()
            raise

    async def _events(
        self,
        first: TextDelta,
        text: TextStream,
        usage: UsageCounter,
        plan: Plan,
        writer: Writer,
        keeper: Keeper | None,
    ) -> AsyncGenerator[bytes, None]:
        left, owed = set(range(plan.num_choices)), 0  # choices that have not ended
        cost = LOGPROBS_COST if plan.logprobs else 1
        delta: TextDelta | None = first
        try:
            while delta is not None:
                events: list[bytes] = []  # of all that waits: one write
                while delta is not None and len(events) < MAX_RUN and owed < TURN_TOKENS:
                    usage.add(delta)
                    if keeper is not None:
                        keeper.add(delta)
                    owed += delta.num_tokens * cost
                    if delta.finish is not None:
                        left.discard(delta.index)
                    events.append(writer.events(delta, usage))
                    delta = text.take()
                if not left:
                    if keeper is not None:
                        await keeper.ended(text.streams[0].request)
                    events.append(writer.end(usage))
                if written := b"".join(events):
                    yield written
                if owed >= TURN_TOKENS:
                    owed = 0
                    await asyncio.sleep(0)
                if delta is None:
                    delta = await anext(text, None)
        except MalleeError as error:
            yield writer.failure(error, left)
        except Exception:
            request_id = self.new_id()
            _log.exception("request %s failed after its first byte", request_id)
            yield writer.failure(unexpected(request_id), left)

    def _envelope(self, text: TextStream, plan: Plan) -> Envelope:
        model = plan.model or self.model_name
        return Envelope(text.streams[0].request, int(self.clock()), model)


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _worker_header(workers: Iterable[str], caller: Caller) -> dict[str, str]:
    """Workers that answer, each once: one, unless a request has several prompts.

    Of a fan-out that was split the one that holds its prefix; each branch names its own.
    """
    return {"x-mallee-worker": ",".join(dict.fromkeys(workers))} if caller.is_operator else {}


async def prefill(
    gateway: Gateway,
    job: PrefillJob,
    prepare_s: float,
    name: RequestId,
) -> Delta:
    """The last delta of `job`, which names the capsule.

    Raises MalleeError. Cancelled, it leaves nothing running and no capsule.
    """
    stream = await gateway.requests.start(job, prepare_s, name=name)
    try:
        return await _prefilled(stream)
    except asyncio.CancelledError:
        # The capsule may be made already, its delta unread: no client would know it.
        last: Delta | None = None
        while (unread := stream.take()) is not None:
            last = unread
        if last is not None and last.capsule is not None:
            with suppress(MalleeError):  # it goes when its time is over
                await gateway.capsules.release(last.capsule, job.scope)
        raise


async def _prefilled(stream: RunningRequest) -> Delta:
    """The last delta of a prefill, which names the capsule. Raises MalleeError."""
    last: Delta | None = None
    try:
        async for delta in stream:
            last = delta
            if delta.finish is not None:
                break
    finally:
        await stream.aclose()
    if last is None or last.finish is None:
        raise InternalError("the prefill ended without a result")
    if last.finish == "error":
        raise last.error or InternalError("the prefill failed")
    if last.capsule is None:
        raise not_kept()
    return last._replace(worker=stream.worker)
