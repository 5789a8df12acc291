"""Request bodies: bytes in, typed structs out, every refused field named with its range.

null means absent. A field is declared, or another API's that changes nothing (ignored), or another API's that
changes answers (accepted only at its neutral value), or unknown: refused, or ignored and named to the client.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from mallee.api.errors import TooManyValues
from mallee.protocol.api.shared import OTHERS_HARMLESS, OTHERS_NEUTRAL, AnyBody, Extras
from mallee.protocol.errors import BadRequest, InvalidParameter, nearest

LEAST_VALUES: Final = 1 << 18  # that a body may have, whatever the model
SMALL_BODY: Final = 64 << 10  # bytes, which are decoded in no time whatever they say
MAX_DIGITS: Final = 256  # of a number of a larger body: to read one takes the square of its length
MAX_DEPTH: Final = 128  # of objects and lists in each other; recursive code reads them later

NO_HINTS: Final[Mapping[str, str]] = MappingProxyType({})

R = TypeVar("R", bound=AnyBody)

_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_STRANGER = re.compile(r"(?s)unknown field `(.*)`$")
_STEP = re.compile(r"(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"missing required field `(\w+)`$")
_BOUND = re.compile(r"[<>]|^Invalid (enum )?value")
_PART: Final = "part"
_UNKNOWN: Final = "this server does not know the field; {}"
_LEAVE: Final = "leave it out"


class Read(NamedTuple, Generic[R]):
    """A body that was read, and its unknown fields."""

    body: R
    ignored: tuple[str, ...]


def decode(raw: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object in `raw`. Raises BadRequest, and TooManyValues beyond `max_values`."""
    if len(raw) > SMALL_BODY:
        _check_values(raw, max_values)
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as e:
        raise _too_deep() from e
    except ValueError as e:  # not JSON, not UTF-8, a number of thousands of digits
        raise BadRequest(f"the body is not JSON: {e}") from e
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and not _is_flat(body):
        raise _too_deep()
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def read(body: dict[str, Any], kind: type[R], *, is_strict: bool = True) -> Read[R]:
    """`body` as one of type `kind`; `is_strict`: unknown fields are refused.

    Raises BadRequest, and InvalidParameter naming the field.
    """
    given: dict[str, Any] = {}
    unknown: dict[str, Any] = {}
    known = kind.__struct_fields__
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = value
        elif not _changes_nothing(name, value):
            unknown[name] = value
    try:
        made = msgspec.convert(given, kind, strict=True)
    except (msgspec.ValidationError, OverflowError) as e:
        raise _bad_field(str(e), given, kind) from e
    for name, value in given.items():
        if type(value) is dict and isinstance(part := getattr(made, name), msgspec.Struct):
            others = value.keys() - part.__struct_fields__
            unknown |= {f"{name}.{each}": value[each] for each in others}
    if unknown and is_strict:
        name, value = next(iter(unknown.items()))
        raise InvalidParameter(name, value, _UNKNOWN.format(meant(name, kind) or _LEAVE))
    return Read(made, tuple(unknown))


def meant(name: str, kind: type[AnyBody]) -> str:
    """The field of `kind` that the unknown `name` may have been meant for, if one is near."""
    known, own = kind.__struct_fields__, Extras.__struct_fields__
    if name in own and "mallee" in known:
        return f"it is `mallee.{name}`"
    prefix, _, last = name.rpartition(".")
    return nearest(last, own if prefix == "mallee" else () if prefix else known)


def num_values(raw: bytes) -> int:
    """At least the values and names of the JSON in `raw`."""
    return _num_values(np.frombuffer(raw, np.uint8))


