"""Records that gateways keep in memory, found from every gateway: each asks the others for what it lacks.

Names are those of requests and are never given twice, so a record that was deleted is never asked for again.
What is to outlive its gateway is copied to all others as it comes.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from mallee.actors.bus.bus import Bus
from mallee.actors.tasks import Tasks
from mallee.protocol.codec import encode
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

log = logging.getLogger(__name__)

ASK_S: Final = 0.5  # the longest wait for the others' answers
MAX_ASKED: Final = 1024  # records at once; what is beyond isn't asked for
MAX_FORGOTTEN: Final = 4096  # names whose late answers are refused

Tell = Callable[[str, Scope, bytes], Awaitable[bytes | None]]
"""The record of a name, if it is here and of that scope; the last is what the question gives for it."""

Hear = Callable[[str, Scope, bytes], None]
"""Takes a copy of a record of another gateway, or what is new in it."""


class _Key(NamedTuple):
    kind: str
    name: str
    scope: Scope


class _Asked:
    """A question under way."""

    __slots__ = ("ended", "found", "key", "num_left", "wants_all")

    def __init__(self, key: _Key, num_others: int, *, wants_all: bool) -> None:
        self.key = key
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.found: list[bytes] = []
        self.num_left = num_others
        self.wants_all = wants_all

    def hear(self, record: bytes | None) -> None:
        self.num_left -= 1
        if record is not None:
            self.found.append(record)
        if self.num_left <= 0 or (self.found and not self.wants_all):
            self.settle()

    def settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class SharedRecords:
    """One gateway's share. Belongs to its event loop. `num_others`: gateways that will answer.

    `belongs(name, scope)` tells from the name alone whether it was made for that scope: what wasn't is
    neither asked for nor told.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        gateway: str,
        fleet: str,
        num_others: Callable[[], int],
        belongs: Callable[[str, Scope], bool],
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._subjects = Subjects.of(fleet)
        self._num_others = num_others
        self._belongs = belongs
        self._tell: dict[str, Tell] = {}
        self._on_forgotten: dict[str, Callable[[str, Scope], None]] = {}
        self._on_copied: dict[str, Hear] = {}
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0
        self._forgotten: OrderedDict[_Key, None] = OrderedDict()
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
        """The record as another gateway tells it, which gets `given`; None: no one does, or not in time."""
        return (await self.ask(kind, name, scope, given=given, wait_s=wait_s))[0]

    async def ask(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> tuple[bytes | None, bool]:
        """As `fetch`, and whether it is certain that no other has it, if it was not found."""
        if self._bus.is_up and not self._num_others():
            return None, True
        asked = await self._ask(_Key(kind, name, scope), given, wait_s, wants_all=False)
        if asked is None:
            return None, False
        return (asked.found[0] if asked.found else None), asked.num_left <= 0

    @property
    def has_others(self) -> bool:
        """Whether there are gateways to ask, and to copy to."""
        return self._num_others() > 0

    @property
    def is_up(self) -> bool:
        """Whether other gateways can be asked now."""
        return self._bus.is_up

    async def gather(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> tuple[list[bytes], bool]:
        """The records of all others under a name, and whether each has answered in time."""
        if not self._num_others():
            return [], True
        asked = await self._ask(_Key(kind, name, scope), given, wait_s, wants_all=True)
        return ([], False) if asked is None else (asked.found, asked.num_left <= 0)

    async def _ask(
        self, key: _Key, given: bytes, wait_s: float, *, wants_all: bool
    ) -> _Asked | None:
        """The question once it is answered or its time is over; None: it can't be asked."""
        num_others = self._num_others()
        if not self._belongs(key.name, key.scope) or key in self._forgotten:
            return None
        if not self._bus.is_up or not num_others or len(self._asked) >= MAX_ASKED:
            return None
        self._num_asked += 1
        number = self._num_asked
        asked = self._asked[number] = _Asked(key, num_others, wants_all=wants_all)
        ask = RecordAsk(self._gateway, number, *key, given)
        self._bus.publish(self._subjects.record_asks(), encode(ask))
        try:
            async with asyncio.timeout(wait_s):
                await asked.ended
        except TimeoutError:
            log.info("not every gateway answered for a record in %g s", wait_s)
        finally:
            del self._asked[number]
        return None if key in self._forgotten else asked

    def copy(self, kind: str, name: str, scope: Scope, record: bytes) -> None:
        """Have all other gateways hear a record, or what is new in it: at most once, and soon."""
        if self.has_others:
            raw = encode(RecordCopied(self._gateway, kind, name, scope, record))
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
        record = None
        try:
            record = await tell(key.name, key.scope, ask.given)
        except Exception:  # event pump: one bad record must not end the answers to others
            log.exception("a record could not be told")
        self._answer(ask, record)

    def _answer(self, ask: RecordAsk, record: bytes | None) -> None:
        raw = encode(RecordTold(ask.number, record))
        self._bus.publish(self._subjects.record_told(ask.gateway), raw)

    def _on_told(self, raw: bytes) -> None:
        told = decode_record_told(raw)
        asked = self._asked.get(told.number)
        if asked is not None:  # else it comes too late
            asked.hear(told.record)

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
        if copied.gateway == self._gateway or on_copied is None or key in self._forgotten:
            return
        if self._belongs(key.name, key.scope):
            on_copied(key.name, key.scope, copied.record)
