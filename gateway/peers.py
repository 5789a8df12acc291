"""Questions from gateway to gateway, for what one alone has: what runs there.

The id of a request names the gateway that made it, so one question is enough. What clients can name once it
has ended is in the store (`gateway.store`), where nobody has to be asked.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Final, TypeAlias

from mallee.gateway.shell import RequestIds
from mallee.protocol.codec import encode
from mallee.protocol.errors import MalleeError, PeerSilent, Unavailable, from_wire
from mallee.protocol.gateways.peers import (
    PeerAsk,
    PeerTold,
    decode_peer_ask,
    decode_peer_told,
)
from mallee.protocol.ids import COMMON, Scope
from mallee.protocol.subjects import Subjects
from mallee.runtime.bus.bus import Bus

ASK_S: Final = 2.0  # for an answer
LIFE_S: Final = 0.5  # for a sign of life of one that is not heard of
SETTLE_S: Final = 4.0  # in which all that live are heard of, though they find the broker later
MAX_ANSWER_NBYTES: Final = 768 << 10  # a broker takes 1 MiB at once by default

Answer: TypeAlias = Callable[[str, Scope, bytes], Awaitable[bytes | None]]
"""Gives what is here of a name in a scope, by what is asked; None: nothing. A MalleeError is told."""


class Peers:
    """One gateway's questions and answers. Belongs to its event loop.

    Those of all fleets that share a `store` hear them. `others()`: names of the other gateways of this fleet
    that live; None: this one is alone for good. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        gateway: str,
        store: str,
        others: Callable[[], Collection[str] | None],
        ids: RequestIds,
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self.gateway = gateway
        self._subjects = Subjects.of(store)
        self._others = others
        self._ids = ids
        self._clock = clock
        self._settled_at = math.inf
        self._answers: dict[str, Answer] = {}
        self.outcomes: Counter[str] = Counter()  # of questions: found, unknown, unanswered

    async def start_up(self) -> None:
        """Answer from now on. Doesn't wait for the broker."""
        self._bus.on_state(self._on_state)
        self._on_state(self._bus.is_up)
        await self._bus.serve(self._subjects.peers(self.gateway), self._on_ask)

    @property
    def others(self) -> Collection[str]:
        """The other gateways that live, as far as is known."""
        return self._others() or ()

    @property
    def knows_all(self) -> bool:
        """Whether `others` has every gateway that lives, but for one that has just begun."""
        return self._others() is None or self._clock() >= self._settled_at

    async def is_gone(self, gateway: str) -> bool:
        """Whether another gateway lives no more: it is not heard of, and does not answer.

        One of another fleet that shares the store is not heard of here, as while a fleet follows another.
        """
        if gateway in self.others or gateway == self.gateway or not self.knows_all:
            return False
        try:
            await self._bus.request(
                self._subjects.peers(gateway), encode(PeerAsk("", "", COMMON)), LIFE_S
            )
        except ConnectionError:
            return self.knows_all
        except TimeoutError:
            return True
        return False

    @property
    def is_alone(self) -> bool:
        """Whether there will never be another gateway."""
        return self._others() is None

    def share(self, kind: str, answer: Answer) -> None:
        """Answer the others' questions of a kind."""
        self._answers[kind] = answer

    async def ask(
        self,
        gateway: str,
        kind: str,
        name: str,
        scope: Scope,
        *,
        given: bytes = b"",
        wait_s: float = ASK_S,
    ) -> bytes | None:
        """The answer of one gateway; None: it has no such thing, or is gone.

        Raises the error that it tells instead, and PeerSilent.
        """
        asked = encode(PeerAsk(kind, name, scope, given))
        try:
            raw = await self._bus.request(self._subjects.peers(gateway), asked, wait_s)
        except TimeoutError as error:
            if not await self.is_gone(gateway):
                self.outcomes["unanswered"] += 1
                raise PeerSilent(f"none in {wait_s:g} s") from error
            told = PeerTold()
        except ConnectionError as error:
            if not self._bus.is_up:
                self.outcomes["unanswered"] += 1
                raise PeerSilent("the broker is away") from error
            told = PeerTold()
        else:
            told = decode_peer_told(raw)
        self.outcomes["unknown" if told == PeerTold() else "found"] += 1
        if told.error is not None:
            raise from_wire(told.error)
        return told.answer

    async def ask_maker(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> bytes | None:
        """The answer of the other gateway that made the request or capsule `name`; as `ask`.

        None also for what was made here, or for another scope.
        """
        if not self._ids.belongs(name, scope):
            return None
        for other in [each for each in self.others if self._ids.made_at(name, each)]:
            found = await self.ask(other, kind, name, scope, given=given, wait_s=wait_s)
            if found is not None:
                return found
        return None

    async def ask_all(
        self, kind: str, name: str, scope: Scope, *, given: bytes = b"", wait_s: float = ASK_S
    ) -> tuple[list[bytes], bool]:
        """The answers of all others, and whether each has answered in time."""

        async def one(gateway: str) -> bytes | None:
            return await self.ask(gateway, kind, name, scope, given=given, wait_s=wait_s)

        told = await asyncio.gather(*map(one, self.others), return_exceptions=True)
        for error in told:
            if isinstance(error, BaseException) and not isinstance(error, MalleeError):
                raise error
        is_whole = not any(isinstance(each, BaseException) for each in told)
        return [each for each in told if isinstance(each, bytes)], is_whole

    def _on_state(self, is_up: bool) -> None:
        self._settled_at = self._clock() + SETTLE_S if is_up else math.inf

    async def _on_ask(self, raw: bytes) -> bytes:
        asked = decode_peer_ask(raw)
        answer = self._answers.get(asked.kind)
        if answer is None:
            return encode(PeerTold())
        try:
            found = await answer(asked.name, Scope(asked.scope), asked.given)
            if len(found or b"") > MAX_ANSWER_NBYTES:
                raise Unavailable(
                    f"it is at another gateway, and its {len(found or b'')} bytes are more than the"
                    f" {MAX_ANSWER_NBYTES} that are passed on"
                )
        except MalleeError as error:
            return encode(PeerTold(error=error.to_wire()))
        return encode(PeerTold(found))