def may_have_long_number(raw: bytes) -> bool:
    """Whether `decode` may refuse JSON with `raw` in it for a long number, wherever that stands in it."""
    return _has_long_number(np.frombuffer(raw, np.uint8), MAX_DIGITS // 2)


def _check_values(raw: bytes, most: int) -> None:
    """Refuse what would hold the interpreter's lock for long, also in another thread.

    Raises TooManyValues and BadRequest. numpy counts without the lock.
    """
    text = np.frombuffer(raw, np.uint8)
    if _num_values(text) <= most and not _has_long_number(text):
        return
    if b"\\" in raw:  # a quote after one is part of a text
        text = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    text = text * ~np.logical_xor.accumulate(text == ord('"'))  # without what stands in texts
    if (num := _num_values(text)) > most:
        raise TooManyValues(num, most)
    if _has_long_number(text):
        raise BadRequest(f"the body has a number of more than {MAX_DIGITS} digits")


def _num_values(text: NDArray[np.uint8]) -> int:
    """At least the values and names of JSON."""
    return sum(int(np.count_nonzero(text == mark)) for mark in b",:[{")


def _has_long_number(text: NDArray[np.uint8], length: int = MAX_DIGITS) -> bool:
    """Whether digits fill a block of that length: those of twice of it always do."""
    is_digit = text - np.uint8(ord("0")) < 10
    blocks = is_digit[: len(text) // length * length].reshape(-1, length)
    return bool(blocks.all(axis=1).any())


def _is_flat(value: object) -> bool:
    """Whether `value` has at most MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)  # type: ignore[attr-defined]
            if isinstance(inner, list | dict)
        ]
        if not level:
            return True
    return False


def _too_deep() -> BadRequest:
    return BadRequest(f"the body is not JSON that is read here: more than {MAX_DEPTH} levels deep")


def _changes_nothing(name: str, value: object) -> bool:
    """Whether the field is another API's, and as if it were left out. Raises InvalidParameter if it isn't."""
    if name in OTHERS_HARMLESS:
        return True
    if name not in OTHERS_NEUTRAL:
        return False
    neutral = OTHERS_NEUTRAL[name]
    if any(type(value) is type(other) and value == other for other in neutral):
        return True
    allowed = "".join(f", or give {other!r}" for other in neutral)
    raise InvalidParameter(name, value, f"not supported; leave it out{allowed}")


def read_part(value: Any, kind: Any, param: str, hints: Mapping[str, str] = NO_HINTS) -> Any:
    """A part of a body, at `param`, as a `kind`; `hints` have remedies by refused values of `type`.

    Raises InvalidParameter.
    """
    try:
        return msgspec.convert({_PART: value}, _holder(kind), strict=True).part
    except (msgspec.ValidationError, OverflowError) as e:
        what, found, place = str(e).rpartition(f"`$.{_PART}")
        raise _bad_field(f"{what}`${place}" if found else str(e), value, kind, param, hints) from e


@cache
def _holder(kind: Any) -> Any:
    """A struct of one `kind`: msgspec works all other types out anew each time, and slowly.

    Every refusal says where in it: else a name that isn't known could look like the place, which is last.
    """
    return msgspec.defstruct("Holder", [(_PART, kind)])


def _bad_field(
    message: str, given: Any, kind: Any, where: str = "", hints: Mapping[str, str] = NO_HINTS
) -> BadRequest:
    """The refusal of what msgspec refuses, with the place, the value and the range of its type."""
    found = _PATH.search(message)
    is_name, path = (False, "") if found is None else (bool(found[1]), found[2])
    if found is not None:
        message = message[: found.start()]
    if (missing := _MISSING.search(message)) is not None:
        path, message = f"{path}.{missing[1]}", "give it: it is required"
    elif not (path or where):
        return BadRequest(message)
    value: Any = given
    types = [_type_of(kind)]
    for key, index, every in _STEP.findall(path):
        types = [inner for each in types for inner in _below(each, key, value)]
        if not every:  # of a value in an object it isn't told whose
            value = value.get(key) if key else value[int(index)]
            where += f"{'.' if where else ''}{key}" if key else f"[{index}]"
    if (stranger := _STRANGER.search(message)) is not None:
        structs = (s for each in types for s in _choices(each) if isinstance(s, inspect.StructType))
        known = (each.encode_name for struct in structs for each in struct.fields)
        remedy = _UNKNOWN.format(nearest(stranger[1], known, _LEAVE))
        return InvalidParameter(f"{where}.{stranger[1]}", value.get(stranger[1]), remedy)
    if where.endswith(".type") and isinstance(value, str) and value in hints:
        return InvalidParameter(where, value, hints[value])
    if is_name:
        objects = (each for inner in types for each in _choices(inner))
        types = [each.key_type for each in objects if isinstance(each, inspect.DictType)]
    bounds = [*dict.fromkeys(bound for each in types if (bound := _bounds(each)))]
    if not bounds or _BOUND.search(message) is None:
        return InvalidParameter(where, value, message)
    remedy = f"give {', or '.join(bounds)}" + (" in each name" if is_name else "")
    return InvalidParameter(where, value, remedy)


@cache
def _type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _below(kind: inspect.Type, field: str, value: Any) -> Iterator[inspect.Type]:
    """The types that `field`, or an element, of `value` may have."""
    for each in _choices(kind):
        if isinstance(each, inspect.StructType):
            if field == each.tag_field:
                yield inspect.LiteralType((each.tag,))
            elif _is_tagged(value, each):
                yield from (f.type for f in each.fields if f.encode_name == field)
        elif isinstance(each, inspect.DictType):
            yield each.value_type
        elif isinstance(each, inspect.CollectionType | inspect.VarTupleType):
            yield each.item_type


def _is_tagged(value: Any, kind: inspect.StructType) -> bool:
    """Whether a value is no other struct of a union by its tag."""
    if kind.tag_field is None or not isinstance(value, dict):
        return True
    return bool(value.get(kind.tag_field, kind.tag) == kind.tag)


def _choices(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _choices(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _choices(each)
    else:
        yield kind


def _bounds(kind: inspect.Type) -> str:
    """The range of a type in words."""
    found = []
    for each in _choices(kind):
        if isinstance(each, inspect.IntType | inspect.FloatType):
            low, high, above = each.ge, each.le, each.gt
            if above is not None:
                found.append(f"more than {above:g}" + (f", up to {high:g}" if high else ""))
            elif low is not None and high is not None:
                found.append(f"{_number(low)} to {_number(high)}")
            elif low is not None:
                found.append(f"at least {_number(low)}")
            elif high is not None:
                found.append(f"at most {_number(high)}")
        elif isinstance(each, inspect.LiteralType):
            found.append(" or ".join(map(str, each.values)))
        elif isinstance(each, inspect.StrType | inspect.CollectionType | inspect.DictType):
            things = "characters" if isinstance(each, inspect.StrType) else "values"
            if each.max_length is not None:
                found.append(f"{each.min_length or 0} to {each.max_length} {things}")
            elif each.min_length:
                found.append(f"{each.min_length} or more {things}")
    return ", or ".join(found)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
