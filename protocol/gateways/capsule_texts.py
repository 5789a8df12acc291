"""Capsules between gateways: the state of each, as its maker tells it, and its text, as the store has it."""

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


class StoredText(msgspec.Struct, frozen=True, array_like=True):
    """A capsule's text: `tokens`, packed as in commands, after the whole text of `parent` ("": of nothing).

    The parent's `edition` must be `parent_edition`: else its text was replaced since. One that `is_released`
    is no capsule any more, but others may begin with its text. `weights` made it, `grammar` is what its text
    is in, `ttl_s` what its maker asked for (None: an answer left it), `continuation` the branch that left
    it. `made` is when it was stored and `since` when the oldest of its parents was, in seconds since the
    epoch; `depth` is their number.
    """

    tokens: bytes = b""
    scope: Scope = COMMON
    grammar: Grammar | None = None
    ttl_s: float | None = None
    weights: WeightVersion = BASE_WEIGHTS
    continuation: Continuation | None = None
    parent: str = ""
    parent_edition: int = 0
    edition: int = 0
    depth: int = 0
    made: float = 0.0
    since: float = 0.0
    is_released: bool = False


decode_state: Final = Decoder(CapsuleState, "the state of a capsule")
decode_text: Final = Decoder(StoredText, "the text of a capsule")
