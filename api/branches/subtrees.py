"""The end of all below a capsule, whichever gateways run it.

A gateway remembers the requests that it began, so a subtree whose requests came to several gateways is found
in turns: each tells what of it began there below what is known, until none knows more.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from mallee.gateway.gateway import Gateway
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import Unavailable
from mallee.protocol.ids import CapsuleId, Scope

MAX_ORIGINS: Final = 4096  # of one question: a broker takes 1 MiB at once
_BELOW: Final = "branches.below"


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A `Subtree` on the wire."""

    requests: list[str]
    ended: list[str]
    left: list[str]


_decode_origins: Final = Decoder(list[str], "origins of a subtree")
_decode_part: Final = Decoder(_Part, "a part of a subtree")


class Subtrees:
    """One gateway's side: it ends what began here, and has the others do so."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        gateway.peers.share(_BELOW, self._tell)

    async def prune(self, capsule: CapsuleId, scope: Scope) -> tuple[list[str], list[CapsuleId]]:
        """End the whole subtree: its requests that were not over, and the capsules that all of them left.

        Raises UnknownCapsule, and Unavailable if another gateway doesn't answer; what was found until
        then has ended, and is found again.
        """
        ended: set[str] = set()
        left: set[str] = set()
        asked: set[str] = set()
        unasked: set[str] = {capsule}
        while unasked:
            here = self._here(capsule, unasked, scope)
            origins = (unasked | {*here.requests}) - asked
            asked |= origins
            others = await self._others(capsule, scope, sorted(origins))
            for part in (here, *others):
                ended.update(part.ended)
                left.update(part.left)
            unasked = {name for part in others for name in part.requests} - asked
        return sorted(ended), [CapsuleId(name) for name in sorted(left)]

    def _here(self, capsule: CapsuleId, origins: Iterable[str], scope: Scope) -> _Part:
        names = [CapsuleId(name) for name in origins]
        part = self._gateway.requests.prune_below(capsule, names, scope)
        return _Part([*part.requests], [*part.ended], [*part.left])

    async def _others(self, capsule: CapsuleId, scope: Scope, origins: list[str]) -> list[_Part]:
        found: list[_Part] = []
        for i in range(0, len(origins), MAX_ORIGINS):
            given = encode(origins[i : i + MAX_ORIGINS])
            raws, is_whole = await self._gateway.peers.ask_all(_BELOW, capsule, scope, given=given)
            found += map(_decode_part, raws)
            if not is_whole:
                raise Unavailable(
                    f"not every gateway has ended its part of what is below {capsule}; send this again"
                )
        return found

    async def _tell(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        part = self._here(CapsuleId(key), _decode_origins(given), scope)
        return encode(part) if part.requests else None
