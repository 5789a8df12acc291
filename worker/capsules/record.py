"""The one form of a capsule at rest: all of it but the bytes of its blocks, on disk and to other processes.

One from another process may be of another model, damaged, or made by somebody who means harm.
"""

from typing import Final

import msgspec
import numpy as np

from mallee.protocol.codec import Decoder
from mallee.protocol.errors import CodecError, IncompatibleCapsule, InvalidParameter
from mallee.protocol.events import pack_hashes, unpack_hashes
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Continuation, Grammar
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.capsule import Capsule, Parked, TextKV
from mallee.worker.kv.text import Text, joined
from mallee.worker.kv.tree import BranchTree
from mallee.worker.transfer.values import DISK, Loan

MAX_STATE_NBYTES: Final = 4 << 20
"""Of a record beside its tokens and its logits: a grammar's source, ids that end an answer, keys."""


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

    @property
    def num_blocks(self) -> int:
        """Blocks of its text that have KV."""
        return -(-self.num_computed // self.block_size)


decode_record: Final = Decoder(CapsuleRecord, "a capsule's record")


def record_of(
    capsule: Capsule,
    kv: TextKV,
    tree: BranchTree,
    *,
    logits: bytes | None,
    ttl_s: float | None,
    fingerprint: str,
) -> CapsuleRecord:
    """`capsule`, whose KV is `kv`, at rest. O(tokens)."""
    notation = tree.notation
    return CapsuleRecord(
        capsule=capsule.id,
        tokens=notation.dump(joined(notation, kv.tokens, capsule.pending)),
        num_computed=len(kv.tokens),
        salt=kv.salt,
        fingerprint=fingerprint,
        block_size=tree.block_size,
        keys=pack_hashes(np.array(kv.keys, dtype=np.uint64)),
        has_tail=len(kv.tokens) % tree.block_size > 0,
        logits=logits,
        ttl_s=ttl_s,
        continuation=capsule.continuation,
        grammar=capsule.grammar,
    )


def capsule_on_disk(record: CapsuleRecord, tree: BranchTree, logits: object | None) -> Capsule:
    """The capsule of `record`, which is on disk. O(tokens)."""
    num, text = record.num_computed, tree.notation.read(record.tokens)
    keys = tuple(unpack_hashes(record.keys).tolist())
    kv = TextKV(tree.notation.compact(text[:num]), record.salt, keys, tree.side_keys(keys, num))
    return Capsule(
        CapsuleId(record.capsule),
        None,
        tuple(text[num:]),
        logits=logits,
        continuation=record.continuation,
        grammar=record.grammar,
        parked=Parked(kv, DISK, is_durable=True),
    )


def checked_loan(loan: Loan, text: Text, tree: BranchTree, spec: ModelSpec) -> CapsuleRecord:
    """The record of `loan`, as `checked_record`, which also has all of the blocks that it names."""
    tokens = tree.notation.dump(text)
    record = checked_record(loan.record, tokens, spec, block_size=tree.block_size)
    num_rows = len(tree.side_keys(range(record.num_blocks), record.num_computed))
    if loan.num_blocks != (due := record.num_blocks + num_rows):
        raise IncompatibleCapsule(record.capsule, [("blocks", str(loan.num_blocks), str(due))])
    return record


def checked_record(raw: bytes, tokens: bytes, spec: ModelSpec, *, block_size: int) -> CapsuleRecord:
    """The record `raw`, which is to be of `tokens`, of the model `spec` and whole; its logits as bytes.

    Raises CodecError, IncompatibleCapsule, InvalidParameter.
    """
    most = len(tokens) * 3 + 8 * spec.vocab_size + MAX_STATE_NBYTES
    if len(raw) > most:
        raise CodecError(f"a capsule's record of {len(raw)} bytes; at most {most} of this text")
    record = decode_record(raw)
    num, size = record.num_computed, block_size
    is_within = 0 <= num <= record.boundary
    num_blocks = -(-num // size) if is_within else 0
    differences = [
        (name, str(theirs), str(ours))
        for name, theirs, ours in (
            ("model", record.fingerprint, spec.identity),
            ("block size", record.block_size, size),
            ("number of tokens", record.boundary, len(tokens) // 4),
            ("tokens are the text's", record.tokens == tokens, True),
            ("computed tokens are in the text", is_within, True),
            ("number of keys", len(record.keys) / 8, float(num_blocks)),
            ("has a partial block", record.has_tail, num % size > 0),
            ("logits follow all tokens", record.logits is None or num == record.boundary, True),
        )
        if theirs != ours
    ]
    if differences:
        raise IncompatibleCapsule(record.capsule, differences)
    if record.continuation is not None:
        _check_continuation(record.continuation, record.boundary, spec.vocab_size)
    grammar = record.grammar
    if grammar is not None:
        grammar.validate()
        if grammar.kind == "inherit" or grammar.consumed > record.boundary:
            raise InvalidParameter(
                "grammar.consumed", grammar.consumed, f"a record of {record.boundary} tokens"
            )
    return record


def _check_continuation(rest: Continuation, num_tokens: int, vocab_size: int) -> None:
    """Raises InvalidParameter if no branch that left a text of `num_tokens` can be `rest`."""
    rest.sampling.validate(vocab_size)
    limits = rest.limits
    limits.validate(vocab_size)
    if not 0 <= rest.drawn < max(1, num_tokens) or rest.drawn > limits.max_tokens:
        raise InvalidParameter(
            "continuation.drawn", rest.drawn, f"{num_tokens} tokens, {limits.max_tokens} at most"
        )
    if rest.branch < 0:
        raise InvalidParameter("continuation.branch", rest.branch, "give 0 or more")
