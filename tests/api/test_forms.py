"""The grammars of calls: random logits write sound calls of the asked functions, in every family's form."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from mallee.api.chat.forms import ToolChoice, answer_form, thought_form
from mallee.api.grammars import FREE_TEXT, OutputFormat
from mallee.api.text.answers import THINKING, AnswerParser, Parsed, Reading
from mallee.api.text.conversation import Function
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.text.tools.formats import FORMATS
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.messages import Grammar
from mallee.worker.model.sampling.grammar import TokenGrammars
from support.grammar_lab import train

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "is_on": {"type": "boolean"},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "description": "a ::= b",
            "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
FUNCTIONS = {
    "get_weather": Function("get_weather", "", WEATHER),
    "stop-it.now": Function("stop-it.now"),
}
PLAIN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # of some not special


class Model:
    """A tokenizer in whose vocabulary the marks of a family are tokens, as in its models."""

    def __init__(self, folder: Path, form: str) -> None:
        inner = train(folder / "tokenizer.json")
        inner.add_tokens(list(PLAIN_MARKS))
        marks = [mark for mark in FORMATS[form].marks if mark not in PLAIN_MARKS]
        inner.add_special_tokens(marks)
        inner.save(str(folder / "tokenizer.json"))
        self.inner = inner
        self.tokenizer = Tokenizer(inner)
        self.grammars = TokenGrammars(folder / "tokenizer.json", inner.get_vocab_size(), [0])

    def write(self, grammar: Grammar, seed: int) -> str:
        """An answer of uniformly drawn tokens among those that `grammar` allows, shown as to a parser."""
        matcher: LLMatcher = self.grammars.compile(grammar).fork().inner
        rng, ids = np.random.default_rng(seed), list[int]()
        size = self.inner.get_vocab_size()
        mask = allocate_token_bitmask(1, size)
        bar = "\uff5cDSML\uff5c" if "\uff5cDSML\uff5c" in self.tokenizer.added_tokens else ""
        end = f"</{bar}parameter>" if bar else "\n</parameter>"
        closing = self.inner.encode(end).ids  # hardly ever drawn by chance
        while not matcher.is_stopped() and len(ids) < 4000:
            if rng.random() < 0.1 and matcher.validate_tokens(closing) == len(closing):
                assert matcher.consume_tokens(closing)
                ids += closing
                continue
            fill_next_token_bitmask(matcher, mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
            options = np.flatnonzero(allowed)
            # Ends of strings are rare among all bytes: written as often as anything else together.
            ends = [
                t for t in options if self.inner.id_to_token(int(t)) in ('"', "}", "<end>", "Ċ")
            ]
            pool = ends if ends and rng.random() < 0.3 else options
            token = int(pool[rng.integers(len(pool))])
            assert matcher.consume_token(token)
            if token != 0:
                ids.append(token)
        text = self.tokenizer.detokenizer(self.tokenizer.special_tokens)
        return text.push(ids, is_last=True)


@pytest.fixture(params=list(FORMATS))
def form(request: Any) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(form: str, tmp_path: Path) -> Model:
    return Model(tmp_path, form)


def grammar_of(
    form: str,
    model: Model,
    mode: Any = "required",
    *,
    functions: Mapping[str, Function] = FUNCTIONS,
    output: OutputFormat = FREE_TEXT,
    **more: Any,
) -> Grammar:
    asked = {"several": True, "thinking": None, "is_open": False, **more}
    found = answer_form(
        *(FORMATS[form], ToolChoice(mode, functions), output, model.tokenizer.added_tokens),
        **asked,
    )
    assert found.grammar is not None
    assert found.param == "tools"
    return found.grammar


def read(form: str, text: str, **more: Any) -> Parsed:
    parser: AnswerParser = Reading(form=FORMATS[form], functions=FUNCTIONS, **more).parser()
    return parser.feed(text).plus(parser.end())


def check_calls(found: Parsed, functions: Mapping[str, Function] = FUNCTIONS) -> None:
    for call in found.calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(
            arguments, dict(functions[call.name].parameters) or {"maxProperties": 0}
        )


@pytest.mark.slow
def test_required_calls_conform_to_their_schema(form: str, model: Model) -> None:
    """I16, part, I17: `tool_choice: required`: only calls, each with arguments of its schema."""
    names, most = set(), 0
    grammar = grammar_of(form, model)
    for seed in range(12):
        text = model.write(grammar, seed)
        found = read(form, text)
        assert found.calls, text
        assert found.text == "", text
        check_calls(found)
        names |= {call.name for call in found.calls}
        most = max(most, len(found.calls))
    assert names == set(FUNCTIONS)
    assert (most > 1) == (form not in ("llama3_json", "harmony"))


@pytest.mark.slow
def test_a_single_call_is_a_single_one(form: str, model: Model) -> None:
    """I17: `parallel_tool_calls: false` with required, and with free text beside it.

    If `tool_choice` names a function, it is that.
    """
    for mode in ("required", "auto"):
        grammar = grammar_of(form, model, mode, several=False)
        for seed in range(6):
            found = read(form, model.write(grammar, seed))
            assert len(found.calls) <= 1
            assert found.calls or mode == "auto"
            check_calls(found)
    named = {"get_weather": FUNCTIONS["get_weather"]}
    found = read(form, model.write(grammar_of(form, model, functions=named), 3))
    assert {call.name for call in found.calls} == {"get_weather"}


def accepts(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether the whole `text` is an answer of `grammar`."""
    matcher: LLMatcher = model.grammars.compile(grammar).fork().inner
    ids = model.inner.encode(text, add_special_tokens=False).ids
    if matcher.validate_tokens(ids) < len(ids):
        return False
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_strict_functions_bind_calls_and_leave_text_free(form: str, model: Model) -> None:
    """I16, part, I17: strict with auto: any text, or calls that conform."""
    strict = {"get_weather": Function("get_weather", "", WEATHER, is_strict=True)}
    auto = grammar_of(form, model, "auto", functions=strict)
    must = grammar_of(form, model, "required", functions=strict)
    call = model.write(must, 1)
    assert read(form, call).calls
    assert accepts(model, auto, call)
    head = FORMATS[form].head
    assert accepts(model, auto, head + "The weather is fine. [1] (2) a < b")
    assert accepts(model, auto, head)
    assert not accepts(model, must, head + "The weather is fine.")
    wrong = call.replace("days", "dayz")
    assert wrong != call
    assert not accepts(model, auto, wrong)
    if head:
        assert not accepts(model, auto, "The weather is fine.")
    elif FORMATS[form].opens:
        assert accepts(model, auto, "Well. " + call)
        assert not accepts(model, auto, "Well. " + wrong)


