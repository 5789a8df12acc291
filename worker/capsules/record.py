"""The value that carries all of a capsule but the bytes of its blocks: to disk, and to other processes."""

from typing import Final

import msgspec

from mallee.protocol.codec import Decoder
from mallee.protocol.messages import Continuation, Grammar


class CapsuleRecord(msgspec.Struct, frozen=True, array_like=True):
    """A capsule at rest: another process that has its blocks, and the same model, goes on exactly.

    `tokens` are the whole text, the first `num_computed` of them with KV. `salt` is that of the blocks'
    hashes, and has the model's identity in it; `fingerprint` is that, for those who check it.
    `keys` name the blocks: full ones and, if `has_tail`, a partial last one. `ttl_s` None: an answer left it.
    """

    capsule: str
    tokens: bytes
    num_computed: int
    salt: str
    fingerprint: str
    block_size: int
    keys: bytes
    has_tail: bool
    logits: bytes | None
    ttl_s: float | None
    continuation: Continuation | None = None
    grammar: Grammar | None = None
    draft: None = None

    @property
    def boundary(self) -> int:
        """Committed tokens."""
        return len(self.tokens) // 4


decode_record: Final = Decoder(CapsuleRecord, "a capsule's record")
