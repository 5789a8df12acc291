"""Bodies that begin as an earlier one: read as any other, and decoded from there."""

import json
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.entry import bodies
from mallee.api.entry.bodies import Bodies
from mallee.api.entry.decoding import decode, read
from mallee.api.messages.reading import read_dialogue
from mallee.api.responses.items import read_input
from mallee.api.text.conversation import Known, read_messages
from mallee.protocol.api.generate import ChatRequest
from mallee.protocol.api.messages import MessagesRequest
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import BadRequest, MalleeError
from support.examples import examples

MOST = 1 << 18
R = TypeVar("R", bound=AnyRequest)
KINDS = (ChatRequest, MessagesRequest, ResponseRequest)
TEXTS = st.sampled_from(["", "a", "b\n", "é", "]", '",{"role"', "\\", "\u2028", "1" * 20])


@pytest.fixture(scope="module", autouse=True)
def short_heads() -> Iterator[None]:
    with mock.patch.multiple(bodies, HEAD=4, MAX_ALIKE=3):
        yield


def parse(raw: bytes, kind: type[R], most: int) -> R:
    """The request in `raw`, decoded whole."""
    return read(decode(raw, most), kind).body


def parsed(found: Bodies, raw: bytes, kind: type[R], owner: str, most: int) -> R:
    """The request in `raw`, decoded with the help of the bodies before."""
    return read(found.decode(raw, kind, owner, most), kind).body


def fresh(**more: Any) -> Bodies:
    return Bodies(**more)


def outcome(read: Any) -> Any:
    try:
        return msgspec.to_builtins(read())
    except MalleeError as error:
        return type(error), error.message


def plain(value: Any) -> Any:
    """Without the class of messages that are known, and in order."""
    return json.dumps(value, default=str)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.just(1.0) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
messages = (
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
    | values
)


@st.composite
def written(draw: st.DrawFn, field: str, given: list[Any]) -> bytes:
    """A body with the messages, as some client writes it, or breaks it."""
    indent = draw(st.sampled_from([None, None, None, 1]))
    text = json.dumps(given, indent=indent, ensure_ascii=draw(st.booleans()))
    before = draw(st.sampled_from(["", '"model": "m", ', f'"{field}": [0], ']))
    after = draw(
        st.sampled_from(
            [
                *("", "", ', "temperature": 0.5', ', "cache_salt": "s"', ', "cache_salt": 7'),
                *(f', "{field}": [1]', f', "{field}": null', ', "nonsense": 1', "}", ", ", " 5"),
            ]
        )
    )
    return f'{{{before}"{field}":{text}{after}}}'.encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@examples(200)
@given(data=st.data())
def test_bodies_are_read_as_without_what_is_known(
    kind: type[AnyRequest], data: st.DataObject
) -> None:
    """F31, part: that grow, are edited, are written in other ways, or are no JSON; and the same errors."""
    found = fresh(max_nbytes=data.draw(st.sampled_from([1 << 20, 6000])))
    given: list[Any] = []
    for _ in range(data.draw(st.integers(2, 6))):
        kept = given[: len(given) - data.draw(st.sampled_from([0, 0, 0, 1, 3]))]
        given = [*kept, *data.draw(st.lists(messages, max_size=3))]
        raw = data.draw(written(kind.history, given))
        if data.draw(st.integers(0, 9)) == 0:
            raw = raw[: data.draw(st.integers(0, len(raw)))]
        owner = data.draw(st.sampled_from("aab"))
        one = outcome(partial(parsed, found, raw, kind, owner, MOST))
        assert plain(one) == plain(outcome(partial(parse, raw, kind, MOST)))
        found.check()


