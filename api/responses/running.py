"""The run of one response: its plan is started, its deltas are written, what it leaves is stored."""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from mallee.api.answers import UsageCounter
from mallee.api.deltas import TextDelta, TextStream
from mallee.api.errors import unexpected
from mallee.api.responses.store import Left, Record, ResponseStore, Turn
from mallee.api.responses.turns import PlannedTurn
from mallee.api.responses.writing import Writer, sse
from mallee.api.serve import LOGPROBS_COST, TURN_TOKENS, Named, Server
from mallee.gateway.access.quotas import Visit
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import CapsuleStale, LookupIncomplete, MalleeError, NotFound
from mallee.protocol.hashing import as_tokens
from mallee.router.dispatch.jobs import ForkJob

log = logging.getLogger(__name__)


class DrawnTokens(Observer):
    """The tokens of a request with one branch, as they were drawn."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = array("I")

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)


class Run:
    """One answer. `admit` counts it, `open` starts it, `events` writes it down; `close` ends it early.

    `tell(record)` is awaited once the output is whole, before the last event. `plan_whole()` is a plan
    without a capsule, if that was lost since this was planned.
    """

    def __init__(
        self,
        server: Server,
        store: ResponseStore,
        planned: PlannedTurn,
        record: Record,
        writer: Writer,
        named: Named,
        *,
        is_stored: bool,
        tell: Callable[[Record], Awaitable[None]],
        plan_whole: Callable[[], Awaitable[PlannedTurn]],
    ) -> None:
        self._server = server
        self._store = store
        self._planned = planned
        self._record = record
        self.writer = writer
        self._named = named
        self._is_stored = is_stored
        self._tell = tell
        self._plan_whole = plan_whole
        self.error: MalleeError | None = None  # of an answer that failed
        self._usage: UsageCounter | None = None
        self._drawn = DrawnTokens()
        self._text: TextStream | None = None

    def admit(self, visit: Visit) -> None:
        """Count its prompt. Raises QuotaExceeded."""
        plan, gateway = self._planned.plan, self._server.gateway
        visit.begin(1, plan.prompt_tokens)
        self._usage = UsageCounter(plan.prompt_tokens, visit.charge)
        if plan.keeps:
            with visit.making(plan.prompt_tokens, gateway.capsules.is_kept) as keep:
                self._usage = UsageCounter(plan.prompt_tokens, visit.charge, keep)

    async def open(self, prepare_s: float) -> TextDelta:
        """Start it; its first delta. Raises MalleeError, with nothing running."""
        try:
            return await self._begin(prepare_s, self._named)
        except (NotFound, LookupIncomplete, CapsuleStale):
            if not isinstance(self._planned.plan.jobs[0], ForkJob):
                raise
        self._planned = await self._plan_whole()
        again = self._server.named(self._record.scope, self._named.bound)
        return await self._begin(prepare_s, again)

    async def _begin(self, prepare_s: float, named: Named) -> TextDelta:
        plan, self._drawn = self._planned.plan, DrawnTokens()
        self._text = await self._server.start(
            plan, prepare_s, named=named, observers=(self._drawn,)
        )
        try:
            first = await anext(self._text)
            if isinstance(first.error, (NotFound, CapsuleStale)):
                raise first.error
        except BaseException:
            await self._text.aclose()
            raise
        return first

    @property
    def worker(self) -> str:
        assert self._text is not None
        return self._text.streams[0].worker

    async def events(self, first: TextDelta) -> AsyncGenerator[list[dict[str, Any]], None]:
        """All events, in groups; errors are events too. The record is stored before the last."""
        text, usage, writer = self._text, self._usage, self.writer
        assert text is not None
        assert usage is not None
        cost = LOGPROBS_COST if self._planned.plan.logprobs else 1
        found, owed, delta = writer.begin(), 0, first
        try:
            while True:
                usage.add(delta)
                found += writer.add(delta)
                owed += delta.num_tokens * cost
                if delta.finish is not None:
                    break
                waiting = text.take() if owed < TURN_TOKENS else None
                if waiting is None:
                    yield found
                    found = []
                    if owed >= TURN_TOKENS:
                        owed = 0
                        await asyncio.sleep(0)
                    waiting = await anext(text)
                delta = waiting
            if delta.error is not None:
                raise delta.error
            found += writer.finish(delta)
            await self._leave(delta)
            found += self._ended(delta, usage)
        except MalleeError as error:
            found += self._failed(error)
        except Exception:
            number = self._server.new_id()
            log.exception("request %s failed after its first byte", number)
            found += self._failed(unexpected(number))
        yield found

    async def close(self) -> None:
        """End what runs. Idempotent."""
        if self._text is not None:
            await self._text.aclose()

    def cancelled(self) -> list[dict[str, Any]]:
        """It was ended early by its client."""
        events = self.writer.cancel(self._usage)
        self._keep()
        return events

    def failed_early(self, error: Exception) -> list[dict[str, Any]]:
        """It never began. A bug is logged."""
        if not isinstance(error, MalleeError):
            number = self._server.new_id()
            log.error("request %s failed", number, exc_info=error)
            error = unexpected(number)
        return [*self.writer.begin(), *self._failed(error)]

    def _failed(self, error: MalleeError) -> list[dict[str, Any]]:
        self.error = error
        events = self.writer.fail(error, self._usage)
        self._keep()
        return events

    async def _leave(self, last: TextDelta) -> None:
        """Have the record, and its conversation, go on after the answer. Raises MalleeError."""
        planned, record = self._planned, self._record
        record.turn = Turn(planned.turn, self.writer.answer())
        prompt_tokens = planned.plan.prompt_tokens
        num_drawn = last.boundary - prompt_tokens
        if last.capsule is not None and 0 <= num_drawn <= len(self._drawn.tokens):
            drawn = as_tokens(self._drawn.tokens[:num_drawn])
            asked = planned.asked or (prompt_tokens, planned.turn)
            record.left = Left(last.capsule, prompt_tokens, drawn, asked)
        try:
            await self._tell(record)
        except MalleeError:
            record.turn = record.left = None
            raise

    def _ended(self, last: TextDelta, usage: UsageCounter) -> list[dict[str, Any]]:
        more = {"turn": self._planned.how, "new_tokens": self._planned.new_tokens}
        events = self.writer.end(last, usage, more, int(self._server.clock()))
        self._keep()
        return events

    def recount(self) -> None:
        """Count the events that came since the record was stored."""
        self._store.recount(self._record)

    def _keep(self) -> None:
        self._record.is_running = False
        if self._is_stored:
            self._record.measure()
            self._store.keep(self._record)


class Background:
    """A response that runs without a client: its events so far, for readers that come and go.

    It counts in the use of its `tenant`'s key. Raises QuotaExceeded.
    """

    def __init__(
        self, run: Run, record: Record, visit: Visit, *, tenant: str, streams: bool
    ) -> None:
        with ExitStack() as stay:
            run.admit(stay.enter_context(visit.staying()))
            self._stay = stay.pop_all()
        self.run = run
        self.tenant = tenant
        self.record = record
        self.streams = streams
        self._news = asyncio.Event()
        self.is_over = self.is_ending = False
        self.task: asyncio.Task[None] | None = None

    async def work(self) -> None:
        """Run it to its end. Errors become its own."""
        try:
            first = await self.run.open(0.0)
            async for events in self.run.events(first):
                self._add(events)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:
            self._add(self.run.failed_early(error))
        finally:
            try:
                await self.run.close()
            finally:
                self.finish()

    def finish(self) -> None:
        """Idempotent."""
        self._stay.close()
        self.run.recount()
        self.is_over = True
        self._news.set()

    def cancel(self) -> None:
        """It is ended early, though it may be over or never have begun."""
        if self.record.is_running:
            self._add(self.run.cancelled())

    def _add(self, events: list[dict[str, Any]]) -> None:
        if self.streams:
            self.record.events += map(sse, events)
        self._news.set()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events from number `after` + 1 on, those to come too."""
        sent = after + 1
        while True:
            self._news.clear()
            waiting = self.record.events[sent:]
            if waiting:
                sent += len(waiting)
                yield b"".join(waiting)  # others may come meanwhile
            elif self.is_over:
                return
            else:
                await self._news.wait()
