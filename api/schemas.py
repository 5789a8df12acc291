"""JSON schemas in the form in which answers can be held to them; what can't be is refused by its place.

Annotations are left out, so that a grammar has the length of its conditions. Keywords that say nothing go
too, and some are written in another way that means the same. Bounds of integers become the compiler's own.
"""

import json
import re
from functools import lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mallee.protocol.errors import InvalidParameter

FORMATS: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    )
)
"""Those that are enforced; all others are annotations."""
MAX_INT: Final = (1 << 63) - 1024
"""The compiler knows no larger bound of an integer."""

_ONE: Final = ("additionalProperties", "items", "additionalItems")  # schemas
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")  # of schemas
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")  # of schemas
_KEPT: Final = frozenset(
    (
        *("type", "enum", "const", "required", "$ref", "$schema", "$id", "$anchor"),
        *("minLength", "maxLength", "pattern", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        *("minItems", "maxItems", "minProperties", "maxProperties", *_ONE, *_LISTS, *_MAPS),
    )
)
# Conditions without a grammar, by the values at which they say nothing.
_UNKNOWN: Final[dict[str, tuple[Any, ...]]] = {
    "not": (False,),
    "if": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "contains": (),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WORDS: Final = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")
_LIMITS: Final = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


def enforceable(schema: Any, param: str, *, may_overlap: bool = True) -> dict[str, Any]:
    """`schema` as a compiler takes it.

    `may_overlap`: whether options of a `oneOf` are disjoint is left to the compiler. Raises InvalidParameter
    that names the keyword's place below `param`.
    """
    found = _Walk(schema, may_overlap=may_overlap).schema(schema, param)
    if found is False:
        raise InvalidParameter(param, schema, "no value is valid under it")
    return {} if found is True else found


class _Walk:
    def __init__(self, root: Any, *, may_overlap: bool) -> None:
        self._root = root
        self._may_overlap = may_overlap

    def schema(self, given: Any, param: str) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise InvalidParameter(param, given, "a schema is an object or a boolean")
        if given.get("not") in ({}, True) and "not" in given:
            return False
        self._check(given, param)
        found: dict[str, Any] = {}
        for key, value in given.items():
            place = f"{param}.{key}"
            if key not in _KEPT:
                continue
            if key in _ONE and not isinstance(value, list):
                found[key] = self.schema(value, place)
            elif key in _LISTS or (key == "items" and isinstance(value, list)):
                found[key] = self._list(value, place)
            elif key in _MAPS:
                found[key] = self._map(value, place)
            elif key != "format" or value in FORMATS:
                found[key] = value
        _text(found, param)
        _number(found, param)
        _object(found, param)
        return found

    def _list(self, given: Any, param: str) -> list[Any]:
        if not isinstance(given, list):
            raise InvalidParameter(param, given, "give a list of schemas")
        return [self.schema(each, f"{param}[{i}]") for i, each in enumerate(given)]

    def _map(self, given: Any, param: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise InvalidParameter(param, given, "give an object of schemas")
        return {name: self.schema(each, f"{param}.{name}") for name, each in given.items()}

    def _check(self, given: dict[str, Any], param: str) -> None:
        """Raises InvalidParameter for a condition that no grammar has."""
        for key, neutral in _UNKNOWN.items():
            if key not in given or any(_same(given[key], each) for each in neutral):
                continue
            value = given[key]
            if key == "if" and all(given.get(k, True) in (True, {}) for k in ("then", "else")):
                continue
            if key == "dependentRequired" and isinstance(value, dict) and not any(value.values()):
                continue
            raise _refused(f"{param}.{key}", value)
        ref = given.get("$ref")
        if ref is not None and self._target(ref) is None:
            remedy = 'give a place in this schema, such as "#/$defs/name"'
            raise InvalidParameter(f"{param}.$ref", ref, remedy)
        if not self._may_overlap and "oneOf" in given and not self._is_disjoint(given["oneOf"]):
            raise _refused(f"{param}.oneOf", given["oneOf"], "its options may overlap; give anyOf")

    def _target(self, ref: Any) -> Any:
        """The schema that `ref` names; None if it is not found here."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        found = self._root
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict):
                found = found.get(name)
            else:
                return None
        return found if ref == "#" or ref.startswith("#/") else {}  # an anchor: the compiler looks

    def _is_disjoint(self, options: Any) -> bool:
        """Whether no value is valid under two of them, by their types or by a property's values."""
        if not isinstance(options, list):
            return False
        found = [self._resolved(each) for each in options]
        kinds = [each.get("type") for each in found]
        if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
            return not {"integer", "number"} <= set(kinds)
        tags = [_tags(each) for each in found]
        shared = set(tags[0]).intersection(*tags[1:]) if tags else set[str]()
        return any(_are_apart([each[name] for each in tags]) for name in shared)

    def _resolved(self, given: Any) -> dict[str, Any]:
        target = (
            self._target(given["$ref"]) if isinstance(given, dict) and "$ref" in given else given
        )
        return target if isinstance(target, dict) else {}


def _tags(option: dict[str, Any]) -> dict[str, list[Any]]:
    """The values of the required properties that have a few."""
    known, required = option.get("properties"), option.get("required")
    if not isinstance(known, dict) or not isinstance(required, list):
        return {}
    return {
        name: [kind["const"]] if "const" in kind else kind["enum"]
        for name, kind in known.items()
        if name in required and isinstance(kind, dict) and kind.keys() & {"const", "enum"}
    }


def _are_apart(values: list[Any]) -> bool:
    written = [json.dumps(each) for several in values for each in several]
    return len(set(written)) == len(written)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _refused(param: str, value: Any, why: str = "no answer can be held to it; leave it out") -> Any:
    return InvalidParameter(param, value, why)


def _text(found: dict[str, Any], param: str) -> None:
    pattern = found.get("pattern")
    if pattern is not None and (why := _fault("pattern", json.dumps(pattern))):
        raise InvalidParameter(f"{param}.pattern", pattern, why)
    for name in found.get("patternProperties", ()):
        if why := _fault("pattern", json.dumps(name)):
            raise InvalidParameter(f"{param}.patternProperties.{name}", name, why)


def _number(found: dict[str, Any], param: str) -> None:
    """Bounds within those of the compiler: narrower by a little, never wider."""
    bounds = {key: found[key] for key in _NUMBERS if _is_number(found.get(key))}
    if not bounds:
        return
    if found.get("type") == "integer":
        for key, value in bounds.items():
            if key.endswith("inimum") and value < -MAX_INT:
                found[key] = bounds[key] = -MAX_INT
            elif key.endswith("aximum") and value > MAX_INT:
                found[key] = bounds[key] = MAX_INT
    kind = found.get("type", "number")
    kinds = {"type": kind, **bounds}
    if why := _fault("", json.dumps(kinds, sort_keys=True)):
        key = next(iter(bounds))
        raise InvalidParameter(f"{param}.{key}", bounds[key], why)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(found: dict[str, Any], param: str) -> None:
    """Counts of properties. Keys that aren't declared may come twice, and count once."""
    known = found.get("properties", {})
    patterns = found.get("patternProperties", {})
    words = {name: _WORDS.fullmatch(name) for name in patterns}
    if patterns and all(words.values()):  # names, and no patterns
        names = {
            name: kind
            for pattern, kind in patterns.items()
            if (word := words[pattern])
            for name in (word[1] or word[2]).split("|")
        }
        if not names.keys() & known.keys():
            del found["patternProperties"]
            found["properties"] = known = {**known, **names}
            patterns = {}
    is_closed = found.get("additionalProperties", True) is False and not patterns
    required = found.get("required", [])
    if not isinstance(required, list):
        return
    least, most = found.get("minProperties", 0), found.get("maxProperties")
    if not isinstance(least, int) or not isinstance(most, int | None):
        return  # the compiler refuses it
    if least <= len(required):
        found.pop("minProperties", None)
        least = 0
    possible = [name for name, kind in known.items() if kind is not False]
    if is_closed and least > len(possible):
        remedy = f"no object has more than its {len(possible)} properties"
        raise InvalidParameter(f"{param}.minProperties", least, remedy)
    if is_closed and least == len(possible) > 0:
        found["required"] = [*required, *(name for name in possible if name not in required)]
        del found["minProperties"]
        least = 0
    if is_closed and most is not None and most >= len(possible):
        del found["maxProperties"]
        most = None
    has_optional = any(name not in required for name in known)
    if least and not (is_closed and least == 1):
        if not is_closed and (has_optional or least > len(required) + 1):
            why = "keys that aren't in properties may come twice; name them in required"
            raise _refused(f"{param}.minProperties", least, why)
        if is_closed:
            raise _refused(f"{param}.minProperties", least)
    if most is not None and has_optional and not (is_closed and most == 1):
        raise _refused(f"{param}.maxProperties", most)


@lru_cache(1024)
def _fault(key: str, written: str) -> str:
    """The compiler's complaint about a part of a schema, "" if it has none."""
    part = f'{{"type": "string", "{key}": {written}}}' if key else written
    matcher = LLMatcher(
        _bytes_as_tokens(), LLMatcher.grammar_from_json_schema(part), log_level=0, limits=_LIMITS
    )
    if not matcher.is_error():
        return ""
    lines = [line for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it can't be compiled"])[0][:200]


@lru_cache(1)
def _bytes_as_tokens() -> LLTokenizer:
    return LLTokenizer("byte")
