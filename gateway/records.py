"""Records that gateways keep in memory, found from every gateway: each asks the others for what it lacks.

Names are those of requests and are never given twice, so a record that was deleted is never asked for again.
What is to outlive its gateway is copied to all others as it comes. What a client has just been told is
asked for here, and not sent to all gateways before the client is answered: most of it is never used
elsewhere, and a question takes one round trip.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NamedTuple

from mallee.protocol.codec import encode
from mallee.protocol.errors import LookupIncomplete, MalleeError, Unavailable, from_wire
from mallee.protocol.gateways.shared_records import (
    RecordAsk,
    RecordCopied,
    RecordForgotten,
    RecordTold,
    decode_record_ask,
    decode_record_copied,
    decode_record_forgotten,
    decode_record_told,
)
from mallee.protocol.ids import Scope
from mallee.protocol.subjects import Subjects
from mallee.runtime.bus.bus import Bus
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

ASK_S: Final = 0.5  # the longest wait for the others' answers
MAX_ASKED: Final = 1024  # records at once; what is beyond isn't asked for
MAX_FORGOTTEN: Final = 4096  # names whose late answers are refused
PART_NBYTES: Final = 512 << 10  # of an answer in one message: a broker takes 1 MiB at once
MAX_PARTS: Final = 64  # of one answer

Tell = Callable[[str, Scope, bytes], Awaitable[bytes | None]]
"""The record of a name, if it is here and of that scope; the last is what the question gives for it.

