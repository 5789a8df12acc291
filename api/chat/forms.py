"""The functions that an answer may call, must call, or must not, and its form for that as one grammar."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from llguidance import LLMatcher, grammar_from

from mallee.api.grammars import OutputFormat
from mallee.api.schemas import LIMITS, enforceable
from mallee.api.text.answers import Thinking
from mallee.api.text.conversation import Function
from mallee.api.text.tools.lark import ANY_TEXT, FREE, Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.messages import Grammar

Mode: TypeAlias = Literal["none", "auto", "required"]
_SHAPES: Final = (
    'give none, auto, required, {"type": "function", "function": {"name": ...}} or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)
_GAP: Final = r"/\n{0,2}/"  # behind the reasoning
MAX_HELD_NBYTES: Final = 40 << 10
"""Of the schemas and rules of functions that aren't strict; those beyond are free."""
_RULE_NBYTES: Final = 256


class ToolChoice(NamedTuple):
    """`functions` are those that may be called; the prompt may show more.

    `is_named`: the client names the one that is called, once.
    """

    mode: Mode
    functions: Mapping[str, Function]
    is_named: bool = False


def read_choice(value: Any, functions: tuple[Function, ...]) -> ToolChoice:
    """OpenAI's `tool_choice`, by default auto where there are functions. Raises BadRequest."""
    known = {function.name: function for function in functions}
    if value is None:
        return ToolChoice("auto" if known else "none", known)
    if not known and value not in ("none", "auto"):
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if value in ("none", "auto", "required"):
        return ToolChoice(value if known else "none", known)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", _chosen([name], known), is_named=True)
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools), **more}}:
            mode = more.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise InvalidParameter("tool_choice.allowed_tools.mode", mode, "auto or required")
            names = [_name(tool) for tool in tools]
            return ToolChoice(mode, _chosen(names, known))
    raise InvalidParameter("tool_choice", value, _SHAPES)


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidParameter("tool_choice.allowed_tools.tools", tool, _SHAPES)


def _chosen(names: list[str], known: Mapping[str, Function]) -> Mapping[str, Function]:
    for name in names:
        if name not in known:
            remedy = f"give one of tools: {', '.join(known)}"[:400]
            raise InvalidParameter("tool_choice.function.name", name, remedy)
    if not names:
        raise InvalidParameter("tool_choice.allowed_tools.tools", [], "give at least one tool")
    return {name: known[name] for name in names}


def answer_form(
    form: ToolFormat,
    choice: ToolChoice,
    output: OutputFormat,
    added_tokens: Mapping[str, int],
    *,
    several: bool,
    thinking: Thinking | None,
    is_open: bool,
) -> OutputFormat:
    """The grammar of calls, of free text beside them or of `output`; none where all is free.

    `thinking`: the model may reason first; `is_open`: it does so already. Raises InvalidParameter.
    """
    is_strict = any(function.is_strict for function in choice.functions.values())
    several = several and not choice.is_named
    if choice.mode == "auto" and several and not is_strict and output.grammar is None:
        return output
    lark = Lark(added_tokens)
    functions, freed = _held(choice.functions)
    opening = form.grammar(lark, functions, several=several)
    calls, head = f"{lark.literal(opening)} calls".strip(), lark.literal(form.head)
    if choice.mode == "required":
        start = calls
    elif output.grammar is not None:
        text = lark.json("text_form", _schema(output.grammar, output.param))
        start = f"{calls} | {head} {text}"
    elif head:
        start = f"{calls} | {head} {lark.add('plain_text', ANY_TEXT)}"
    elif opening:
        free = lark.text_until("before_calls", opening)
        start = f"{lark.add('plain_text', ANY_TEXT)} | {free} calls"
    else:
        start = f"{calls} | {lark.add('plain_text', _not_beginning(form.starts))}"
    start = _after_thinking(lark, start, thinking, is_open=is_open)
    return OutputFormat(Grammar("lark", lark.build(start)), "tools", freed).checked()


