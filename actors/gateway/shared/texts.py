"""The gateways' common memory of capsules' texts: each asks the others for what it doesn't know."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from msgspec import structs

from mallee.actors.bus.bus import Bus
from mallee.actors.tasks import Tasks
from mallee.protocol.codec import encode
from mallee.protocol.gateways.capsule_texts import (
    Promised,
    TextAsk,
    TextForgotten,
    TextTold,
    decode_ask,
    decode_forgotten,
    decode_told,
)
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import pack_tokens, unpack_tokens
from mallee.protocol.subjects import Subjects
from mallee.router.dispatch.token_memory import CapsuleTokens, TokenMemory, TokenPath

log = logging.getLogger(__name__)

ASK_S: Final = 0.5  # the longest wait for the others' answers
MAX_ASKED: Final = 1024  # capsules at once; what is beyond isn't asked for


class _Asked:
    """A question under way."""

    __slots__ = ("answer", "num_left")

    def __init__(self, num_others: int) -> None:
        self.answer: asyncio.Future[Promised | None] = asyncio.get_running_loop().create_future()
        self.num_left = num_others


class SharedTexts:
    """One gateway's share. Belongs to its event loop. `num_others`: gateways that will answer.

    `on_forgotten(capsule)` is called when a client releases a capsule, at this gateway or another.
    `promised(capsule)`: one that this gateway makes for the first time, or could not make.
    """

    def __init__(
        self,
        bus: Bus,
        memory: TokenMemory,
        *,
        gateway: str,
        fleet: str,
        num_others: Callable[[], int],
        on_forgotten: Callable[[CapsuleId], None],
        promised: Callable[[CapsuleId], Promised | None] = lambda capsule: None,
    ) -> None:
        self._bus = bus
        self._memory = memory
        self._gateway = gateway
        self._subjects = Subjects.of(fleet)
        self._num_others = num_others
        self._on_forgotten = on_forgotten
        self._promised = promised
        self._asked: dict[CapsuleId, _Asked] = {}
        self.tasks = Tasks("the gateways' memory of capsules")

    async def start_up(self) -> None:
        """Answer, and listen to answers, from now on. Doesn't wait for the broker."""
        await self._bus.subscribe(self._subjects.text_asks(), self._on_ask)
        await self._bus.subscribe(self._subjects.text_told(self._gateway), self._on_told)
        await self._bus.subscribe(self._subjects.texts_forgotten(), self._on_told_forgotten)

    async def close(self) -> None:
        await self.tasks.close()

    async def fetch(self, capsule: CapsuleId) -> Promised | None:
        """Ask the others for the text of `capsule`; returns when it is here, or nobody has it.

        Returns its promise, if another gateway has given that and has no text of it yet.
        """
        if capsule in self._memory or not self._bus.is_up or not self._num_others():
            return None
        asked = self._asked.get(capsule)
        if asked is None:
            if len(self._asked) >= MAX_ASKED:
                return None
            asked = self._asked[capsule] = _Asked(self._num_others())
            self._bus.publish(self._subjects.text_asks(), encode(TextAsk(self._gateway, capsule)))
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.shield(asked.answer)
        except TimeoutError:
            log.info("no gateway told the text of a capsule in %g s", ASK_S)
            return None
        finally:
            self._asked.pop(capsule, None)

    def want(self, capsule: CapsuleId) -> None:
        """As `fetch`, in the background: the text will be needed if the capsule's worker is lost."""
        if capsule not in self._memory and self._num_others():
            self.tasks.spawn(self._want(capsule))

    async def _want(self, capsule: CapsuleId) -> None:
        await self.fetch(capsule)

    def forget(self, capsule: CapsuleId) -> None:
        """Forget `capsule` here and everywhere."""
        self._memory.forget(capsule)
        self._on_forgotten(capsule)
        self._bus.publish(self._subjects.texts_forgotten(), encode(TextForgotten(capsule)))

    def leave_to(self, heir: str) -> None:
        """Have the gateway `heir` know the kept capsules that were made here, and answer for them."""
        for capsule, entry in self._memory.own_kept():
            told = structs.replace(_told(capsule, entry), is_left=True)
            self._bus.publish(self._subjects.text_told(heir), encode(told))

    def _on_ask(self, raw: bytes) -> None:
        ask = decode_ask(raw)
        if ask.gateway == self._gateway:
            return
        capsule = CapsuleId(ask.capsule)
        entry, promised = self._memory.get(capsule), self._promised(capsule)
        if promised is not None:
            told = TextTold(capsule, promised=promised)
        else:
            told = TextTold(capsule) if entry is None else _told(capsule, entry)
        self._bus.publish(self._subjects.text_told(ask.gateway), encode(told))

    def _on_told(self, raw: bytes) -> None:
        told = decode_told(raw)
        capsule = CapsuleId(told.capsule)
        asked = self._asked.get(capsule)
        if asked is None and not told.is_left:
            return  # too late, or deleted meanwhile
        if told.tokens is not None:
            path = TokenPath(None, unpack_tokens(told.tokens), told.scope)
            known = (told.grammar, told.ttl_s, told.weights, told.is_left, told.continuation)
            self._memory.keep(capsule, CapsuleTokens(path, *known))
        if asked is None:
            return
        asked.num_left -= 1
        is_found = told.tokens is not None or told.promised is not None
        if (is_found or asked.num_left <= 0) and not asked.answer.done():
            asked.answer.set_result(told.promised)

    def _on_told_forgotten(self, raw: bytes) -> None:
        capsule = CapsuleId(decode_forgotten(raw).capsule)
        self._memory.forget(capsule)
        self._on_forgotten(capsule)
        if (asked := self._asked.pop(capsule, None)) is not None and not asked.answer.done():
            asked.answer.set_result(None)


def _told(capsule: CapsuleId, entry: CapsuleTokens) -> TextTold:
    path = entry.path
    known = (path.scope, entry.grammar, entry.ttl_s, entry.weights, entry.continuation)
    return TextTold(capsule, pack_tokens(path.tokens()), *known)
