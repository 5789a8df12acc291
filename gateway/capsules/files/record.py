"""A capsule's record as a file carries it: nothing of its owner goes out, nothing unchecked comes in.

A file may be forged, and its checksums with it. What it says of tokens, draws and form is held against the
model; its KV can only mislead answers that go on from it, which is its owner's affair, as long as all its
numbers are such as a model computes. An infinite one in a block that is given back later would reach other
texts: attention reads the unfilled slots of a block with weight 0, and 0 times infinity is no number.
"""

from typing import Final

import numpy as np
from msgspec import structs

from mallee.protocol.api.generate import MAX_STOP_IDS
from mallee.protocol.errors import (
    ContextLengthExceeded,
    CorruptExport,
    IncompatibleCapsule,
    InvalidParameter,
    MalleeError,
)
from mallee.protocol.events import pack_hashes
from mallee.protocol.messages import Limits, unpack_tokens
from mallee.protocol.model import ModelSpec
from mallee.worker.capsules.record import CapsuleRecord, decode_record

SENT_AS: Final = "exported"  # instead of an id, which is its owner's
MAX_PAYLOAD_NBYTES: Final = 64 << 20
MAX_BLOCKS: Final = 1 << 20  # rows of windows among them
_NUMBERS: Final = {  # by bytes: type, bits without the sign, and those of 2**16 or of no number
    4: ("<u4", 0x7FFF_FFFF, 0x4780_0000),
    2: ("<u2", 0x7FFF, 0x4780),
    1: ("u1", 0x7F, 0x7F),
}
_LOGIT_NBYTES: Final = {"float32": 4, "bfloat16": 2}


def identity_of(model: ModelSpec, block_size: int) -> dict[str, str]:
    """The fields by which a file fits a model, or doesn't."""
    return {**model.kv_identity(), "block_size": str(block_size)}


def as_sent(record: CapsuleRecord) -> CapsuleRecord:
    """`record` without ids, scope, hashes that are salted with it, and time to live."""
    return structs.replace(
        record,
        capsule=SENT_AS,
        salt="",
        fingerprint="",
        keys=pack_hashes(np.arange(len(record.keys) // 8, dtype=np.uint64)),
        ttl_s=None,
    )


def num_rows(model: ModelSpec, block_size: int, num_computed: int) -> tuple[int, int]:
    """Blocks of the first so many tokens, and the rows of side groups that are read after those."""
    num_blocks = model.groups[0].num_read(num_computed, block_size)
    return num_blocks, model.side_rows(num_computed, block_size)


def received(payload: bytes, num_blocks: int, model: ModelSpec, block_size: int) -> CapsuleRecord:
    """The record in `payload`, of a file with so many blocks.

    Raises CorruptExport, ContextLengthExceeded, IncompatibleCapsule.
    """
    try:
        record = decode_record(payload)
        _check(record, num_blocks, model, block_size)
    except (CorruptExport, ContextLengthExceeded, IncompatibleCapsule):
        raise
    except MalleeError as error:
        raise _bad(str(error)) from error
    return record


def check_numbers(block: bytes, place: int, model: ModelSpec) -> None:
    """Raises CorruptExport if `block` has a number that no model computes.

    Rows of states have numbers of other types: they are checked when they come to the model's device.
    """
    if not model.has_states and _is_odd(block, model.dtype_nbytes):
        raise CorruptExport(f"block {place}", "a number in it is none, or larger than KV gets")


def _check(record: CapsuleRecord, num_blocks: int, model: ModelSpec, block_size: int) -> None:
    """Raises MalleeError."""
    tokens = unpack_tokens(record.tokens)
    num = len(tokens)
    if not num:
        raise _bad("no tokens")
    if num > model.max_model_len:
        raise ContextLengthExceeded(num, 0, model.max_model_len)
    if (largest := int(tokens.max())) >= model.vocab_size:
        raise _bad(f"token {largest}, where ids go to {model.vocab_size - 1}")
    if not 0 <= record.num_computed <= num or record.block_size != block_size:
        raise _bad(f"KV of {record.num_computed} of {num} tokens, in blocks of {record.block_size}")
    blocks, rows = num_rows(model, block_size, record.num_computed)
    if len(record.keys) != 8 * blocks or num_blocks != blocks + rows:
        raise _bad(f"{num_blocks} blocks, where {record.num_computed} tokens have {blocks + rows}")
    if record.has_tail != bool(record.num_computed % block_size):
        raise _bad("its last block is not as full as it says")
    if record.logits is not None:
        _check_logits(record.logits, record.num_computed == num, model)
    _check_going(record, num, model)


def _check_logits(logits: bytes, is_computed: bool, model: ModelSpec) -> None:
    kept = dict(model.kv_fields).get("dtype", "")
    nbytes = _LOGIT_NBYTES.get(kept, 2 if model.dtype_nbytes == 2 else 4)
    if not is_computed or len(logits) != nbytes * model.vocab_size:
        raise _bad(f"{len(logits)} bytes of logits for a vocabulary of {model.vocab_size}")
    if _is_odd(logits, nbytes):
        raise _bad("a logit is no number, or larger than logits get")


def _check_going(record: CapsuleRecord, num_tokens: int, model: ModelSpec) -> None:
    """Raises MalleeError if no branch can go on as the record says."""
    grammar, left = record.grammar, record.continuation
    if grammar is not None:
        grammar.validate()
        if grammar.kind == "inherit" or grammar.consumed > num_tokens:
            raise _bad(f"a grammar of kind {grammar.kind} after {grammar.consumed} tokens")
    if left is None:
        return
    left.sampling.validate()
    ids = [token for token, _ in left.sampling.logit_bias]
    if any(token >= model.vocab_size for token in ids) or len(set(ids)) < len(ids):
        raise InvalidParameter("logit_bias", ids, "give each id of the vocabulary once")
    _check_limits(left.limits, model)
    if not 0 <= left.drawn < num_tokens or not 0 <= left.branch < 1 << 32:
        raise _bad(f"branch {left.branch} drew {left.drawn} of {num_tokens} tokens")


def _check_limits(limits: Limits, model: ModelSpec) -> None:
    if not 0 <= limits.min_tokens <= limits.max_tokens < 1 << 31:
        raise _bad(f"min_tokens {limits.min_tokens} of max_tokens {limits.max_tokens}")
    if limits.reasoning is not None:
        limits.reasoning.validate(model.vocab_size)
    ids = limits.stop_token_ids
    if len(ids) > MAX_STOP_IDS or not all(0 <= each < model.vocab_size for each in ids):
        raise _bad(f"{len(ids)} stop tokens, not all of the vocabulary")


def _is_odd(raw: bytes, nbytes: int) -> bool:
    """Whether a number of `raw`, of so many bytes each, is infinite, none, or 2**16 and more."""
    if len(raw) % nbytes:
        return True
    kind, mask, bound = _NUMBERS[nbytes]
    numbers = np.frombuffer(raw, dtype=kind)
    return bool(len(numbers)) and bool((numbers & numbers.dtype.type(mask)).max() >= bound)


def _bad(reason: str) -> CorruptExport:
    return CorruptExport("record", reason)
