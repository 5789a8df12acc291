"""Templates that go on from an earlier rendering: the same text as of the whole, or none."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.text import resumable
from mallee.api.text.chat import ChatTemplate, Source
from mallee.api.text.families import FAMILIES
from mallee.api.text.resumable import Mark, Trace
from support.examples import examples

TURN = "{{ '<' + message.role + '>' + (message.content or '') }}"
# Ways to look at a conversation, as checkpoints' templates have them.
FORWARD = {
    "plain": "{% for message in messages %}" + TURN + "{% endfor %}",
    "alternating": "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for message in loop_messages %}{{ loop.index0 % 2 }}{% if loop.first %}first{% endif %}"
    + TURN
    + "{% endfor %}",
    "sliced": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ system }}{% for message in messages %}{{ system | length }}" + TURN + "{% endfor %}",
    "neighbours": "{% for message in messages %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != message.role %}[{% endif %}"
    + TURN
    + "{% if loop.last or messages[loop.index0 + 1].role != message.role %}]{% endif %}{% endfor %}",
    "items": "{% for message in messages %}{{ loop.previtem is defined and loop.previtem.role }}|"
    "{{ loop.nextitem is defined and loop.nextitem.role }}" + TURN + "{% endfor %}",
    "state": "{% set ns = namespace(tools=0, open=false, last='') %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{% set ns.tools = ns.tools + 1 %}{% endif %}"
    "{% if ns.open and message.role == 'user' %}</a>{% endif %}"
    "{% set ns.open = message.role == 'assistant' %}"
    "{{ ns.tools }}{{ ns.last }}" + TURN + "{% set ns.last = message.role %}{% endfor %}"
    "{% if ns.open %}</a>{% endif %}{{ ns.tools }}",
    "question": "{% set ns = namespace(multi=true, question=messages | length - 1) %}"
    "{% for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}"
    "{% if ns.multi and message.role == 'user' %}{% set ns.multi = false %}{% set ns.question = index %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' and message.reasoning_content %}"
    "{% if loop.index0 > ns.question %}<think>{{ message.reasoning_content }}</think>{% endif %}{% endif %}"
    "{% if loop.index < ns['question'] %}old{% endif %}" + TURN + "{% endfor %}",
    "calls": "{%- macro call(each, sep='') -%}{{ sep }}{{ each.function.name }}"
    "({{ each.function.arguments | tojson }}){%- endmacro -%}"
    "{% for message in messages %}" + TURN + "{% for each in message.tool_calls or [] %}"
    "{{ call(each, '' if loop.first else ';') }}{{ loop.length }}{% endfor %}{% endfor %}",
    "leaving": "{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}"
    "{% if message.content == 'stop' %}{% break %}{% endif %}" + TURN + "{% endfor %}",
    "blocks": "{% for message in messages %}{% set said %}{{ message.content | upper }}{% endset %}"
    "{% filter lower %}" + TURN + "{% endfilter %}{{ said }}{% endfor %}{{ messages | length }}",
    "time": "{{ strftime_now('%d') }}{% for message in messages %}" + TURN + "{% endfor %}",
}
# These may change earlier messages when others follow: by what they are given, or for all we know.
BACKWARD = {
    "count": "{% for message in messages %}{{ messages | length }}" + TURN + "{% endfor %}",
    "left": "{% for message in messages %}{{ loop.revindex }}" + TURN + "{% endfor %}",
    "last": "{% for message in messages %}{% if message == messages[-1] %}last{% endif %}"
    + TURN
    + "{% endfor %}",
    "recent": "{% for message in messages[-4:] %}" + TURN + "{% endfor %}",
    "reversed": "{% for message in messages | reverse %}" + TURN + "{% endfor %}",
    "users": "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}{% if message == users[-1] %}tools{% endif %}" + TURN + "{% endfor %}",
    "ahead": "{% set n = messages | length %}{% for message in messages %}{{ n - loop.index0 }}"
    + TURN
    + "{% endfor %}",
    "ahead of it": "{% for message in messages %}{% for each in messages[loop.index :] %}"
    "{{ each.role }}{% endfor %}" + TURN + "{% endfor %}",
    "tested": "{% for message in messages %}{% for each in [1, 2] if loop.revindex > each %}|{% endfor %}"
    + TURN
    + "{% endfor %}",
    "renamed": "{% set now = strftime_now %}{% for message in messages %}{{ now('%d') }}"
    + TURN
    + "{% endfor %}",
    "inner": "{% set ns = namespace(q=0) %}{% for m in messages %}{% set ns.q = loop.index0 %}{% endfor %}"
    "{% for message in messages %}" + TURN + "{% for each in range(9) %}"
    "{{ loop.index0 > ns.q }}{% endfor %}{% endfor %}",
    "shown": "{% set ns = namespace(q=0) %}{% for m in messages %}{% set ns.q = loop.index0 %}{% endfor %}"
    "{% for message in messages %}{{ loop.index0 > ns.q }}{{ ns.q }}" + TURN + "{% endfor %}",
    "summed": "{% set ns = namespace(q=0) %}{% for m in messages %}{% set ns.q = loop.index0 %}{% endfor %}"
    "{% for message in messages %}{{ loop.index0 > ns.q - 2 }}" + TURN + "{% endfor %}",
    "passed": "{% macro at(space) %}{{ space.q }}{% endmacro %}{% set ns = namespace(q=0) %}"
    "{% for m in messages %}{% set ns.q = loop.index0 %}{% endfor %}"
    "{% for message in messages %}{{ loop.index0 > ns.q }}{{ at(ns) }}" + TURN + "{% endfor %}",
    "wrapped": "{% for message in messages %}{{ messages[loop.index0 - 1].content }}" + TURN + "{% endfor %}",
    "searched": "{% for message in messages %}{% if message.content in messages | map(attribute='role') %}!"
    "{% endif %}" + TURN + "{% endfor %}",
    "turns": "{% for message in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(message.role) }}"
    + TURN
    + "{% endfor %}",
    "joined": "{% set sep = joiner('|') %}{% for message in messages %}{{ sep() }}" + TURN + "{% endfor %}",
    "nested": "{% set ns = namespace(inner=namespace(n=0)) %}{% for message in messages %}"
    "{% set inner = ns.inner %}{% set inner.n = inner.n + 1 %}{{ ns.inner.n }}" + TURN + "{% endfor %}",
    "consumed": "{% set roles = messages | map(attribute='role') %}{% for message in messages %}"
    "{{ roles | first }}" + TURN + "{% endfor %}",
    "filtered": "{% for message in messages if message.role != 'tool' %}"
    + TURN
    + "{% endfor %}",
    "else": "{% for message in messages %}" + TURN + "{% else %}none{% endfor %}",
    "branch": "{% if messages %}{% for message in messages %}" + TURN + "{% endfor %}{% endif %}",
}  # fmt: skip
OURS = {family.name: family.template for family in FAMILIES}
TEMPLATES = {**OURS, **FORWARD, **BACKWARD}
TAIL = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def marks_everywhere() -> Iterator[None]:
    with mock.patch.multiple(resumable, MARK_CHARS=0, MARK_ITERATIONS=1):
        yield


def source_of(name: str) -> Source:
    text = TEMPLATES[name] if name in OURS else TEMPLATES[name] + TAIL
    found = ChatTemplate(text, bos_token="<bos>", now=lambda: datetime(2026, 1, 2)).main
    assert found is not None
    return found


SOURCES = {name: source_of(name) for name in TEMPLATES}


@st.composite
def message(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(["user", "assistant", "assistant", "tool", "tool", "system"]))
    found: dict[str, Any] = {
        "role": role,
        "content": draw(st.sampled_from(["", "a", "bb", "stop"])),
    }
    if role == "assistant" and draw(st.booleans()):
        found["reasoning_content"] = "why"
    if role == "assistant" and draw(st.booleans()):
        call = {"name": "f", "arguments": {"x": draw(st.integers(0, 2))}}
        found["tool_calls"] = [{"id": "c", "type": "function", "function": call}] * 2
    return found


# An edit: so many messages of the last conversation stay, and others follow.
edits = st.lists(
    st.tuples(st.integers(0, 3) | st.just(0), st.lists(message(), min_size=1, max_size=5)),
    min_size=2,
    max_size=5,
)


class Step(NamedTuple):
    messages: list[dict[str, Any]]
    text: str
    trace: Trace | None
    marks: list[tuple[Mark, int]]  # with their places in the text


def given_to(messages: list[dict[str, Any]], *, tools: Any) -> dict[str, Any]:
    return {"messages": messages, "add_generation_prompt": True, "bos_token": "<b>", "tools": tools}


def step(source: Source, messages: list[dict[str, Any]], before: Step | None, tools: Any) -> Step:
    """Checked against the plain template."""
    given = given_to(messages, tools=tools)
    plain = source.template.render(given)
    assert source.resumable is not None
    if before is None:
        found = source.resumable.render(given)
        assert found.mark is None
    else:
        pairs = enumerate(zip(before.messages, messages, strict=False))
        num = next((i for i, (one, other) in pairs if one is not other), None)
        num = min(len(before.messages), len(messages)) if num is None else num
        marks = [mark for mark, _ in before.marks]
        found = source.resumable.render(given, known=before.trace, marks=marks, num_same=num)
    kept: list[tuple[Mark, int]] = []
    if found.mark is not None:
        assert before is not None
        marks = [mark for mark, _ in before.marks]
        kept = before.marks[: 1 + marks.index(found.mark)]
    at = kept[-1][1] if kept else 0
    begun = before.text[:at] if before is not None else ""
    assert begun + found.text == plain
    return Step(
        messages, plain, found.trace, [*kept, *((m, at + place) for m, place in found.marks)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@examples(100)
@given(first=st.lists(message(), min_size=1, max_size=8), steps=edits)
def test_a_rendering_that_goes_on_has_the_text_of_the_whole(
    name: str, first: list[dict[str, Any]], steps: list[tuple[int, list[dict[str, Any]]]]
) -> None:
    """I17, part: whatever is appended, changed in the middle or taken away."""
    source = SOURCES[name]
    if source.resumable is None:
        return
    found = step(source, first, None, None)
    for dropped, added in steps:
        kept = found.messages[: max(0, len(found.messages) - dropped)]
        found = step(source, [*kept, *added], found, None)


TALK = [
    {"role": ("user", "assistant")[i % 2], "content": "words " * 9, "tool_calls": []}
    for i in range(12)
]
STEPS = [
    {"role": "user", "content": "question", "tool_calls": []},
    *({"role": ("assistant", "tool")[i % 2], "content": "x"} for i in range(12)),
]


@pytest.mark.parametrize("name", [*OURS, *FORWARD])
@pytest.mark.parametrize("talk", [TALK, STEPS], ids=["talk", "steps"])
def test_what_is_known_of_a_conversation_is_not_rendered_again(
    name: str, talk: list[dict[str, Any]]
) -> None:
    """Of the templates that allow it: all but the last messages, before the last question at least."""
    source = SOURCES[name]
    first = step(source, talk, None, None)
    marks = [mark for mark, _ in first.marks]
    assert source.resumable is not None
    more = [*talk, {"role": "assistant", "content": "so"}, {"role": "tool", "content": "go on"}]
    given = given_to(more, tools=None)
    found = source.resumable.render(given, known=first.trace, marks=marks, num_same=len(talk))
    assert found.mark is not None
    assert found.mark.iteration >= len(talk) - 4


def test_what_stands_before_the_messages_is_to_be_the_same() -> None:
    """The date, and a system prompt's change, are seen."""
    days = [2]
    chat = ChatTemplate(FORWARD["time"], now=lambda: datetime(2026, 1, days[-1]))
    assert chat.main is not None
    source = chat.main.resumable
    assert source is not None
    first = source.render(given_to(TALK, tools=None))
    marks, given = [mark for mark, _ in first.marks], given_to([*TALK, *TALK[:2]], tools=None)
    assert source.render(given, known=first.trace, marks=marks, num_same=12).mark is not None
    days.append(3)
    found = source.render(given, known=first.trace, marks=marks, num_same=12)
    assert found.mark is None
    assert found.text.startswith("03<user>")
