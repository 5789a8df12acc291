"""The run of one response: its plan is started, its deltas are written, its state after that is found."""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from mallee.api.answers import UsageCounter
from mallee.api.deltas import TextDelta, TextStream, TokenChance, finite
from mallee.api.errors import unexpected
from mallee.api.responses.store import Left, Record, State
from mallee.api.responses.turns import PlannedTurn
from mallee.api.responses.writing import Writer, ending
from mallee.api.serve import LOGPROBS_COST, TURN_TOKENS, Named, Server
from mallee.api.text.conversation import Message
from mallee.gateway.access.visits import Visit
from mallee.gateway.gateway import Gateway
from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.gateway.requests.observers import Observer
from mallee.protocol.errors import (
    CapsuleStale,
    LookupIncomplete,
    MalleeError,
    NotFound,
    PeerSilent,
    StoreAway,
    Unavailable,
)
from mallee.protocol.ids import Scope
from mallee.protocol.messages import pack_tokens
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

    `tell(state)` is awaited once the output is whole. `plan_whole()` is a plan without a capsule, if that was
    lost since this was planned.
    """

    def __init__(
        self,
        server: Server,
        scope: Scope,
        planned: PlannedTurn,
        writer: Writer,
        named: Named,
        *,
        tell: Callable[[State], Awaitable[None]],
        plan_whole: Callable[[], Awaitable[PlannedTurn]],
    ) -> None:
        self._server = server
        self.scope = scope
        self._planned = planned
        self.writer = writer
        self._named = named
        self._tell = tell
        self._plan_whole = plan_whole
        self.error: MalleeError | None = None  # of an answer that failed
        self._state: State | None = None  # after one that did not
        self._usage: UsageCounter | None = None
        self._drawn = DrawnTokens()
        self._prompt_ids: list[int] = []  # if ids are returned
        self._ids: list[int] = []  # the same, of the answer
        self._chances: list[TokenChance] = []
        self._num_told = 0  # of them, in events
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
        except (NotFound, LookupIncomplete, PeerSilent, StoreAway, CapsuleStale):
            if not isinstance(self._planned.plan.jobs[0], ForkJob):
                raise
        self._planned = await self._plan_whole()
        again = self._server.named(self.scope, self._named.bound)
        return await self._begin(prepare_s, again)

    async def _begin(self, prepare_s: float, named: Named) -> TextDelta:
        plan, self._drawn = self._planned.plan, DrawnTokens()
        if plan.returns_ids:
            plan = await self._server.with_prefix(plan)
            self._prompt_ids = plan.whole_prompt_ids(0)
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

    def record(self, num_events: int | None = None) -> Record:
        """The response as it is now."""
        body, gateway = self.writer.shown, self._server.gateway.peers.gateway
        return Record(body, self._planned.items, gateway, num_events, self._state)

    def last(self) -> dict[str, Any]:
        """The last event, once it is over."""
        return ending(self.writer.shown, self.writer.num_events)

    async def events(self, first: TextDelta) -> AsyncGenerator[list[dict[str, Any]], None]:
        """All events but the last, in groups; errors are events too."""
        text, usage, writer = self._text, self._usage, self.writer
        assert text is not None
        assert usage is not None
        cost = LOGPROBS_COST if self._planned.plan.logprobs else 1
        found, owed, delta = writer.begin(), 0, first
        returns_ids = self._planned.plan.returns_ids
        if returns_ids:
            found[0]["prompt_token_ids"] = self._prompt_ids
        try:
            while True:
                usage.add(delta)
                if returns_ids:
                    self._ids += delta.tokens
                    self._chances += delta.chances
                found += self._with_ids(writer.add(delta))
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
            found += self._with_ids(writer.finish(delta))
            state = self._left(delta)
            await self._tell(state)
            more: dict[str, Any] = {
                "turn": self._planned.how,
                "new_tokens": self._planned.new_tokens,
            }
            if returns_ids:
                self._num_told = 0
                more |= {"prompt_token_ids": self._prompt_ids, **self._taken_ids()}
            writer.end(delta, usage, more, int(self._server.clock()))
            self._state = state
        except MalleeError as error:
            found += self.failed(error)
        except Exception:
            number = self._server.new_id()
            log.exception("request %s failed after its first byte", number)
            found += self.failed(unexpected(number))
        yield found

    def _with_ids(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The events, the last of which has the ids that none before it had, if ids are returned."""
        if events and len(self._ids) > self._num_told:
            events[-1] |= self._taken_ids()
        return events

    def _taken_ids(self) -> dict[str, Any]:
        begin, self._num_told = self._num_told, len(self._ids)
        found: dict[str, Any] = {"token_ids": self._ids[begin:]}
        if self._planned.plan.logprobs:
            chances = self._chances[begin:]
            found["token_logprobs"] = [finite(chance.logprob) for chance in chances]
        return found

    async def close(self) -> None:
        """End what runs. Idempotent."""
        if self._text is not None:
            await self._text.aclose()

    def cancelled(self) -> list[dict[str, Any]]:
        """It was ended early by its client."""
        return self.writer.cancel(self._usage)

    def failed_early(self, error: Exception) -> list[dict[str, Any]]:
        """It never began. A bug is logged."""
        if not isinstance(error, MalleeError):
            number = self._server.new_id()
            log.error("request %s failed", number, exc_info=error)
            error = unexpected(number)
        return [*self.writer.begin(), *self.failed(error)]

    def failed(self, error: MalleeError) -> list[dict[str, Any]]:
        self.error, self._state = error, None
        return self.writer.fail(error, self._usage)

    def _left(self, last: TextDelta) -> State:
        return state_after(self._planned, self.writer.answer(), self._drawn, last)


def state_after(
    planned: PlannedTurn, answer: Sequence[Message], drawn: DrawnTokens, last: TextDelta
) -> State:
    """The conversation up to the answer, and its capsule."""
    left, prompt_tokens = None, planned.plan.prompt_tokens
    num_drawn = last.boundary - prompt_tokens
    if last.capsule is not None and 0 <= num_drawn <= len(drawn.tokens):
        left = Left(
            last.capsule,
            prompt_tokens,
            pack_tokens(drawn.tokens[:num_drawn]),
            *(planned.asked or (prompt_tokens, len(planned.turns) - 1)),
        )
    return State.of(planned.head, (*planned.turns, tuple(answer)), left)


async def has_capsule_after(gateway: Gateway, state: State, scope: Scope) -> bool:
    """Whether the capsule after an answer can be forked here, of these weights."""
    left = state.left
    if left is None:
        return False
    try:
        info = await gateway.capsules.show(left.capsule, scope)
    except (NotFound, Unavailable):  # the whole conversation is here
        return False
    return not info.is_stale and info.boundary == left.num_tokens
