"""Records of files: nothing of an owner in what is sent, and no forged one is taken."""

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from mallee.gateway.capsules.files.record import as_sent, check_numbers, identity_of, received
from mallee.protocol.codec import encode
from mallee.protocol.errors import ContextLengthExceeded, CorruptExport
from mallee.protocol.events import pack_hashes
from mallee.protocol.messages import Continuation, Grammar, Limits, Sampling, pack_tokens
from mallee.protocol.model import GroupSpec, WeightVersion
from support.files import BLOCK_SIZE, FIELDS, SPEC, record, rows, spec


def test_a_file_tells_nothing_of_its_owner() -> None:
    """X14, part: no id, scope, salted hash or time; what a branch needs to go on is whole."""
    kept = record()
    sent = as_sent(kept)
    raw = encode(sent)
    for secret in (b"secret", b"5c09e", kept.keys[:8], encode(77.0)):
        assert secret not in raw
    assert (sent.tokens, sent.num_computed, sent.has_tail) == (
        kept.tokens,
        kept.num_computed,
        kept.has_tail,
    )
    assert (sent.continuation, sent.grammar) == (kept.continuation, kept.grammar)
    assert received(raw, len(rows()), SPEC, BLOCK_SIZE) == sent


@pytest.mark.parametrize("num", range(1, 30))
@pytest.mark.parametrize("window", [None, 5, 9])
def test_a_record_of_any_length_is_taken(num: int, window: int | None) -> None:
    model = spec(window=window)
    raw = encode(as_sent(record(model, num=num, continuation=None, grammar=None)))
    found = received(raw, len(rows(model, num=num)), model, BLOCK_SIZE)
    assert found.boundary == num
    with pytest.raises(CorruptExport, match="blocks"):
        received(raw, len(rows(model, num=num)) + 1, model, BLOCK_SIZE)


@pytest.mark.parametrize("num", [1, 2, 9, 12])
def test_a_file_of_a_model_with_recurrent_layers_has_the_rows_of_one_state(num: int) -> None:
    model, raw = spec(window=5), encode(as_sent(record(num=num, continuation=None, grammar=None)))
    state = GroupSpec(kind="state", layers=(5, 6), nbytes=1025)  # three rows of 512 bytes
    model, before = structs.replace(model, groups=(*model.groups, state)), len(rows(model, num=num))
    received(raw, before + 3 * (num > 1), model, BLOCK_SIZE)
    with pytest.raises(CorruptExport, match="blocks"):
        received(raw, before + 3 * (num > 1) - 1, model, BLOCK_SIZE)


WRONG_RECORDS: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"tokens": b""}, "no tokens"),
    "half a token": ({"tokens": b"abc"}, "multiple of 4"),
    "unknown token": ({"tokens": pack_tokens([*range(10), 32])}, "token 32"),
    "too much KV": ({"num_computed": 12}, "KV of 12 of 11"),
    "negative KV": ({"num_computed": -1}, "KV of -1"),
    "less KV": ({"num_computed": 8}, "3 blocks"),
    "another block": ({"block_size": 16}, "blocks of 16"),
    "lost keys": ({"keys": b""}, "3 blocks"),
    "a key too many": ({"keys": pack_hashes(np.arange(4, dtype=np.uint64))}, "3 blocks"),
    "full tail": ({"has_tail": False}, "not as full"),
    "early logits": ({"logits": bytes(4 * 32)}, "bytes of logits"),
    "inherits": ({"grammar": Grammar("inherit")}, "kind inherit"),
    "form of more text": ({"grammar": Grammar("regex", "a", 12)}, "after 12"),
    "less than no form": ({"grammar": Grammar("regex", "a", -1)}, "consumed"),
    "a long grammar": ({"grammar": Grammar("lark", "a" * (1 << 17))}, "at most 65536"),
}


def going(
    limits: Limits | None = None, branch: int = 0, drawn: int = 3, **how: Any
) -> dict[str, Any]:
    """A record of a branch that goes on so."""
    return {"continuation": Continuation(Sampling(**how), limits or Limits(20), branch, drawn)}


