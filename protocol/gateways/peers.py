"""Messages between two gateways: a question for what one alone has, and its answer."""

from typing import Any, Final

import msgspec

from mallee.protocol.codec import Decoder


class PeerAsk(msgspec.Struct, frozen=True, array_like=True):
    """A question of some `kind` about a thing of `scope`; the kind says what is `given`."""

    kind: str
    name: str
    scope: str
    given: bytes = b""


class PeerTold(msgspec.Struct, frozen=True, array_like=True):
    """The answer; neither: there is no such thing. `error`: as `MalleeError.to_wire` has it."""

    answer: bytes | None = None
    error: tuple[str, str, dict[str, Any]] | None = None


decode_peer_ask: Final = Decoder(PeerAsk, "a question of a gateway")
decode_peer_told: Final = Decoder(PeerTold, "the answer of a gateway")
