"""The conversation about one HTTP request, message by message, and its protobuf."""

from typing import Any

import pytest

from mallee.actors.front.picker import wire
from mallee.actors.front.picker.conversation import (
    Conversation,
    Finished,
    FirstPiece,
    Served,
    Wanted,
)
from mallee.actors.front.picker.messages import (
    Body,
    BodyMode,
    Destination,
    Headers,
    Incoming,
    Modes,
    Passed,
    Piece,
    Refusal,
    Trailers,
)
from mallee.protocol.errors import CodecError

POST = {":path": "/v1/completions", ":method": "POST"}
GOAL = Destination(("10.0.0.1:8000", "10.0.0.2:8000"))


def modes(request: BodyMode, response: BodyMode = BodyMode.NONE) -> Modes:
    return Modes(request, response)


def heads(mode: Modes | None = None, *, ends: bool = False, **more: Any) -> Incoming:
    return Incoming(Headers("request", POST, ends), modes=mode, **more)


def body(data: bytes, *, ends: bool = True) -> Incoming:
    return Incoming(Body("request", data, ends))


@pytest.fixture
def talk() -> Conversation:
    return Conversation(max_body_nbytes=1 << 20)


NOTHING, BUFFERED, STREAMED = (
    modes(each) for each in (BodyMode.NONE, BodyMode.BUFFERED, BodyMode.STREAMED)
)
ENDS = Incoming(Trailers("request"))
PASSED = Passed("headers", "request")
FOR_HEADERS = [Passed("headers", "request", GOAL)]


@pytest.mark.parametrize(
    ("given", "before", "wanted", "replies"),
    [
        (
            [heads(), body(b"x", ends=False), ENDS],
            [],
            Wanted(POST, b"x", None),
            [*FOR_HEADERS, Piece("request", b"x", False), Passed("trailers", "request")],
        ),
        (
            [heads(BUFFERED), body(b"x")],
            [PASSED],
            Wanted(POST, b"x", None),
            [Passed("body", "request", GOAL)],
        ),
        ([heads(NOTHING)], [], Wanted(POST, b"", None), FOR_HEADERS),
        ([heads(STREAMED)], [], Wanted(POST, b"", None), FOR_HEADERS),
        (
            [heads(ends=True, subset=("1.1.1.1:1",))],
            [],
            Wanted(POST, b"", ("1.1.1.1:1",)),
            FOR_HEADERS,
        ),
    ],
)
def test_a_request_is_picked_for_when_its_mode_has_shown_enough(
    talk: Conversation, given: list[Incoming], before: list[Any], wanted: Wanted, replies: list[Any]
) -> None:
    told = [reply for message in given for reply in talk.on_message(message)]
    assert told == [*before, wanted]
    assert talk.picked(GOAL) == replies
    if wanted.subset is None and not wanted.body:
        assert talk.on_message(body(b"x")) == [Passed("body", "request")]


def test_nothing_follows_a_refusal(talk: Conversation) -> None:
    talk.on_message(heads())
    talk.on_message(body(b"x"))
    refusal = Refusal(503, "no_endpoint", "none")
    assert talk.refused(refusal) == [refusal]
    assert talk.on_message(body(b"x")) == []


def test_a_body_beyond_the_limit_is_refused_before_it_ends(talk: Conversation) -> None:
    talk.on_message(heads())
    (refusal,) = talk.on_message(body(b"x" * ((1 << 20) + 1), ends=False))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413
    assert "1 MiB" in refusal.message


def test_an_answer_is_passed_on_and_reported(talk: Conversation) -> None:
    talk.on_message(heads())
    talk.on_message(body(b"x"))
    talk.picked(GOAL)
    assert talk.on_message(body(b"x")) == []  # its end may come twice (envoyproxy/envoy#46237)
    reply = Headers("response", {":status": "200"}, False)
    assert talk.on_message(Incoming(reply, served="10.0.0.2:8000")) == [
        Served("10.0.0.2:8000", 200),
        Passed("headers", "response"),
    ]
    assert talk.on_message(Incoming(Body("response", b"ab", False))) == [
        FirstPiece(),
        Piece("response", b"ab", False),
    ]
    assert talk.on_message(Incoming(Body("response", b"cd", True))) == [
        Piece("response", b"cd", True),
        Finished(b"abcd"),
    ]


def test_an_observer_gets_no_replies(talk: Conversation) -> None:
    assert talk.on_message(heads(is_observed=True)) == []
    (wanted,) = talk.on_message(body(b"x")._replace(is_observed=True))
    assert isinstance(wanted, Wanted)


def test_a_body_without_headers_is_an_error() -> None:
    with pytest.raises(CodecError, match="before its headers"):
        Conversation(max_body_nbytes=1).on_message(body(b"x"))


def test_messages_are_read_as_envoy_writes_them() -> None:
    """Headers by their raw values; hints of both namespaces; fields that are not ours are skipped."""
    message = wire.ProcessingRequest()
    header = message.request_headers.headers.headers.add(key=":path")
    header.raw_value = b"/v1/models"
    message.request_headers.headers.headers.add(key="old", value="way")
    message.request_headers.end_of_stream = True
    entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
    entry.value.update({"x-gateway-destination-endpoint-subset": ["1.1.1.1:1", "1.1.1.2:1"]})
    entry = message.metadata_context.filter_metadata.add(key="envoy.lb")
    entry.value.update({"x-gateway-destination-endpoint-served": "1.1.1.1:1"})
    message.protocol_config.request_body_mode = 4
    unknown = b"\x4a\x03\x0a\x01a"  # field 9, attributes
    assert wire.read(message.SerializeToString() + unknown) == Incoming(
        Headers("request", {":path": "/v1/models", "old": "way"}, True),
        subset=("1.1.1.1:1", "1.1.1.2:1"),
        served="1.1.1.1:1",
        modes=Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [([], ()), ("1.1.1.1:1, 1.1.1.2:1", ("1.1.1.1:1", "1.1.1.2:1")), ("", ())],
)
def test_an_empty_subset_is_not_none(value: Any, expected: tuple[str, ...]) -> None:
    """An empty list allows nothing (the proposal demands 503); a text with commas is a list, too."""
    message = wire.ProcessingRequest()
    message.request_headers.SetInParent()
    entry = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
    entry.value.update({"x-gateway-destination-endpoint-subset": value})
    assert wire.read(message.SerializeToString()).subset == expected


@pytest.mark.parametrize("raw", [b"\xff\xff", b"", b"\x12"])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(CodecError):
        wire.read(raw)


def test_refusals_are_openais_errors() -> None:
    found = wire.ProcessingResponse.FromString(wire.write(Refusal(429, "saturated", "busy", 1)))
    reply = found.immediate_response
    assert reply.status.code == 429
    assert b'"code":"saturated"' in reply.body
    headers = {each.header.key: each.header.raw_value for each in reply.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"1"}
