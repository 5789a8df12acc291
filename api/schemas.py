"""JSON schemas in the form in which answers can be held to them; what can't be is refused by its place.

Annotations are left out, so that a grammar has the length of its conditions. Keywords that say nothing go
too, and some are written in another way that means the same. Bounds of integers become the compiler's own.
"""

import json
from functools import cache, lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mallee.protocol.errors import InvalidParameter

FORMATS: Final = (
    *("date-time", "time", "date", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uuid", "uri"),
)
"""Those that are enforced; all others are annotations."""
MAX_INT: Final = (1 << 63) - 1024
"""The compiler knows no larger bound of an integer."""
_EXACT: Final = 1 << 53  # it computes in floats: larger integers are not all told apart

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
LIMITS: Final = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)


def enforceable(schema: Any, param: str, *, may_overlap: bool = True) -> dict[str, Any]:
    """`schema` as a compiler takes it.

    `may_overlap`: whether options of a `oneOf` are disjoint is left to the compiler. Raises InvalidParameter
    that names the keyword's place below `param`.
    """
    try:
        found = _Walk(schema, may_overlap=may_overlap).schema(schema, param)
    except RecursionError:
        raise InvalidParameter(param, schema, "it is nested too deeply") from None
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
        _check_parts(found, param)
        _check_counts(found, param)
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
        found = [self._resolved(each) for each in options] if isinstance(options, list) else []
        kinds = [each.get("type") for each in found]
        if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
            return not {"integer", "number"} <= set(kinds)
        tags = [_tags(each) for each in found]
        return any(
            len(values := [one for each in tags for one in each[name]]) == len(set(values))
            for name in set(tags[0]).intersection(*tags[1:])
        )

    def _resolved(self, given: Any) -> dict[str, Any]:
        ref = given.get("$ref") if isinstance(given, dict) else None
        found = given if ref is None else self._target(ref)
        return found if isinstance(found, dict) else {}


def _tags(option: dict[str, Any]) -> dict[str, list[str]]:
    """The values, as JSON, of the required properties that have a few."""
    found, required = dict[str, list[str]](), option.get("required")
    known = option.get("properties")
    for name, kind in known.items() if isinstance(known, dict) else ():
        if isinstance(required, list) and name in required and isinstance(kind, dict):
            values = kind.get("enum", [kind["const"]] if "const" in kind else None)
            if isinstance(values, list):
                found[name] = list(map(json.dumps, values))
    return found


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _refused(param: str, value: Any, why: str = "no answer can be held to it; leave it out") -> Any:
    return InvalidParameter(param, value, why)


def _check_parts(found: dict[str, Any], param: str) -> None:
    """Have the compiler look at patterns and bounds. Bounds become narrower by a little, never wider."""
    for name in (*found.get("patternProperties", ()), *filter(None, [found.get("pattern")])):
        if why := _fault(json.dumps({"type": "string", "pattern": name})):
            key = "pattern" if name == found.get("pattern") else f"patternProperties.{name}"
            raise InvalidParameter(f"{param}.{key}", name, why)
    bounds = {key: found[key] for key in _NUMBERS if type(found.get(key)) in (int, float)}
    kinds = found.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds and "number" not in kinds:
        for key, value in bounds.items():
            low = key.endswith("inimum")
            bounds[key] = max(value, -MAX_INT) if low else min(value, MAX_INT)
        found.update(bounds)
        if _has_integer(bounds):
            return
    if bounds and (why := _fault(json.dumps({"type": found.get("type", "number"), **bounds}))):
        key = next(iter(bounds))
        raise InvalidParameter(f"{param}.{key}", bounds[key], why)


def _has_integer(bounds: dict[str, Any]) -> bool:
    """Whether an integer is surely within the bounds: spares the compiler's 0.5 ms in the event loop."""
    if any(type(value) is not int or abs(value) > _EXACT for value in bounds.values()):
        return False
    low: int = max(bounds.get("minimum", -_EXACT), bounds.get("exclusiveMinimum", -_EXACT) + 1)
    high: int = min(bounds.get("maximum", _EXACT), bounds.get("exclusiveMaximum", _EXACT) - 1)
    return low <= high


def _check_counts(found: dict[str, Any], param: str) -> None:
    """Counts of properties. Keys that aren't declared may come twice, and count once."""
    known, required = found.get("properties", {}), found.get("required", [])
    least, most = found.get("minProperties", 0), found.get("maxProperties")
    if not isinstance(required, list) or not isinstance(least, int):
        return  # the compiler refuses it
    if least <= len(required):
        found.pop("minProperties", None)
        least = 0
    is_closed = found.get("additionalProperties", True) is False and not found.get(
        "patternProperties"
    )
    if is_closed and least > len(known):
        remedy = f"no object has more than its {len(known)} properties"
        raise InvalidParameter(f"{param}.minProperties", least, remedy)
    has_optional = any(name not in required for name in known)
    if least and (least > 1 if is_closed else has_optional or least > len(required) + 1):
        why = "name the keys in required: others can't be counted, since one may come twice"
        raise _refused(f"{param}.minProperties", least, why)
    if most is not None and has_optional and not (is_closed and most == 1):
        raise _refused(f"{param}.maxProperties", most)


@lru_cache(1024)
def _fault(part: str) -> str:
    """The compiler's complaint about a part of a schema, "" if it has none."""
    return fault_of(byte_matcher(LLMatcher.grammar_from_json_schema(part), LIMITS))


def byte_matcher(grammar: str, limits: LLParserLimits) -> LLMatcher:
    """An automaton over the bytes of a text."""
    return LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=limits)


def fault_of(matcher: LLMatcher) -> str:
    """The line that says what is wrong with its grammar; "" if nothing is."""
    if not matcher.is_error():
        return ""
    lines = [line for line in matcher.get_error().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it can't be compiled"])[0][:200]


@cache
def _bytes_as_tokens() -> LLTokenizer:
    return LLTokenizer("byte")
