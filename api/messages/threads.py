"""Anthropic's threads: conversations that are stored by the id of each answer, and gone on from its capsule.

An answer may be gone on from many times: each is a fork. Instructions and tools stay as they were at the
beginning.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

from mallee.api.deltas import TextDelta
from mallee.api.responses.conversations import Conversations
from mallee.api.responses.running import DrawnTokens, state_after
from mallee.api.responses.store import State
from mallee.api.responses.turns import PlannedTurn
from mallee.api.text.conversation import Message, ToolCall, sound_arguments
from mallee.protocol.errors import InvalidParameter, StoreAway, StoreFull, ThreadNotFound
from mallee.protocol.ids import Scope

_log: Final = logging.getLogger(__name__)


def previous_of(thread: Any) -> str | None:
    """The id of the answer that is gone on from; None: the thread begins. Raises InvalidParameter."""
    match thread:
        case {"type": "create"}:
            return None
        case {"type": "continue", "previous_message_id": str(name)}:
            return name
    remedy = 'give {"type": "create"}, or {"type": "continue", "previous_message_id": ...}'
    raise InvalidParameter("thread", thread, remedy)


class ThreadKeeper:
    """Stores the state after one answer of a thread, once that is whole; a `Keeper`."""

    def __init__(self, threads: Conversations, scope: Scope, planned: PlannedTurn) -> None:
        self._threads = threads
        self._scope = scope
        self._planned = planned
        self._drawn = DrawnTokens()
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []
        self._last: TextDelta | None = None

    @property
    def observers(self) -> Sequence[DrawnTokens]:
        return (self._drawn,)

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._thoughts.append(delta.reasoning)
        for call in delta.calls:
            if call.id:
                self._calls.append(ToolCall(call.id, call.name, ""))
            last = self._calls[-1]
            self._calls[-1] = last._replace(arguments=last.arguments + call.arguments)
        if delta.finish is not None:
            self._last = delta

    async def ended(self, name: str) -> None:
        """Without a store the answer is as it is, and its thread is not found later."""
        assert self._last is not None, "the answer is unfinished"
        calls = [call._replace(arguments=sound_arguments(call.arguments)) for call in self._calls]
        said = Message("assistant", "".join(self._texts), "".join(self._thoughts), tuple(calls))
        state = state_after(self._planned, (said,), self._drawn, self._last)
        try:
            await self._threads.keep_state(self._scope, name, state)
        except (StoreAway, StoreFull) as error:
            _log.warning("the thread of message %s is not stored: %s", name, error)


async def find_state(threads: Conversations, scope: Scope, name: str) -> State:
    """The state after the answer `name`. Raises ThreadNotFound."""
    try:
        state = await threads.state(scope, name)
    except StoreAway:
        state = None
    if state is None:
        raise ThreadNotFound(name)
    return state
