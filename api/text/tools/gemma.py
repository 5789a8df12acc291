"""Forms that Gemma is asked for: JSON in a fence, Python in one, or either as the whole answer.

{"name": ..., "parameters": {...}} in ```json, f(a=1) or print(f(a=1)) in ```tool_code, [f(a=1), g()].
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from mallee.api.text.tools.lark import Lark
from mallee.api.text.tools.parser import ToolFormat
from mallee.api.text.tools.source import Block, Call, Functions, Source, call_of, json_calls

JSON: Final = "```json"
PYTHON: Final = "```tool_code"
FENCE: Final = "```"
MAX_CODE_CHARS: Final = 1 << 16
_WORDS: Final = {"true": True, "false": False, "null": None}


class Gemma(ToolFormat):
    """Calls of a fence or of a list."""

    opens = (JSON, PYTHON)
    starts = ("[", "{")

    def block(self, source: Source, functions: Functions) -> Block:
        fence = yield from source.literal(JSON, PYTHON)
        yield from source.space()
        is_list = yield from source.stands("[")
        if fence == PYTHON or (is_list and not fence):
            text = source.until(FENCE) if fence else source.bracketed("\"'")
            calls = _python((yield from text) or "", functions)
            if fence:
                yield from source.literal(FENCE)
            yield from calls
            return bool(calls)
        if not is_list and not (yield from source.may_be_call()):
            return False
        if not (yield from json_calls(source, functions)):
            return False
        if not fence:
            return True
        yield from source.space()
        return bool((yield from source.literal(FENCE))) or source.pos == len(source.text)

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        def head(name: str) -> str:
            return f'\n{{"name": {json.dumps(name)}, "parameters": '

        calls = lark.each_call(functions, head, "}\n" + FENCE)
        lark.calls(calls, lark.literal("\n" + JSON) if several else None)
        return JSON


def _python(code: str, functions: Functions) -> list[Call]:
    """The calls in `code`, none of which is run; none if it is anything else."""
    try:
        if len(code) > MAX_CODE_CHARS:
            return []
        body = ast.parse(code.strip()).body
        made = [call for line in body for call in _of_line(line, functions)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [call for call in made if call is not None] if None not in made else []


def _of_line(line: ast.stmt, functions: Functions) -> list[Call | None]:
    if not isinstance(line, ast.Expr):
        return [None]
    nodes = line.value.elts if isinstance(line.value, ast.List | ast.Tuple) else [line.value]
    return [_of_node(node, functions) for node in nodes]


def _of_node(node: ast.expr, functions: Functions) -> Call | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if name == "print" and len(node.args) == 1 and name not in functions:
        return _of_node(node.args[0], functions)
    if name not in functions:
        return None
    known = functions[name].parameters.get("properties")
    keys = list(known) if isinstance(known, Mapping) else []
    if len(node.args) > len(keys):
        return None
    arguments = {key: _literal(value) for key, value in zip(keys, node.args, strict=False)}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            return None
        arguments[keyword.arg] = _literal(keyword.value)
    return call_of(name, arguments, functions)


def _literal(node: ast.expr) -> Any:
    """A value of JSON. Raises ValueError."""
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            if not all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in keys):
                raise ValueError("a key that is no text")
            pairs = zip(keys, values, strict=True)
            return {k.value: _literal(v) for k, v in pairs if isinstance(k, ast.Constant)}
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
    raise ValueError("no value of JSON")
