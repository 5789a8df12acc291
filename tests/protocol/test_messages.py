"""Commands and frames over the wire, and the range of sampling fields."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import CodecError, InvalidParameter, UnknownCapsule, from_wire
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Frame,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    Update,
    decode_commands,
    decode_frame,
    encode_commands,
    encode_frame,
    pack_tokens,
    unpack_tokens,
)

names = st.text(max_size=12)
tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=6).map(pack_tokens)
counts = st.integers(0, 1 << 40)
floats = st.floats(0, 1e6)
sampling = st.builds(Sampling, floats, counts, floats, st.integers(0, (1 << 64) - 1))
limits = st.builds(Limits, counts, st.lists(counts, max_size=3).map(tuple), st.booleans())
commands = st.one_of(
    st.builds(Prefill, names, tokens, names, floats),
    st.builds(Generate, names, tokens, limits, sampling, counts, names),
    st.builds(Fork, names, names, st.lists(tokens, max_size=3).map(tuple), limits, sampling),
    st.builds(Cancel, names, st.none() | counts),
    st.builds(Release, names),
)
updates = st.builds(
    Update,
    names,
    st.integers(-1, 1 << 20),
    st.lists(counts, max_size=4).map(tuple),
    st.none() | st.sampled_from(["stop", "length", "cancelled", "error"]),
    counts,
    counts,
    st.none() | names,
    counts,
)


@given(st.lists(commands, max_size=5))
def test_commands_come_back_in_order(batch: list[Command]) -> None:
    assert decode_commands(encode_commands(batch)) == tuple(batch)


@given(counts, st.lists(updates, max_size=4))
def test_frames_come_back_as_they_went(step: int, news: list[Update]) -> None:
    frame = Frame(step, tuple(news))
    assert decode_frame(encode_frame(frame)) == frame


def test_an_error_crosses_in_an_update_with_its_type() -> None:
    sent = Update("r", -1, finish="error", error=UnknownCapsule("c").to_wire())
    (got,) = decode_frame(encode_frame(Frame(0, (sent,)))).updates
    assert got.error is not None
    error = from_wire(got.error)
    assert isinstance(error, UnknownCapsule)
    assert error.fields == {"capsule": "c"}


@given(st.binary(max_size=60))
def test_arbitrary_bytes_decode_or_raise_our_error(raw: bytes) -> None:
    for decode in (decode_commands, decode_frame):
        with contextlib.suppress(CodecError):
            message = decode(raw)
            assert decode(msgspec.msgpack.encode(message)) == message


def test_text_that_is_not_utf8_is_refused_as_malformed() -> None:
    with pytest.raises(CodecError, match="not a batch of commands"):
        decode_commands(b"\x91\x92\xa7release\xa2\xc3\x28")
    with pytest.raises(CodecError, match="not a frame"):
        decode_frame(b"\x92\x00\x91\x92\xa2\xc3\x28\x00")


def test_bottomless_nesting_is_refused_as_malformed() -> None:
    nested = b"\x81\xa1a" * 100_000 + b"\xc0"
    update = b"\x99\xa1r\x00\x90\xc0\x00\x00\xc0\x00\x93\xa1c\xa1m" + nested
    with pytest.raises(CodecError, match="not a frame"):
        decode_frame(b"\x92\x00\x91" + update)


@given(st.lists(commands, min_size=1, max_size=3), st.data())
def test_a_cut_batch_is_refused_whole(batch: list[Command], data: st.DataObject) -> None:
    raw = encode_commands(batch)
    with pytest.raises(CodecError, match="not a batch of commands"):
        decode_commands(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_an_unknown_finish_reason_is_refused() -> None:
    raw = msgspec.msgpack.encode([0, [["r", 0, [], "bored"]]])
    with pytest.raises(CodecError, match="not a frame"):
        decode_frame(raw)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=20))
def test_token_runs_come_back_as_they_went(values: list[int]) -> None:
    assert unpack_tokens(pack_tokens(values)).tolist() == values


def test_a_token_run_of_broken_length_is_refused() -> None:
    with pytest.raises(CodecError, match="5 bytes"):
        unpack_tokens(b"12345")


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_a_sampling_field_out_of_range_is_named(field: dict[str, float]) -> None:
    (name,) = field
    with pytest.raises(InvalidParameter, match=f"^{name}=") as caught:
        Sampling(**field).validate()  # type: ignore[arg-type]
    assert caught.value.fields["param"] == name


def test_sampling_in_range_is_returned_itself() -> None:
    for good in (Sampling(), Sampling(100.0, 5, 1.0, (1 << 64) - 1), Sampling(1.0, 0, 0.01)):
        assert good.validate() is good