WRONG_GOING: dict[str, tuple[dict[str, Any], str]] = {
    "hot": (going(temperature=float("nan")), "temperature"),
    "seed": (going(seed=-1), "seed"),
    "penalty": (going(frequency_penalty=3.0), "frequency_penalty"),
    "bias": (going(logit_bias=((32, 1.0),)), "logit_bias"),
    "bias twice": (going(logit_bias=((3, 1.0), (3, 2.0))), "logit_bias"),
    "bias none": (going(logit_bias=((3, float("nan")),)), "logit_bias"),
    "logprobs": (going(logprobs=21), "logprobs"),
    "drew it all": (going(drawn=11), "drew 11 of 11"),
    "branch": (going(branch=1 << 40), "branch"),
    "limit": (going(Limits(1 << 31)), "max_tokens"),
    "least": (going(Limits(2, min_tokens=3)), "min_tokens 3"),
    "stop": (going(Limits(2, (32,))), "stop tokens"),
    "stops": (going(Limits(2, (3,) * 2000)), "2000 stop tokens"),
}
WRONG = WRONG_RECORDS | WRONG_GOING


@pytest.mark.parametrize(("changed", "told"), WRONG.values(), ids=list(WRONG))
def test_a_forged_record_is_refused_by_name(changed: dict[str, Any], told: str) -> None:
    """F24, part: whatever its checksums say."""
    forged = structs.replace(as_sent(record()), **changed)
    with pytest.raises(CorruptExport, match=told):
        received(encode(forged), len(rows()), SPEC, BLOCK_SIZE)


def test_bytes_that_are_no_record_are_refused() -> None:
    for raw in (b"", b"\x93\x01\x02\x03", b"\xc1", b"\x91" * 5000):
        with pytest.raises(CorruptExport):
            received(raw, 3, SPEC, BLOCK_SIZE)


def test_a_text_longer_than_the_context_is_refused_as_such() -> None:
    with pytest.raises(ContextLengthExceeded):
        received(encode(as_sent(record(num=65))), 16, SPEC, BLOCK_SIZE)


def test_logits_have_the_models_type_and_numbers() -> None:
    for fields, numbers in ((("float32",), np.float32), (("bfloat16",), np.uint16)):
        model = spec(kv_fields=(("dtype", fields[0]),), dtype_nbytes=1)
        sound = np.zeros(32, numbers).tobytes()
        kept = as_sent(record(model, num_computed=11, logits=sound))
        assert received(encode(kept), 3, model, BLOCK_SIZE).logits == sound
        for wrong in (sound[:-1], sound + bytes(4), b"\xff" * len(sound)):
            forged = as_sent(record(model, num_computed=11, logits=wrong))
            with pytest.raises(CorruptExport, match="logit"):
                received(encode(forged), 3, model, BLOCK_SIZE)


@pytest.mark.parametrize(
    ("nbytes", "odd"),
    [
        *((4, np.array([x], np.float32).tobytes()) for x in (np.inf, -np.inf, np.nan, -65536.0)),
        *((2, np.array([x], np.uint16).tobytes()) for x in (0x7F80, 0xFF80, 0x7FC1, 0x4780)),
        *((1, bytes([x])) for x in (0x7F, 0xFF)),
    ],
)
def test_kv_that_no_model_computes_is_refused(nbytes: int, odd: bytes) -> None:
    """F24, part: an infinite number in a block would reach the texts that get the block later."""
    model = spec(dtype_nbytes=nbytes)
    largest = {4: 0x477FFFFF, 2: 0x477F, 1: 0xFE}[nbytes].to_bytes(nbytes, "little")
    check_numbers(largest * 64, 0, model)
    check_numbers(bytes(64), 0, model)
    for place in (0, 7, 63):
        block = bytearray(64 * nbytes)
        block[place * nbytes : (place + 1) * nbytes] = odd
        with pytest.raises(CorruptExport, match="block 5"):
            check_numbers(bytes(block), 5, model)


def test_a_changed_weight_version_or_field_is_another_identity() -> None:
    """F24, part: storage compares them field by field, and refuses a file before a block of it is taken."""
    plain = identity_of(SPEC, BLOCK_SIZE)
    assert plain["weights"] == "w1"
    changed = spec(weights=WeightVersion(1, "v2", "/x", "w2"))
    other = identity_of(changed, BLOCK_SIZE)
    assert {k for k in plain if plain[k] != other[k]} == {"weights", "weight_version"}
    for field, _ in FIELDS:
        fields = tuple((n, "other" if n == field else v) for n, v in FIELDS)
        other = identity_of(spec(kv_fields=fields), BLOCK_SIZE)
        assert {k for k in plain if plain[k] != other[k]} == {field}
    assert identity_of(SPEC, 16) != plain