def talk(num: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{i} " + "words " * 40} for i in range(num)]


def raw_of(kind: type[AnyRequest], given: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", kind.history: given, **more}).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_new_is_decoded(kind: type[AnyRequest]) -> None:
    found = fresh()
    first = parsed(found, raw_of(kind, talk(50)), kind, "a", MOST)
    seen: list[int] = []

    def noted(raw: bytes, most: int) -> Any:
        seen.append(len(raw))
        return decode(raw, most)

    with mock.patch.object(bodies, "decode", noted):
        second = parsed(found, raw_of(kind, talk(52), temperature=0.5), kind, "a", MOST)
        edited = [*talk(20), {"role": "user", "content": "else"}, *talk(4)]
        third = parsed(found, raw_of(kind, edited), kind, "a", MOST)
    assert seen[0] < 1000
    assert seen[1] < 2000
    one, two, three = (getattr(each, kind.history) for each in (first, second, third))
    assert two == talk(52)
    assert three == edited
    assert all(a is b and type(a) is Known for a, b in zip(one, two, strict=False))
    assert all(a is b for a, b in zip(one[:20], three, strict=False))


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TALKS: dict[type[AnyRequest], list[dict[str, Any]]] = {
    ChatRequest: [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
        {"role": "assistant", "content": "so", "reasoning_content": "why"},
    ],
    MessagesRequest: [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "done"},
                {"type": "text", "text": "on", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
    ],
    ResponseRequest: [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y"}]},
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ],
}
READERS: dict[type[AnyRequest], Any] = {
    ChatRequest: read_messages,
    MessagesRequest: lambda given: read_dialogue("system", given),
    ResponseRequest: read_input,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_readers_made_of_known_messages_is_what_they_make_of_them(
    kind: type[AnyRequest],
) -> None:
    """F31, part: every kind of message, at every length."""
    found, read, talks = fresh(), READERS[kind], TALKS[kind] * 3
    talks.append({"role": "user", "content": "end"})
    for num in range(1, len(talks) + 1):
        given = [*talks[: num - 1], talks[-1]]
        body = parsed(found, raw_of(kind, given), kind, "a", MOST)
        for _ in range(2):
            assert read(getattr(body, kind.history)) == read(given)
    assert found.num_known > 0


def test_a_message_that_is_refused_is_refused_again_by_its_place() -> None:
    found = fresh()
    for num in (2, 3, 4):
        given = [*talk(num), {"role": "user", "content": 5}]
        for _ in range(2):
            body = parsed(found, raw_of(ChatRequest, given), ChatRequest, "a", MOST)
            with pytest.raises(BadRequest, match=rf"messages\[{num}\]\.content"):
                read_messages(body.messages)


def test_a_body_is_news_to_another_owner_and_under_another_salt() -> None:
    found = fresh()
    for owner, more in (("a", {}), ("b", {}), ("a", {"cache_salt": "s"})):
        parsed(found, raw_of(ChatRequest, talk(30), **more), ChatRequest, owner, MOST)
    assert found.num_known == 0
    parsed(found, raw_of(ChatRequest, talk(31)), ChatRequest, "b", MOST)
    assert found.num_known == 1


LONG = {"role": "user", "content": "x" * 300}


@pytest.mark.parametrize(
    ("bodies_given", "told"),
    [
        ([[LONG] * 300, [LONG] * 340, [LONG] * 500], "2000"),
        ([[LONG] * 300, [*[LONG] * 300, int("7" * 600)]], "digits"),
    ],
)
def test_limits_of_large_bodies_count_what_is_known(bodies_given: list[Any], told: str) -> None:
    found = fresh()
    for each in bodies_given:
        raw = raw_of(ChatRequest, each)
        wanted = outcome(partial(parse, raw, ChatRequest, 2000))
        assert outcome(partial(parsed, found, raw, ChatRequest, "a", 2000)) == wanted
    assert told in wanted[1]


def test_bodies_stay_within_their_bound() -> None:
    found = fresh(max_nbytes=200_000)
    for i in range(40):
        given = [{"role": "user", "content": f"{i}"}, *talk(40)]
        parsed(found, raw_of(ChatRequest, given), ChatRequest, f"o{i % 3}", MOST)
        found.check()
    assert 100_000 < found.memory.nbytes <= 200_000
    parsed(found, raw_of(ChatRequest, talk(4000)), ChatRequest, "o", MOST)
    assert found.memory.nbytes_of("o") == 0


@pytest.mark.slow
@pytest.mark.parametrize("message", [[[]] * 20_000, [0.5] * 20_000, "a" * 500_000 + "\U0001f600"])
def test_all_that_is_held_is_counted(message: Any) -> None:
    """Small values take ten times as much as their JSON; texts with one odd character, four times."""
    found = fresh()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.start()
    for i in range(4):
        parsed(found, raw_of(ChatRequest, [f"{i}", message]), ChatRequest, "a", MOST)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.9 * held < found.memory.nbytes < 1.5 * held
