"""Stored responses, bounded: what a request needs that goes on from one."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any, Final, NamedTuple

import msgspec

from mallee.api.text.conversation import Conversation, Message
from mallee.protocol.errors import NotFound
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, Scope
from mallee.runtime.config import ResponsesSettings

TURN_NBYTES: Final = 500
RECORD_NBYTES: Final = 2000
MESSAGE_NBYTES: Final = 300
_encoder: Final = msgspec.json.Encoder()


class UnknownResponse(NotFound):
    """No such response, or one of another scope, or one that was forgotten."""

    code = "response_not_found"

    def __init__(self, name: str, param: str | None = None) -> None:
        super().__init__(
            f"response {name[:80]!r} is not stored here: it was deleted, forgotten, made with store=false or"
            " never was; send the conversation itself",
            param=param,
        )


def num_chars(value: Any) -> int:
    """Of its JSON."""
    return len(_encoder.encode(value))


class Turn:
    """Messages after those of `parent`. Counted by its store while a record or a later turn is there."""

    __slots__ = ("messages", "nbytes", "num_users", "parent")

    def __init__(self, parent: "Turn | None", messages: tuple[Message, ...]) -> None:
        self.parent = parent
        self.messages = messages
        self.num_users = 0
        self.nbytes = TURN_NBYTES + sum(map(_nbytes, messages))

    def path(self) -> "Iterator[Turn]":
        """It and those before it, the last first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def conversation(self) -> list[Message]:
        """All messages, from the first on."""
        turns = [*self.path()][::-1]
        return [message for turn in turns for message in turn.messages]


def _nbytes(message: Message) -> int:
    nbytes = MESSAGE_NBYTES + len(message.text) + len(message.reasoning)
    for call in message.tool_calls:
        nbytes += len(call.arguments) + MESSAGE_NBYTES
    return nbytes


@dataclass(slots=True)
class Left:
    """The state after an answer: a capsule whose first `prompt_tokens` are its prompt, `drawn` the rest.

    `asked`: tokens of the prompt that ended with the last question of a user, of which `turn` is the turn.
    """

    capsule: CapsuleId
    prompt_tokens: int
    drawn: Tokens
    asked: tuple[int, Turn]


@dataclass(slots=True)
class Record:
    """A response. `head`: its instructions, functions and variables; `turn`: up to its answer.

    Or a conversation: `items` are all of it, the other fields those of its last answer, which follow from the
    first `num_covered` items.
    """

    id: str
    scope: Scope
    body: dict[str, Any]
    items: list[dict[str, Any]]
    head: Conversation
    turn: Turn | None = None
    left: Left | None = None
    num_chars: int = 0  # of body and items
    events: list[bytes] = field(default_factory=list)
    is_running: bool = False
    is_copy: bool = False  # another gateway made it, and has its events
    num_covered: int = 0

    def measure(self) -> None:
        """Count body and items as they are now."""
        self.num_chars = num_chars(self.body) + num_chars(self.items)

    @property
    def nbytes(self) -> int:
        drawn = 0 if self.left is None else self.left.drawn.nbytes
        return RECORD_NBYTES + 2 * self.num_chars + drawn + sum(map(len, self.events))


class _Kept(NamedTuple):
    """A record as it was counted."""

    record: Record
    used: float
    nbytes: int
    turn: Turn | None


class ResponseStore:
    """Responses of one gateway. Belongs to its event loop; `clock` gives seconds.

    Beyond its bounds, and `ttl_s` after their last use, responses are forgotten, those that run excepted.
    """

    def __init__(self, settings: ResponsesSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._records: OrderedDict[str, _Kept] = OrderedDict()
        self._of_scope: dict[Scope, set[str]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def keep(self, record: Record) -> None:
        """Remember `record` as it is now."""
        self._drop(record.id)
        if record.turn is not None:
            self._use(record.turn)
        nbytes = record.nbytes
        self.nbytes += nbytes
        self._records[record.id] = _Kept(record, self._clock(), nbytes, record.turn)
        self._of_scope.setdefault(record.scope, set()).add(record.id)
        self._shrink()

    def recount(self, record: Record) -> None:
        """Count `record` as it is now, if it is still remembered."""
        if record.id in self._records:
            self.keep(record)

    def get(self, name: str, scope: Scope, param: str | None = None) -> Record:
        """Raises UnknownResponse, alike for one of another scope."""
        self._shrink()
        found = self._records.get(name)
        if found is None or found.record.scope != scope:
            raise UnknownResponse(name, param)
        self._records[name] = found._replace(used=self._clock())
        self._records.move_to_end(name)
        return found.record

    def page(self, scope: Scope, prefix: str, after: str, most: int) -> list[Record]:
        """The first `most` of `scope` whose ids begin with `prefix` and come after `after`, by id.

        It is no use of them. O(records of `scope`).
        """
        self._shrink()
        names = self._of_scope.get(scope, ())
        later = (name for name in names if name.startswith(prefix) and name > after)
        return [self._records[name].record for name in nsmallest(most, later)]

    def forget(self, record: Record) -> None:
        self._drop(record.id)

    def check(self) -> None:
        """Raises AssertionError unless bytes and users follow from the records."""
        users: dict[int, int] = {}
        turns: dict[int, Turn] = {}
        fresh = [kept.turn for kept in self._records.values() if kept.turn is not None]
        while fresh:
            turn = fresh.pop()
            turns[id(turn)] = turn
            users[id(turn)] = users.get(id(turn), 0) + 1
            if users[id(turn)] == 1 and turn.parent is not None:
                fresh.append(turn.parent)
        assert all(turns[key].num_users == n for key, n in users.items()), "users differ"
        own = sum(kept.nbytes for kept in self._records.values())
        names = {name for each in self._of_scope.values() for name in each}
        assert names == self._records.keys(), "names differ"
        assert all(self._of_scope.values()), "a scope has nothing"
        assert self.nbytes == own + sum(turn.nbytes for turn in turns.values()), "bytes differ"

    def _shrink(self) -> None:
        most, oldest = self._settings.max_mib << 20, self._clock() - self._settings.ttl_s
        while self._records:
            is_over = len(self) > self._settings.max_count or self.nbytes > most
            # Of those that run there are few, and they stay.
            ended = (each for each in self._records.values() if not each.record.is_running)
            kept = next(ended, None)
            if kept is None or not (is_over or kept.used < oldest):
                return
            self._drop(kept.record.id)

    def _drop(self, name: str) -> None:
        found = self._records.pop(name, None)
        if found is not None:
            self.nbytes -= found.nbytes
            names = self._of_scope[found.record.scope]
            names.discard(name)
            if not names:
                del self._of_scope[found.record.scope]
            if found.turn is not None:
                self._leave(found.turn)

    def _use(self, turn: Turn) -> None:
        for step in turn.path():
            step.num_users += 1
            if step.num_users > 1:
                return
            self.nbytes += step.nbytes

    def _leave(self, turn: Turn) -> None:
        for step in turn.path():
            step.num_users -= 1
            if step.num_users:
                return
            self.nbytes -= step.nbytes
