"""Forms that Gemma is asked for: JSON in a fence, Python in one, or either as the whole answer.

{"name": ..., "parameters": {...}} in ```json, f(a=1) or print(f(a=1)) in ```tool_code, [f(a=1), g()].
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from mallee.actors.text.tools.lark import Lark
from mallee.actors.text.tools.source import Block, Call, Functions, Source, call_of, call_of_object

JSON: Final = "```json"
PYTHON: Final = "```tool_code"
FENCE: Final = "```"
MAX_CODE_CHARS: Final = 1 << 16
_WORDS: Final = {"true": True, "false": False, "null": None}


class Gemma:
    """Calls of a fence or of a list."""

    opens = (JSON, PYTHON)
    marks: tuple[str, ...] = ()
    starts = ("[", "{")
    has_short_ids = False

    def block(self, source: Source, functions: Functions) -> Block:
        fence = yield from source.literal(JSON, PYTHON)
        yield from source.space()
        if fence == PYTHON:
            code = yield from source.until(FENCE)
            calls = _python(code or "", functions)
        elif not fence and (yield from source.stands("[")):
            calls = _python((yield from source.bracketed("\"'")) or "", functions)
        else:
            is_list = yield from source.stands("[")
            value = yield from (source.json() if is_list else source.call_object())
            values = value if isinstance(value, list) else [value]
            found = [call_of_object(each, functions) for each in values]
            calls = [call for call in found if call is not None]
            calls = calls if len(calls) == len(found) else []
        if not calls:
            return False
        if fence:
            yield from source.space()
            if not (yield from source.literal(FENCE)) and source.pos < len(source.text):
                return False
        yield from calls
        return True

    def grammar(self, lark: Lark, functions: Functions, *, several: bool) -> str:
        calls = []
        for i, function in enumerate(functions.values()):
            head = lark.literal(f'\n{{"name": {json.dumps(function.name)}, "parameters": ')
            arguments = lark.arguments(f"arguments_{i}", function.parameters)
            calls.append(
                lark.add(f"call_{i}", f"{head} {arguments} {lark.literal('}' + chr(10) + FENCE)}")
            )
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
