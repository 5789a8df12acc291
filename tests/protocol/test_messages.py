"""Commands and frames over the wire, and the range of sampling fields."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.codec import encode
from mallee.protocol.errors import CodecError, InvalidParameter, UnknownCapsule, from_wire
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Frame,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Release,
    Sampling,
    Update,
    pack_tokens,
    unpack_tokens,
)
from mallee.protocol.parcels import Life, Parcel, Report, decode_parcels, decode_reports, pack

names = st.text(max_size=12)
tokens = st.lists(st.integers(0, (1 << 32) - 1), max_size=6).map(pack_tokens)
counts = st.integers(0, 1 << 40)
floats = st.floats(0, 1e6)
sampling = st.builds(Sampling, floats, counts, floats, st.integers(0, (1 << 64) - 1))
grammars = st.none() | st.builds(Grammar, st.just("regex"), names, counts)
limits = st.builds(Limits, counts, st.lists(counts, max_size=3).map(tuple), st.booleans())
commands = st.one_of(
    st.builds(Prefill, names, tokens, names, floats, grammar=grammars, capsule=names),
    st.builds(
        *(Generate, names, tokens, limits, sampling, counts, names), grammar=grammars, drawn=counts
    ),
    st.builds(Fork, names, names, st.lists(tokens, max_size=3).map(tuple), limits, sampling),
    st.builds(Cancel, names, st.none() | counts),
    st.builds(Release, names),
)


parcels = st.builds(Parcel, names, counts, st.lists(commands, max_size=4).map(tuple), st.booleans())


@given(st.lists(parcels, max_size=3))
def test_parcels_come_back_in_order(batch: list[Parcel]) -> None:
    assert decode_parcels(encode(batch)) == tuple(batch)


lives = st.builds(Life, st.sampled_from(["w0", "w1"]), st.sampled_from([1, 2]))


@given(st.lists(st.tuples(lives, st.none() | commands), max_size=12))
def test_packing_keeps_the_order_of_each_life(items: list[tuple[Life, Command | None]]) -> None:
    packed = pack(items)
    for life in {life for life, _ in items}:
        got: list[Command | None] = []
        for parcel in packed:
            if (parcel.worker, parcel.incarnation) == life:
                got += [*parcel.commands, *([None] if parcel.is_end else [])]
        assert got == [command for of, command in items if of == life]


def test_an_error_crosses_in_an_update_with_its_type() -> None:
    sent = Report(
        "w", 1, Frame(0, (Update("r", -1, finish="error", error=UnknownCapsule("c").to_wire()),))
    )
    (got,) = decode_reports(encode([sent]))
    (update,) = got.frame.updates
    assert update.error is not None
    error = from_wire(update.error)
    assert isinstance(error, UnknownCapsule)
    assert error.fields == {"capsule": "c"}


def test_bottomless_nesting_is_refused_as_malformed() -> None:
    nested = b"\x81\xa1a" * 100_000 + b"\xc0"
    update = b"\x99\xa1r\x00\x90\xc0\x00\x00\xc0\x00\x93\xa1c\xa1m" + nested
    with pytest.raises(CodecError, match="not a run of reports"):
        decode_reports(b"\x91\x93\xa1w\x01\x92\x00\x91" + update)


@given(st.lists(parcels, min_size=1, max_size=2), st.data())
def test_a_cut_batch_is_refused_whole(batch: list[Parcel], data: st.DataObject) -> None:
    raw = encode(batch)
    with pytest.raises(CodecError, match="not a batch of commands"):
        decode_parcels(raw[: data.draw(st.integers(0, len(raw) - 1))])


def test_an_unknown_finish_reason_is_refused() -> None:
    raw = msgspec.msgpack.encode([["w", 1, [0, [["r", 0, [], "bored"]]]]])
    with pytest.raises(CodecError, match="not a run of reports"):
        decode_reports(raw)


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


def test_a_command_without_the_later_fields_is_read_as_before() -> None:
    raw = msgspec.msgpack.encode([["w", 1, [["generate", "r", b"", [4]], ["prefill", "p", b""]]]])
    (parcel,) = decode_parcels(raw)
    assert parcel.commands == (Generate("r", b"", Limits(4)), Prefill("p", b""))


@pytest.mark.parametrize(
    ("command", "param"),
    [
        (Generate("r", b"", Limits(9), drawn=-1), "drawn"),
        (Generate("r", b"", Limits(9), drawn=6), "drawn"),
        (Generate("r", b"", Limits(3), drawn=3), "drawn"),
        (Generate("r", b"", Limits(9), n=2, drawn=1), "n"),
        (
            Generate("r", b"", Limits(9), drawn=3, grammar=Grammar("regex", "a", 2)),
            "grammar.consumed",
        ),
        (Generate("r", b"", Limits(9), grammar=Grammar("regex", "a", 7)), "grammar.consumed"),
        (Prefill("r", b"", grammar=Grammar("regex", "a", 7)), "grammar.consumed"),
        (Prefill("r", b"", grammar=Grammar("regex", "a", -1)), "grammar.consumed"),
        (Prefill("r", b"", ttl_s=-1.0), "ttl_s"),
        (Prefill("r", b"", ttl_s=float("nan")), "ttl_s"),
        (Prefill("r", b"", ttl_s=1.0, replaceable=True), "ttl_s"),
    ],
)
def test_a_continuation_that_does_not_fit_its_tokens_is_refused(
    command: Generate | Prefill, param: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"^{param}=") as caught:
        command.validate(6)
    assert caught.value.fields["param"] == param


def test_a_continuation_that_fits_is_returned_itself() -> None:
    for good in (
        Generate("r", b"", Limits(9), n=3),
        Generate("r", b"", Limits(6), drawn=5, first_branch=1),
        Generate("r", b"", Limits(9), drawn=3, grammar=Grammar("regex", "a", 6)),
        Prefill("r", b"", grammar=Grammar("regex", "a", 6), capsule="a.1", replaceable=True),
    ):
        assert good.validate(6) is good


def test_an_update_without_what_was_told_before() -> None:
    logprobs = tuple((-float(token), ()) for token in (5, 6, 7))
    update = Update("r", 0, (5, 6, 7), logprobs=logprobs, position=4)
    rest = update.after(6)
    assert rest is not None
    assert (rest.tokens, rest.logprobs, rest.position) == ((7,), logprobs[2:], 6)
    assert update.after(7) is None
    assert update.after(9) is None
    end = Update("r", 0, (5,), "length", boundary=9, position=4).after(5)
    assert end is not None
    assert (end.tokens, end.finish, end.boundary) == ((), "length", 9)
