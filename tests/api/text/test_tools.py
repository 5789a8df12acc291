"""Calls in answers' texts: every family's form, however the text is split."""

import json
import random
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.api.text.conversation import Function
from mallee.api.text.tools.formats import FORMATS, format_of
from mallee.api.text.tools.parser import MAX_FAILED, CallParser, Piece, ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Prose, Source, joined_calls
from mallee.api.text.tools.tagged import GLM45, MINIMAX, QWEN_CODER
from support.tool_answers import FUNCTIONS, WRITERS, recorded

FAMILIES = list(WRITERS)  # harmony's marks are no text, with calls or without
TAGS = {"qwen3_coder": QWEN_CODER, "glm45": GLM45, "minimax_m2": MINIMAX}
NUM_RECORDED = 125  # of each family


def parsed(family: str, *parts: str) -> list[Piece]:
    """The pieces of a text in parts, neighbouring texts joined, and calls with their arguments."""
    parser = CallParser(FORMATS[family], FUNCTIONS)
    found: list[Piece] = []
    for piece in [piece for part in parts for piece in parser.feed(part)] + parser.end():
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        elif isinstance(piece, Call) and not piece.name:
            last = found[-1]
            assert isinstance(last, Call), "arguments go on that none began"
            found[-1] = Call(last.name, last.arguments + piece.arguments)
        elif isinstance(piece, Prose) and found and isinstance(last := found[-1], Prose):
            found[-1] = Prose(last.text + piece.text, is_thought=True)
        else:
            found.append(piece)
    return found


def calls_of(pieces: list[Piece]) -> list[Any]:
    """With arguments as objects, or as text if they broke."""
    return [(p.name, _read(p.arguments)) for p in pieces if isinstance(p, Call)]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_answers_are_told_apart(family: str) -> None:
    """I17, part: text, names and arguments of each recorded answer are those that it was written from.

    Whole, and one character at a time.
    """
    for number in range(NUM_RECORDED):
        made = recorded(family, number)
        found = parsed(family, made.raw)
        wanted = [(call.name, json.loads(call.arguments)) for call in made.calls]
        assert calls_of(found) == wanted, made.raw
        assert text_of(found) == made.text, made.raw
        assert parsed(family, *made.raw) == found, made.raw


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_breaks_off_loses_nothing(family: str) -> None:
    """I17, part: cut short anywhere, calls are calls as far as they came, the rest is text."""
    for number in range(0, NUM_RECORDED, 20):
        made = recorded(family, number)
        whole = [p for p in parsed(family, made.raw) if isinstance(p, Call)]
        for at in range(number % 3, len(made.raw), 3):
            raw = made.raw[:at]
            found = parsed(family, raw)
            calls = [p for p in found if isinstance(p, Call)]
            assert calls[:-1] == whole[: len(calls[:-1])]
            if calls:
                last = whole[len(calls) - 1]
                assert calls[-1].name == last.name
                assert last.arguments.startswith(calls[-1].arguments)
            elif family != "harmony":
                assert text_of(found) == raw
            assert parsed(family, *raw) == found