@pytest.mark.slow
def test_reasoning_may_come_first(form: str, model: Model) -> None:
    """I17: a model that reasons does so before the call that it must make."""
    thinking = THINKING["harmony" if form == "harmony" else "think"]
    call = model.write(grammar_of(form, model), 1)
    closed = grammar_of(form, model, thinking=thinking)
    close = thinking.close + ("" if thinking.form else "\n\n")
    assert accepts(model, closed, call)
    assert accepts(model, closed, f"{thinking.open}\nhm {{\n{close}{call}")
    assert not accepts(model, closed, f"hm{close}{call}")
    opened = grammar_of(form, model, thinking=thinking, is_open=True)
    assert accepts(model, opened, f"\nhm\n{close}{call}")
    assert not accepts(model, opened, call)


FORMS = {
    "json_schema": (Grammar("json_schema", '{"type": "integer"}'), "42", "4x"),
    "json_object": (Grammar("json_object"), '{"a":\n  1}', "[]"),
    "regex": (Grammar("regex", "a/b|\\n+c"), "a/b", "a b"),
    "choice": (Grammar("choice", '["yes", "a \\"b\\""]'), 'a "b"', "no"),
    "lark": (Grammar("lark", 'start: "<" x\nx: /[0-9]+/ | "(" x ")"'), "<((12))", "<(12"),
    "gbnf": (Grammar("lark", 'root ::= "a" more\nmore ::= [0-9]+'), "a12", "a"),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", THINKING)
def test_a_form_follows_the_reasoning(kind: str, name: str, tmp_path: Path) -> None:
    """I16, part, I17, part: of marks that are tokens or not, opened by the prompt or not."""
    model, thinking = Model(tmp_path, "harmony"), THINKING[name]
    head = thinking.form.head if thinking.form else ""
    grammar, good, bad = FORMS[kind]
    for is_open in (True, False):
        form = thought_form(
            OutputFormat(grammar, "response_format"),
            model.tokenizer.added_tokens,
            thinking,
            is_open=is_open,
        ).grammar
        assert form is not None
        opening = "" if is_open else thinking.open
        gap = "" if thinking.form else "\n\n"
        thought = f"{opening}\nhm {bad} {good[:1]}\n{thinking.close}{gap}{head}"
        assert accepts(model, form, thought + good)
        assert not accepts(model, form, thought + bad)
        assert not accepts(model, form, thought)
        assert accepts(model, form, head + good) != is_open


def test_calls_beside_a_form_of_text(form: str, model: Model) -> None:
    """I16, part, I17: `response_format` with tools: a call, or text of the schema."""
    output = OutputFormat(Grammar("json_schema", '{"type": "integer"}'), "response_format")
    call = model.write(grammar_of(form, model), 1)
    both = grammar_of(form, model, "auto", output=output)
    assert accepts(model, both, call)
    assert accepts(model, both, FORMATS[form].head + "42")
    assert not accepts(model, both, FORMATS[form].head + "text")
    other = OutputFormat(Grammar("regex", "a+"), "guided_regex")
    with pytest.raises(InvalidParameter, match="guided_regex"):
        grammar_of(form, model, "auto", output=other)


def test_too_much_of_it_is_refused_by_name() -> None:
    many = {f"f{i}": Function(f"f{i}", "", WEATHER, is_strict=True) for i in range(200)}
    with pytest.raises(InvalidParameter, match=r"^tools=.*give at most 65536"):
        answer_form(
            *(FORMATS["hermes"], ToolChoice("required", many), FREE_TEXT, {}),
            several=True,
            thinking=None,
            is_open=False,
        )
