"""Messages between gateways about the texts of capsules, so that each can compute them anew."""

from typing import Any, Final

import msgspec

from mallee.protocol.codec import Decoder
from mallee.protocol.ids import COMMON, Scope
from mallee.protocol.messages import Continuation, Grammar
from mallee.protocol.model import BASE_WEIGHTS, WeightVersion


class TextAsk(msgspec.Struct, frozen=True, array_like=True):
    """A question of `gateway` to all others for the text of `capsule`."""

    gateway: str
    capsule: str


class Promised(msgspec.Struct, frozen=True, array_like=True):
    """A capsule of so many tokens that is not there yet: `worker` computes it, or "": it waits for one.

    With `error` it could not be made.
    """

    num_tokens: int
    worker: str = ""
    error: tuple[str, str, dict[str, Any]] | None = None


class TextTold(msgspec.Struct, frozen=True, array_like=True):
    """The answer: `tokens` are packed as in commands; None: not known here.

    `weights` made it, `grammar` is what its text is in, `ttl_s` what its maker asked for (None: an answer
    left it), `continuation` the branch that left it. With `is_left` nobody asked: a gateway that ends
    leaves the capsule to this one, which makes it again from now on. `promised` instead of `tokens`: it is
    made for the first time, or could not be.
    """

    capsule: str
    tokens: bytes | None = None
    scope: Scope = COMMON
    grammar: Grammar | None = None
    ttl_s: float | None = None
    weights: WeightVersion = BASE_WEIGHTS
    continuation: Continuation | None = None
    is_left: bool = False
    promised: Promised | None = None


class TextForgotten(msgspec.Struct, frozen=True, array_like=True):
    """A client has deleted `capsule`: no gateway may compute it again."""

    capsule: str


decode_ask: Final = Decoder(TextAsk, "a question for a capsule's text")
decode_told: Final = Decoder(TextTold, "a capsule's text")
decode_forgotten: Final = Decoder(TextForgotten, "a capsule's end")
