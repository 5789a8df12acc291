"""A gateway's knowledge of a capsule, as it tells others: its worker, and its text to compute it anew."""

from typing import Any, Final

import msgspec

from mallee.protocol.codec import Decoder
from mallee.protocol.ids import COMMON, Scope
from mallee.protocol.messages import Continuation, Grammar
from mallee.protocol.model import BASE_WEIGHTS, WeightVersion


class CapsuleState(msgspec.Struct, frozen=True, array_like=True):
    """A capsule of so many tokens is on `worker`, or "": went with its worker, and can be computed again.

    Of one that `is_promised` a worker computes it, or "": it waits for one; or with `error` it could not
    be made.
    """

    num_tokens: int
    worker: str = ""
    is_promised: bool = False
    error: tuple[str, str, dict[str, Any]] | None = None


class CapsuleKnown(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` are packed as in commands; None: the text is not known.

    `weights` made it, `grammar` is what its text is in, `ttl_s` what its maker asked for (None: an answer
    left it), `continuation` the branch that left it.
    """

    state: CapsuleState | None = None
    tokens: bytes | None = None
    scope: Scope = COMMON
    grammar: Grammar | None = None
    ttl_s: float | None = None
    weights: WeightVersion = BASE_WEIGHTS
    continuation: Continuation | None = None


decode_known: Final = Decoder(CapsuleKnown, "what is known of a capsule")