def thought_form(
    output: OutputFormat, added_tokens: Mapping[str, int], thinking: Thinking, *, is_open: bool
) -> OutputFormat:
    """The form `output` of what follows the reasoning. Raises InvalidParameter."""
    grammar = output.grammar
    assert grammar is not None, "a free answer has no form"
    lark = Lark(added_tokens)
    if grammar.kind in ("json_schema", "json_object"):
        form = lark.json("form", _schema(grammar, output.param), is_loose=True)
    elif grammar.kind == "choice":
        form = lark.add("form", " | ".join(map(json.dumps, json.loads(grammar.source))))
    else:
        form = lark.add("form", f"%lark {{\n{_lark(grammar, output.param)}\n}}")
    if thinking.form is not None:
        form = f"{lark.literal(thinking.form.head)} {form}"
    start = _after_thinking(lark, form, thinking, is_open=is_open)
    return OutputFormat(Grammar("lark", lark.build(start)), output.param).checked()


def _lark(grammar: Grammar, param: str) -> str:
    """Also of a regular expression, and of the older notation with ::=."""
    if grammar.kind == "regex":
        made = json.loads(LLMatcher.grammar_from_regex(grammar.source))
        text: str = made["grammars"][0]["lark_grammar"]
        return text
    if "::=" not in grammar.source:
        return grammar.source
    try:
        return grammar_from("gbnf", grammar.source).removeprefix("%llguidance {}")
    except ValueError as error:
        raise InvalidParameter(param, grammar.source, str(error)) from error


def _held(functions: Mapping[str, Function]) -> tuple[dict[str, Function], tuple[str, ...]]:
    """The functions with schemas that a grammar can have, and places in those that it can't.

    Arguments of functions that aren't strict are free then, as any object. Raises InvalidParameter for strict
    ones.
    """
    found, freed, nbytes = dict[str, Function](), list[str](), 0
    for name, function in functions.items():
        given, is_strict, place = function.parameters, function.is_strict, f"tools.{name}"
        schema = dict(FREE)
        try:
            if is_strict or nbytes < MAX_HELD_NBYTES:
                held = enforceable(given, place, may_overlap=is_strict) if given else {}
                if not is_strict and (why := _fault(json.dumps(held))):
                    raise InvalidParameter(place, given, why)
                schema = held
        except InvalidParameter as error:
            if is_strict:
                raise
            place = error.fields["param"]
        if schema == FREE != given:
            freed.append(place)
        nbytes += 0 if schema == FREE else _RULE_NBYTES + len(json.dumps(schema))
        found[name] = replace(function, parameters=schema)
    return found, tuple(freed)


@lru_cache(1024)
def _fault(schema: str) -> str:
    """The compiler's complaint about arguments of a schema, "" if it has none."""
    lark = Lark({})
    grammar = lark.build(lark.arguments("all", json.loads(schema)))
    return LLMatcher.validate_grammar(grammar, limits=LIMITS)


def _after_thinking(lark: Lark, start: str, thinking: Thinking | None, *, is_open: bool) -> str:
    if thinking is None:
        return start
    gap = "" if thinking.form else lark.add("gap", _GAP)
    thoughts = f"{lark.text_until('thoughts', thinking.close)} {gap}"
    if is_open:
        return f"{thoughts} ({start})"
    return f"({lark.literal(thinking.open)} {thoughts})? ({start})"


def _not_beginning(starts: tuple[str, ...]) -> str:
    """Text that can't be taken for a call: none begins with its first character."""
    first = "".join(sorted({start[0] for start in starts if start[0] != "<"}))
    return rf"/([^\s{first}](.|\n)*)?/".replace("[^\\s[", "[^\\s\\[")


def _schema(grammar: Grammar, param: str) -> Any:
    if grammar.kind == "json_object":
        return {"type": "object"}
    if grammar.kind != "json_schema":
        raise InvalidParameter(param, grammar.kind, "beside tools give a JSON schema, or none")
    try:
        return json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(param, grammar.source, f"no JSON: {error}") from error