ATOMS = ["<parameter=a>", "search", *'x[],:{}"\\ \n', '{"name": "search", "arguments": {"a": ']
ATOMS += ['{"name": "search", "arguments": {}}']


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_text_is_read_alike_however_it_is_split(family: str, data: st.DataObject) -> None:
    """Made of the family's own marks and pieces of JSON: mostly nonsense, and never an error."""
    form = FORMATS[family]
    marks = [*form.opens, *form.starts, *form.marks, "</tool_call>", "```", "</function>"]
    raw = "".join(data.draw(st.lists(st.sampled_from([*marks, *ATOMS]), max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    parts = [raw[a:b] for a, b in pairwise([0, *cuts, len(raw)])]
    whole = parsed(family, raw)
    assert parsed(family, *parts) == whole
    if not calls_of(whole) and family != "harmony":
        assert text_of(whole) == raw


@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_than_a_value_is_held_back(family: str) -> None:
    """I17, part: while a call of many values is written, its arguments come; Python's come at the end."""
    calls = [("search", {f"k{i}": i for i in range(100)})]
    for seed in range(6):
        raw = WRITERS[family](random.Random(seed), calls)
        parser = CallParser(FORMATS[family], FUNCTIONS)
        parts = [p for char in raw for p in parser.feed(char) if isinstance(p, Call)]
        if family == "gemma" and not raw.startswith("```json"):
            continue
        assert len(parts) >= 100, raw
        assert max(len(part.arguments) for part in parts) < 20


@pytest.mark.parametrize(
    ("raw", "pieces"),
    [
        # The rest of a broken call is text, wherever it breaks.
        ('{"a": ]}}</tool_call> x', [Call("search", '{"a": '), "]}}</tool_call> x"]),
        ('{"a": 1}</tool_call> x', [Call("search", '{"a": 1}'), "</tool_call> x"]),
        ('{"a": 1}, "b" 2}</tool_call>', [Call("search", '{"a": 1}'), ', "b" 2}</tool_call>']),
        ('{"a": 1}} so</tool_call>', [Call("search", '{"a": 1}'), "} so</tool_call>"]),
        ('{"a": 1}, "id": "7"}</tool_call>', [Call("search", '{"a": 1}')]),
        ('{"a": "1', [Call("search", '{"a": "1')]),
        ('{"a": "\\', [Call("search", '{"a": "'), "\\"]),
    ],
)
def test_a_call_that_breaks_keeps_what_was_sent(raw: str, pieces: list[Piece]) -> None:
    """I17, part: what came before the break is a call, in streams as in whole answers."""
    raw = '<tool_call>{"name": "search", "arguments": ' + raw
    assert parsed("hermes", raw) == pieces
    assert parsed("hermes", *raw) == pieces


def test_text_flows_while_no_call_begins() -> None:
    """Only what may become a mark is held back."""
    for family in FAMILIES:
        parser = CallParser(FORMATS[family], FUNCTIONS)
        given_ = "".join(text_of(parser.feed(word)) for word in ("The", " tree", " stands", " <"))
        assert given_.startswith("The tree stands"), family
    # Other JSON is no call and is not waited for.
    parser = CallParser(FORMATS["llama3_json"], FUNCTIONS)
    assert text_of(parser.feed('{"answer": [')) == '{"answer": ['


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ('{"arguments": {"a": NaN}, "name": "search"}', None),
        ('{"arguments": {"a": 1e999}, "name": "search"}', None),
        ('{"name": "search", "arguments": [1]}', None),
        ('{"name": "search"}', None),
        ('{"name": 3, "arguments": {}}', None),
        ('{"arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + ', "name": "search"}', None),
        ('{"arguments": {"a":   1}, "name": "search"}', '{"a": 1}'),
        ('{"type": "function", "name": "search", "parameters": {"a":   1}}', '{"a":   1}'),
        ('{"name": "search", "arguments": null}', "{}"),
        ('{"name": "search", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "search", "arguments": {"a": "two\nlines"}}', '{"a": "two\\nlines"}'),
        ('{"name": "search", "arguments": {"a": "\\ud800"}}', '{"a": "\\ud800"}'),
    ],
)
def test_arguments_are_the_text_of_an_object_or_it_is_no_call(
    value: str, arguments: str | None
) -> None:
    """Clients read them as JSON, in UTF-8."""
    raw = f"<tool_call>{value}</tool_call>"
    wanted: list[Piece] = [raw] if arguments is None else [Call("search", arguments)]
    assert parsed("hermes", raw) == wanted
    assert all(p.arguments.encode() for p in parsed("hermes", raw) if isinstance(p, Call))


def test_python_s_positions_are_the_parameters_in_order() -> None:
    found = parsed("gemma", "[get_weather('Oslo', 2, is_on=True), search()]")
    assert calls_of(found) == [
        ("get_weather", {"city": "Oslo", "days": 2, "is_on": True}),
        ("search", {}),
    ]
    for raw in (
        "[search(x)]",
        "[search(**a)]",
        "[search(1, city=2)]",
        "[1, 2]",
        "[search(), eval('1')]",
    ):
        assert parsed("gemma", raw) == [raw]


def test_values_of_qwen_coder_have_the_types_of_their_schema() -> None:
    schema = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {}}}
    parser = CallParser(FORMATS["qwen3_coder"], {"f": Function("f", "", schema)})
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in (("s", "12"), ("n", "12"), ("o", '{"a": [true]}'), ("x", "plain"))
    )
    parts = parser.feed(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    (call,) = joined_calls(part for part in parts if isinstance(part, Call))
    assert len(parts) == 5  # by parameter
    assert json.loads(call.arguments) == {"s": "12", "n": 12, "o": {"a": [True]}, "x": "plain"}


@pytest.mark.parametrize("family", ["qwen3_coder", "glm45", "minimax_m2"])
def test_strings_that_may_be_null_are_texts(family: str) -> None:
    """As a model writes them: text that looks like JSON is text, and null is null."""
    null, text = {"type": "null"}, {"type": "string"}
    kinds = {"a": {"anyOf": [text, null]}, "b": {"type": ["string", "null"]}, "c": {"anyOf": []}}
    functions = {"f": Function("f", "", {"properties": kinds})}
    tags = TAGS[family]

    def arguments(**values: str) -> Any:
        body = "".join(
            tags.key[0]
            + key
            + tags.key[1]
            + tags.values[0]
            + value
            + ("\n" if tags.values[0] == "\n" else "")
            + tags.value_end
            for key, value in values.items()
        )
        raw = f"{tags.block[0]}{tags.call[0]}f{tags.call[1]}{body}{tags.call[2]}{tags.block[1]}"
        parts = CallParser(FORMATS[family], functions).feed(raw)
        (call,) = joined_calls(part for part in parts if isinstance(part, Call))
        return json.loads(call.arguments)

    assert arguments(a="12", b='"x"', c="12") == {"a": "12", "b": '"x"', "c": 12}
    assert arguments(a="null", b="None", c="x") == {"a": None, "b": None, "c": "x"}


def test_ids_of_kimi_are_names_and_numbers() -> None:
    """Other heads are text: an id goes to clients as it is."""
    for head, own_id in (
        ("functions.search:0", "functions.search:0"),
        (" search:17\n", "search:17"),
        ("functions.search:x", ""),
        ("functions.search:0 search:1", ""),
        ("functions.search", ""),
    ):
        raw = f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        parser = CallParser(FORMATS["kimi_k2"], FUNCTIONS)
        pieces = parser.feed(raw) + parser.end()
        ids = [piece.own_id for piece in pieces if isinstance(piece, Call) and piece.name]
        assert ids == ([own_id] if own_id else [])
        assert own_id or "".join(piece for piece in pieces if isinstance(piece, str)) == raw


def test_long_arguments_take_time_by_their_length() -> None:
    """A file of 200 kB, a few characters at a time: not the square of it."""
    code = json.dumps("x = {'a': [1]}\n" * 14_000)
    raw = f'<tool_call>{{"name": "search", "arguments": {{"city": {code}}}}}</tool_call>'
    parser = CallParser(FORMATS["hermes"], FUNCTIONS)
    began = time.process_time()
    pieces = [p for i in range(0, len(raw), 8) for p in parser.feed(raw[i : i + 8])]
    (call,) = joined_calls(piece for piece in pieces if isinstance(piece, Call))
    assert call.arguments == f'{{"city": {code}}}'
    assert time.process_time() - began < 10.0


def test_a_long_value_is_held_in_time_by_its_length() -> None:
    """A value that comes whole, a few characters at a time: eight times the text, not 64 times the time."""

    def seconds(length: int) -> float:
        parser = CallParser(FORMATS["qwen3_coder"], FUNCTIONS)
        parser.feed("<tool_call><function=search><parameter=city>")
        began = time.process_time()
        for _ in range(length // 4):
            parser.feed("xxxx")
        return time.process_time() - began

    assert min(seconds(400_000) for _ in range(2)) < 25 * min(seconds(50_000) for _ in range(3))


class CountingFormat:
    """A family's form that counts the blocks that are begun."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self.num_blocks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._form, name)

    def block(self, source: Source, functions: Functions) -> Block:
        self.num_blocks += 1
        return self._form.block(source, functions)


BROKEN = [
    ("hermes", '<tool_call>{"'),
    ("qwen3_coder", "<tool_call><function=search><parameter=a>"),
    ("gemma", '```json{"name'),
    ("gemma", "```tool_code "),
    ("mistral", '[TOOL_CALLS][{"'),
    ("mistral_args", "[TOOL_CALLS]x"),
    ("glm45", "<tool_call>x<"),
    ("minimax_m2", '<minimax:tool_call><invoke name="search"><parameter name="a">'),
    ("deepseek_v32", '<\uff5cDSML\uff5cinvoke name="search"><\uff5cDSML\uff5cparameter name="a">'),
    ("kimi_k2", "<|tool_call_begin|>x"),
    ("harmony", "<|channel|>x"),
    ("deepseek_v3", "<\uff5ctool\u2581call\u2581begin\uff5c>x"),
]


@pytest.mark.parametrize(("family", "broken"), BROKEN)
def test_broken_blocks_are_looked_at_a_limited_number_of_times(family: str, broken: str) -> None:
    """I17, part: each may be read to the answer's end before it is known to be none."""
    form = CountingFormat(FORMATS[family])
    parser = CallParser(form, FUNCTIONS)  # type: ignore[arg-type]
    raw = broken * 1000
    assert text_of([*parser.feed(raw), *parser.end()]) == raw
    assert form.num_blocks <= MAX_FAILED


@pytest.mark.parametrize("num", [MAX_FAILED - 1, MAX_FAILED, MAX_FAILED + 1])
def test_text_after_many_broken_blocks_is_read_alike_however_it_is_split(num: int) -> None:
    raw = "<tool_call>x " * num + '\n<tool_call>{"name": "search", "arguments": {}}</tool_call> \n'
    whole = parsed("hermes", raw)
    assert bool(calls_of(whole)) == (num < MAX_FAILED)
    assert parsed("hermes", *raw) == whole
    for at in range(len(raw) - 90, len(raw)):
        assert parsed("hermes", raw[:at], raw[at:]) == whole


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("..<tool_call>..", "hermes"),
        ("..<tool_call>\n<function=..", "qwen3_coder"),
        ("<|start_header_id|>.. 'parameters'", "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]..[ARGS]", "mistral_args"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>..```json", "deepseek_v3"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v31"),
        ("<start_of_turn>", "gemma"),
        ("<\uff5cDSML\uff5cfunction_calls>", "deepseek_v32"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>", "glm47"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|im_start|>", None),
    ],
)
def test_the_form_is_the_one_that_the_template_shows(template: str, name: str | None) -> None:
    assert format_of(template) == name
    assert name is None or name in FORMATS
