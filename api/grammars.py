"""The grammar of a request's answers, in all the fields by which clients ask for one."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mallee.api.schemas import enforceable
from mallee.protocol.api.generate import ForkRequest, SamplingFields
from mallee.protocol.errors import InvalidParameter, MalleeError
from mallee.protocol.messages import Grammar


class OutputFormat(NamedTuple):
    """The grammar of a request's answers, and the field that names it.

    `freed`: places in the schemas of tools that can't be held to, so that their arguments are free.
    """

    grammar: Grammar | None = None
    param: str = ""
    freed: tuple[str, ...] = ()

    def checked(self) -> "OutputFormat":
        """Itself, if its grammar is not too long. Raises InvalidParameter."""
        try:
            if self.grammar is not None:
                self.grammar.validate()
        except InvalidParameter as error:
            raise self.named(error) from error
        return self

    def named(self, error: MalleeError) -> MalleeError:
        """`error`, about the client's own field where it was about "grammar"."""
        if error.fields.get("param") != "grammar":
            return error
        message = error.message
        if message.startswith("grammar="):
            message = self.param + message.removeprefix("grammar")
        return type(error).with_message(message, **{**error.fields, "param": self.param})


FREE_TEXT: Final = OutputFormat()


def read_output_format(request: SamplingFields) -> OutputFormat:
    """At most one of `response_format`, `structured_outputs` and the `guided_` fields may be given.

    The worker checks whether the grammar is sound. Raises InvalidParameter.
    """
    found = [
        OutputFormat(grammar, param)
        for param, read in _READERS.items()
        if (value := getattr(request, param)) is not None
        and (grammar := read(value, param)) is not None
    ]
    if len(found) > 1:
        raise InvalidParameter(found[1].param, "...", f"{found[0].param} says it already; give one")
    if not found:
        return FREE_TEXT
    output = found[0]
    assert output.grammar is not None
    if output.grammar.kind == "inherit" and not isinstance(request, ForkRequest):
        raise InvalidParameter(
            f"{output.param}.type", "inherit", "only a fork has a capsule to inherit from"
        )
    return output.checked()


def _response_format(value: Any, param: str) -> Grammar | None:
    """OpenAI's, and {"type": "inherit"} of ours."""
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "inherit":
            return Grammar("inherit")
        case "json_schema":
            described = value.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if schema is None:
                raise InvalidParameter(
                    f"{param}.json_schema", described, 'give {"name": ..., "schema": {...}}'
                )
            return json_schema(schema, f"{param}.json_schema.schema")
    raise InvalidParameter(param, value, "give a type of text, json_object or json_schema")


def _structured_outputs(value: Any, param: str) -> Grammar | None:
    """vLLM's: one of json, regex, choice, grammar, json_object; its tuning knobs at their defaults."""
    if not isinstance(value, dict):
        raise InvalidParameter(param, value, "give an object")
    given = {key: v for key, v in value.items() if v is not None and v is not False}
    if not given:
        return None
    if len(given) > 1 or (key := next(iter(given))) not in _STRUCTURES:
        known = ", ".join(_STRUCTURES)
        raise InvalidParameter(param, sorted(given), f"give exactly one of {known}")
    return _STRUCTURES[key](given[key], f"{param}.{key}")


def json_schema(value: Any, param: str) -> Grammar:
    """The grammar of a schema, or of its text. Raises InvalidParameter naming the place in it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(param, value, f"it is no JSON: {error}") from error
    if not isinstance(value, dict | bool):
        raise InvalidParameter(param, value, "give a JSON schema")
    return Grammar("json_schema", json.dumps(enforceable(value, param)))


def _regex(value: Any, param: str) -> Grammar:
    return Grammar("regex", _string(value, param))


def _lark(value: Any, param: str) -> Grammar:
    return Grammar("lark", _string(value, param))


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidParameter(param, value, "give a list with at least one string")
    return Grammar("choice", json.dumps(value))


def _json_object(value: Any, param: str) -> Grammar:
    if value is not True:
        raise InvalidParameter(param, value, "give true or false")
    return Grammar("json_object")


def _string(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(param, value, "give a string that isn't empty")
    return value


_STRUCTURES: Final[dict[str, Callable[[Any, str], Grammar]]] = {
    "json": json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "json_object": _json_object,
}
_READERS: Final[dict[str, Callable[[Any, str], Grammar | None]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": json_schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
}
FORM_FIELDS: Final = tuple(_READERS)