A MalleeError that it raises is the answer instead.
"""

Hear = Callable[[str, Scope, bytes], None]
"""Takes a copy of a record of another gateway, or what is new in it."""


class _Key(NamedTuple):
    kind: str
    name: str
    scope: Scope


class _Asked:
    """A question under way."""

    __slots__ = ("ended", "error", "found", "key", "parts", "silent", "wants_all")

    def __init__(self, key: _Key, others: Collection[str], *, wants_all: bool) -> None:
        self.key = key
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.found: list[bytes] = []
        self.error: MalleeError | None = None
        self.silent = set(others)  # gateways that have not answered
        self.parts: dict[str, list[bytes]] = {}  # of answers whose end has not come, by gateway
        self.wants_all = wants_all

    def hear(self, told: RecordTold) -> None:
        if told.error is not None:
            self.error = from_wire(told.error)
        if told.record is not None:
            parts = self.parts.setdefault(told.gateway, [])
            parts.append(told.record)
            if told.has_more:
                return
            self.found.append(b"".join(parts))
            del self.parts[told.gateway]
        self.silent.discard(told.gateway)
        is_found = self.found or self.error is not None
        if not self.silent or (is_found and not self.wants_all):
            self.settle()

    def settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class SharedRecords:
    """One gateway's share. Belongs to its event loop.

    `others()`: names of the gateways that will answer; None: this one is alone for good.
    `belongs(name, scope)` tells from the name alone whether it was made for that scope: what wasn't is
    neither asked for nor told.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        gateway: str,
        fleet: str,
        others: Callable[[], Collection[str] | None],
        belongs: Callable[[str, Scope], bool],
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._subjects = Subjects.of(fleet)
        self._others = others
        self._belongs = belongs
        self._tell: dict[str, Tell] = {}
        self._on_forgotten: dict[str, Callable[[str, Scope], None]] = {}
        self._on_copied: dict[str, Hear] = {}
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0
        self._forgotten: OrderedDict[_Key, None] = OrderedDict()
        self.outcomes: Counter[str] = Counter()  # of questions: found, unknown, unanswered
        self.tasks = Tasks("the gateways' records")

    async def start_up(self) -> None:
        """Answer, and listen to answers, from now on. Doesn't wait for the broker."""
        await self._bus.subscribe(self._subjects.record_asks(), self._on_ask)
        await self._bus.subscribe(self._subjects.record_told(self._gateway), self._on_told)
        await self._bus.subscribe(self._subjects.records_forgotten(), self._on_told_forgotten)
        await self._bus.subscribe(self._subjects.records_copied(), self._on_told_copied)

    async def close(self) -> None:
        await self.tasks.close()

    def share(
        self,
        kind: str,
        tell: Tell,
        on_forgotten: Callable[[str, Scope], None] = lambda name, scope: None,
        on_copied: Hear = lambda name, scope, record: None,
    ) -> None:
        """Answer others' questions for a kind of records with `tell`.

        `on_forgotten` is called when a client deletes one at another gateway, `on_copied` with each copy.
        """
        self._tell[kind] = tell
        self._on_forgotten[kind] = on_forgotten
        self._on_copied[kind] = on_copied

    async def fetch(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> bytes | None:
        """The record as another gateway tells it, which gets `given`; None: no other gateway has it.

        Raises the error that it told instead; and LookupIncomplete: none has told it, and not all have said
        that they don't have it.
        """
        key = _Key(kind, name, scope)
        if not self._is_to_ask(key):
            return None
        asked = await self._ask(key, given, wait_s, wants_all=False)
        if asked.error is not None:
            raise asked.error
        if asked.found:
            return asked.found[0]
        if asked.silent and key not in self._forgotten:
            num = len(asked.silent)
            raise LookupIncomplete(f"{num} other gateways have not answered in {wait_s:g} s")
        return None

    @property
    def has_others(self) -> bool:
        """Whether there are gateways to ask, and to copy to."""
        return bool(self._others())

    @property
    def is_up(self) -> bool:
        """Whether other gateways can be asked now."""
        return self._bus.is_up

    async def gather(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> tuple[list[bytes], bool]:
        """The records of all others under a name, and whether each has answered in time."""
        key = _Key(kind, name, scope)
        if not self.has_others or not self._is_to_ask(key):
            return [], True
        try:
            asked = await self._ask(key, given, wait_s, wants_all=True)
        except LookupIncomplete:
            return [], False
        return asked.found, not asked.silent and asked.error is None

    def _is_to_ask(self, key: _Key) -> bool:
        """False: it is certain without a question that no other gateway has it."""
        others = self._others()
        is_alone = others is None or (self._bus.is_up and not others)
        return not is_alone and self._belongs(key.name, key.scope) and key not in self._forgotten

    async def _ask(self, key: _Key, given: bytes, wait_s: float, *, wants_all: bool) -> _Asked:
        """The question once it is answered or its time is over. Raises LookupIncomplete."""
        if not self._bus.is_up:
            self.outcomes["unanswered"] += 1
            raise LookupIncomplete("other gateways can't be asked: the broker is away")
        if len(self._asked) >= MAX_ASKED:
            self.outcomes["unanswered"] += 1
            raise LookupIncomplete(f"{MAX_ASKED} questions to other gateways wait already")
        self._num_asked += 1
        number = self._num_asked
        asked = _Asked(key, self._others() or (), wants_all=wants_all)
        self._asked[number] = asked
        ask = RecordAsk(self._gateway, number, *key, given)
        self._bus.publish(self._subjects.record_asks(), encode(ask))
        try:
            async with asyncio.timeout(wait_s):
                await asked.ended
        except TimeoutError:
            asked.silent &= set(self._others() or ())  # others are gone by now
            log.info("%d gateways did not answer for a record in %g s", len(asked.silent), wait_s)
        finally:
            del self._asked[number]
        if key in self._forgotten:
            asked.found.clear()
        outcome = "found" if asked.found else "unanswered" if asked.silent else "unknown"
        self.outcomes[outcome] += 1
        return asked

    def copy(self, kind: str, name: str, scope: Scope, record: bytes, *, to: str = "") -> None:
        """Have all other gateways, or the one `to`, hear a record, or what is new in it.

        At most once, and soon.
        """
        if self.has_others:
            raw = encode(RecordCopied(self._gateway, kind, name, scope, record, to))
            self._bus.publish(self._subjects.records_copied(), raw)

    def forget(self, kind: str, name: str, scope: Scope) -> None:
        """Have all other gateways forget a record that was deleted here."""
        self._mark_forgotten(_Key(kind, name, scope))
        raw = encode(RecordForgotten(kind, name, scope))
        self._bus.publish(self._subjects.records_forgotten(), raw)

    def _mark_forgotten(self, key: _Key) -> None:
        self._forgotten[key] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)
        for asked in self._asked.values():
            if asked.key == key:
                asked.settle()

    def _on_ask(self, raw: bytes) -> None:
        ask = decode_record_ask(raw)
        if ask.gateway == self._gateway:
            return
        key = _Key(ask.kind, ask.name, Scope(ask.scope))
        tell = self._tell.get(key.kind)
        if tell is None or key in self._forgotten or not self._belongs(key.name, key.scope):
            self._answer(ask, None)
        else:
            self.tasks.spawn(self._told(ask, tell, key))

    async def _told(self, ask: RecordAsk, tell: Tell, key: _Key) -> None:
        try:
            self._answer(ask, await tell(key.name, key.scope, ask.given))
        except MalleeError as error:
            self._answer(ask, None, error)
        except Exception:  # event pump: one bad record must not end the answers to others
            log.exception("a record could not be told")  # nor is it said that there is none

    def _answer(
        self, ask: RecordAsk, record: bytes | None, error: MalleeError | None = None
    ) -> None:
        """Tell it, in parts that the broker takes. Raises Unavailable: it is too long."""
        num_parts = max(1, -(-len(record or b"") // PART_NBYTES))
        if num_parts > MAX_PARTS:
            raise Unavailable(
                f"it is at another gateway, and its {len(record or b'')} bytes are more than the"
                f" {MAX_PARTS * PART_NBYTES} that are passed on"
            )
        wire = None if error is None else error.to_wire()
        for i in range(num_parts):
            part = record and record[i * PART_NBYTES : (i + 1) * PART_NBYTES]
            told = RecordTold(ask.number, part, self._gateway, i + 1 < num_parts, wire)
            self._bus.publish(self._subjects.record_told(ask.gateway), encode(told))

    def _on_told(self, raw: bytes) -> None:
        told = decode_record_told(raw)
        asked = self._asked.get(told.number)
        if asked is not None:  # else it comes too late
            asked.hear(told)

    def _on_told_forgotten(self, raw: bytes) -> None:
        gone = decode_record_forgotten(raw)
        key = _Key(gone.kind, gone.name, Scope(gone.scope))
        if key in self._forgotten or not self._belongs(key.name, key.scope):
            return  # it is our own message, or none of a gateway
        self._mark_forgotten(key)
        on_forgotten = self._on_forgotten.get(key.kind)
        if on_forgotten is not None:
            on_forgotten(key.name, key.scope)

    def _on_told_copied(self, raw: bytes) -> None:
        copied = decode_record_copied(raw)
        key = _Key(copied.kind, copied.name, Scope(copied.scope))
        on_copied = self._on_copied.get(key.kind)
        if copied.gateway == self._gateway or copied.to not in ("", self._gateway):
            return
        if on_copied is None or key in self._forgotten:
            return
        if self._belongs(key.name, key.scope):
            on_copied(key.name, key.scope, copied.record)
