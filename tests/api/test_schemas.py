"""Schemas as answers are held to them: what ends is valid under the schema that the client gave."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from msgspec import structs

from mallee.api import schemas
from mallee.api.grammars import json_schema
from mallee.api.schemas import LIMITS, MAX_INT, byte_matcher, enforceable, fault_of
from mallee.protocol.errors import InvalidParameter
from mallee.runtime.config import HttpSettings
from mallee.worker.model.sampling.grammar import TokenGrammars
from support.grammar_lab import train

KEYS = ("a", "ab", "b", "é", 'q"', "x-1")
PATTERNS = ("^[ab]{1,3}$", "^x", "b$", "[0-9]{2}", "^(a|b)$")


@pytest.fixture
def call(call_with: Any, service: Any) -> Any:
    service.model = structs.replace(service.model, max_model_len=1 << 21)
    return call_with(HttpSettings())


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> TokenGrammars:
    path: Path = tmp_path_factory.mktemp("schemas") / "tokenizer.json"
    return TokenGrammars(path, train(path).get_vocab_size(), [0])


def value(rng: random.Random) -> Any:
    return rng.choice([None, True, 0, -3, 2.5, "", "a", "é\n", 'q"\\', [1, "a"], {"a": 1}, {}, []])


def bounds(rng: random.Random, low: str, high: str, most: int) -> dict[str, int]:
    a, b = sorted((rng.randint(0, most), rng.randint(0, most)))
    return {k: v for k, v in ((low, a), (high, b)) if rng.random() < 0.6}


def made(rng: random.Random, depth: int = 2) -> Any:
    """A schema, sound or not, of the keywords that people use."""
    noted = {"description": "of it", "x-own": {"not": {}}, "title": "T"}
    notes = {k: noted[k] for k in noted if rng.random() < 0.2}
    kind = rng.choice(
        [*("string", "integer", "number", "enum", "null", "bool", "any"), *("object", "array") * 3]
        + (["anyOf", "oneOf", "allOf", "ref"] if depth else [])
    )

    def inner() -> Any:
        return made(rng, depth - 1) if depth else rng.choice([True, {"type": "integer"}, {}])

    match kind:
        case "string":
            found = {"type": "string", **bounds(rng, "minLength", "maxLength", 5)}
            if rng.random() < 0.4:
                found["pattern"] = rng.choice(PATTERNS)
            elif rng.random() < 0.3:
                found["format"] = rng.choice(["date", "path", "uuid", "int32"])
        case "integer" | "number":
            found = {"type": kind, **bounds(rng, "minimum", "maximum", 20)}
            if rng.random() < 0.3:
                found["exclusiveMinimum"] = rng.choice([-5, 3, -(2**63)])
        case "enum":
            found = {"enum": [value(rng) for _ in range(rng.randint(1, 3))]}
            found = found if rng.random() < 0.7 else {"const": found["enum"][0]}
        case "null" | "bool":
            found = {"type": {"null": ["null", "integer"], "bool": "boolean"}[kind]}
        case "any":
            return rng.choice([True, {}, False])
        case "array":
            found = {"type": "array", **bounds(rng, "minItems", "maxItems", 3)}
            found["items"] = inner()
            if rng.random() < 0.2:
                found["prefixItems"] = [inner()]
            if rng.random() < 0.1:
                found["uniqueItems"] = rng.random() < 0.5
        case "object":
            keys = rng.sample(KEYS, rng.randint(0, 3))
            found = {"type": "object", "properties": {key: inner() for key in keys}}
            found["required"] = [key for key in keys if rng.random() < 0.6]
            if rng.random() < 0.6:
                found["additionalProperties"] = rng.choice([False, False, inner()])
            if rng.random() < 0.3:
                found["patternProperties"] = {rng.choice(PATTERNS): inner()}
            if rng.random() < 0.4:
                found |= bounds(rng, "minProperties", "maxProperties", 4)
        case "ref":
            found = {"$ref": "#/$defs/d", "$defs": {}}
        case _:
            found = {kind: [inner() for _ in range(rng.randint(1, 2))]}
    return {**notes, **found}


def answer(matcher: LLMatcher, rng: np.random.Generator, size: int) -> list[int] | None:
    """Tokens drawn at random among those that are allowed; None: it came to no end."""
    ids = list[int]()
    for _ in range(120):
        if matcher.is_stopped():
            return [token for token in ids if token]
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        options = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])
        if not len(options):
            return None
        is_end = 0 in options and rng.random() < 0.3
        near = [t for t in options if t < 100] if rng.random() < 0.5 else []  # marks and ASCII
        token = 0 if is_end else int(rng.choice(near or options))
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def test_whatever_ends_is_valid_under_the_schema_that_was_given(grammars: TokenGrammars) -> None:
    """I16, part: random schemas, random choices. Refused schemas are refused before anything is drawn."""
    rng, draws = random.Random(5), np.random.default_rng(5)
    checker, size = jsonschema.FormatChecker(["date", "uuid"]), grammars._vocab_size
    num_held = num_ended = 0
    for i in range(240):
        schema = made(rng)
        if isinstance(schema, dict):
            schema["$defs"] = {"d": made(random.Random(i), 0)}
        try:
            start = grammars.compile(json_schema(schema, "schema"))
        except InvalidParameter:
            continue
        num_held += 1
        for _ in range(4):
            ids = answer(start.fork().inner, draws, size)
            if ids is None:
                continue
            num_ended += 1
            text = grammars._read_tokenizer().decode_str(ids)
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
                json.loads(text)
            )
    assert num_held > 150, num_held
    assert num_ended > 300, num_ended


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


HELD = {
    "a boolean": ({"a": True}, {"a": True}),
    "an unknown format": ({"type": "string", "format": "path"}, {"type": "string"}),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": -MAX_INT, "maximum": MAX_INT},
    ),
    "int64 or null": (
        {"type": ["integer", "null"], "maximum": 2**63 - 1},
        {"type": ["integer", "null"], "maximum": MAX_INT},
    ),
    "a record": ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
    "conditions that say nothing": (
        {"if": {"required": ["a"]}, "then": {}, "dependentRequired": {"a": []}, "not": False},
        {},
    ),
    "annotations": (
        {"description": "d", "default": 1, "x-y": {"not": {}}, "type": "null"},
        {"type": "null"},
    ),
}
REFUSED = {
    ".properties.a.uniqueItems": thing(a={"type": "array", "uniqueItems": True}),
    ".properties.a.propertyNames": thing(a={"propertyNames": {"pattern": "^a"}}),
    ".items.not": {"items": {"not": {"type": "null"}}},
    ".if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    ".dependentRequired": {"dependentRequired": {"a": ["b"]}},
    ".anyOf[1].pattern": {"anyOf": [{}, {"type": "string", "pattern": r"\bx\b"}]},
    ".properties.a.pattern": thing(a={"pattern": "^(?!a)"}),
    ".properties.a.maximum": thing(a={"type": "number", "maximum": 1e300}),
    ".properties.a.$ref": thing(a={"$ref": "https://example.com/x"}),
    ".minProperties": {  # a single key is possible
        "patternProperties": {"^a$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
}
FREE_KEYS = {"additionalProperties": {"type": "integer"}, "minProperties": 3, "maxProperties": 3}


@pytest.mark.parametrize("name", HELD)
def test_a_schema_is_written_as_a_compiler_takes_it(name: str) -> None:
    """I16, part: booleans, annotations, formats that nobody knows, and keywords that say nothing."""
    given, wanted = HELD[name]
    schema = given.get("a") if name == "a boolean" else given
    assert enforceable(schema, "s") == ({} if name == "a boolean" else wanted)


@pytest.mark.parametrize("place", REFUSED)
def test_what_no_answer_can_be_held_to_is_refused_by_its_place(place: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        enforceable(REFUSED[place], "s")
    assert caught.value.fields["param"] == "s" + place


@pytest.mark.parametrize(
    "schema",
    [{"format": []}, {"oneOf": [{"properties": {"a": {"enum": 5}}, "required": ["a"]}] * 2},
     {"oneOf": 5}, {"properties": 1}, {"required": 1}, {"minProperties": "x"}, {"pattern": 5},
     {"oneOf": []}, {"type": {}, "minimum": 1}, {"type": [{}], "minimum": 1}, {"$ref": 5}, {"anyOf": [5]},
     {"maximum": "1"}],
)  # fmt: skip
def test_an_unsound_schema_is_no_fault_of_ours(schema: Any) -> None:
    """Refused here, or by the compiler of a worker."""
    with suppress(InvalidParameter):
        enforceable(schema, "s", may_overlap=False)


def test_a_schema_of_a_thousand_levels_is_refused() -> None:
    schema: Any = {}
    for _ in range(1000):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="nested too deeply"):
        enforceable(schema, "s")


def test_whole_bounds_are_compared_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(schemas, "_fault", lambda part: compiled.append(part) or "")
    many = {f"p{i}": {"type": "integer", "minimum": i, "maximum": 3 * i} for i in range(300)}
    enforceable(thing(**many), "schema")
    enforceable({"type": ["integer", "null"], "minimum": -9, "exclusiveMaximum": 9}, "schema")
    assert not compiled
    for bound in (1.5, 1 << 60):
        enforceable({"type": "integer", "minimum": bound}, "schema")
    assert len(compiled) == 2


def test_whole_bounds_are_sound_where_the_compiler_says_so() -> None:
    rng = random.Random(4)
    ends = [0, 1, -1, 9, 10, 11, 999, -1000, 1 << 53, -(1 << 53), MAX_INT, -MAX_INT]
    outcomes = set()
    for _ in range(600):
        bounds = {key: rng.choice(ends) for key in schemas._NUMBERS if rng.random() < 0.5}
        part = {"type": "integer", **bounds}
        matcher = byte_matcher(LLMatcher.grammar_from_json_schema(json.dumps(part)), LIMITS)
        is_sound = not fault_of(matcher)
        outcomes.add(is_sound)
        if is_sound:
            assert enforceable(part, "schema") == part
        else:
            with pytest.raises(InvalidParameter):
                enforceable(part, "schema")
    assert outcomes == {True, False}


def test_keys_that_may_come_twice_count_once() -> None:
    """I16, part: what could end without the keys that it must have is refused, also where none can be met."""
    for schema in (FREE_KEYS, {**thing(a={}), "minProperties": 1}):
        with pytest.raises(InvalidParameter, match="may come twice"):
            enforceable(schema, "s")
    closed = {**thing(a={}), "additionalProperties": False, "minProperties": 2}
    with pytest.raises(InvalidParameter, match="no object has more than its 1 properties"):
        enforceable(closed, "s")
    with pytest.raises(InvalidParameter, match="no value is valid"):
        enforceable({"not": {}}, "s")


def test_a_key_can_be_written_in_one_way_alone(grammars: TokenGrammars) -> None:
    """I16, part: an escaped key would be another to the grammar, and the same to its reader."""
    held = {**thing(a={"type": "integer"}, é={}), "required": ["a"]}
    matcher = grammars.compile(json_schema(held, "s")).inner
    tokenizer = grammars._read_tokenizer()
    for text, is_good in (
        ('{"a":1,"b\\n":"x"}', True),
        ('{"a":1,"\\u0061":"x"}', False),
        ('{"a":1,"a":"x"}', False),
        ('{"a":1,"é":2,"\\u00e9":3}', False),
    ):
        ids = tokenizer.tokenize_str(text)
        assert (matcher.validate_tokens(ids) == len(ids)) == is_good, text


# In requests


BAD = {  # as a tool's property `a`
    "propertyNames": {"type": "object", "propertyNames": {"minLength": 2}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "null"}},
    "pattern": {"type": "string", "pattern": r"\bx\b"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "maximum": {"type": "number", "maximum": 1e300},
}
GOOD = {**thing(cmd={"type": "string"}), "required": ["cmd"]}


def asked(api: str, schema: Any, strict: bool | None) -> tuple[str, dict[str, Any]]:
    """A request by which calls are held to a grammar, with a second tool of `schema`."""
    tools = [{"name": "sh", "parameters": GOOD}, {"name": "x", "parameters": schema}]
    if strict is not None:
        tools[1]["strict"] = strict
    messages = [{"role": "user", "content": "hi"}]
    match api:
        case "responses":
            made = [{"type": "function", "strict": False, **tool} for tool in tools]
            body = {"input": "hi", "tools": made, "parallel_tool_calls": False}
            return "/v1/responses", body
        case "messages":
            for tool in tools:
                tool["input_schema"] = tool.pop("parameters")
            choice = {"type": "auto", "disable_parallel_tool_use": True}
            body = {"messages": messages, "tools": tools, "tool_choice": choice}
            return "/v1/messages", {**body, "max_tokens": 8}
    made = [{"type": "function", "function": tool} for tool in tools]
    body = {"messages": messages, "tools": made, "max_tokens": 8}
    if api == "strict beside it":
        made[0]["function"]["strict"] = True
        return "/v1/chat/completions", body
    wish = {"tool_choice": "required"} if api == "required" else {"parallel_tool_calls": False}
    return "/v1/chat/completions", body | wish


@pytest.mark.parametrize("keyword", BAD)
@pytest.mark.parametrize("api", ["chat", "required", "strict beside it", "responses", "messages"])
def test_a_tool_that_no_grammar_can_hold_is_free_unless_it_is_strict(
    call: Any, grammars: TokenGrammars, api: str, keyword: str
) -> None:
    """I16, part, I17: free arguments, named in a header; the other tools stay as they are."""
    place = f"tools.x.properties.a.{keyword}"
    path, body = asked(api, thing(a=BAD[keyword]), None)
    answer = call("POST", path, body)
    assert answer.status == 200, answer.body
    assert answer.headers["warnings"].endswith(f"can be held to: '{place}'")
    assert b"mallee_free_tools_total 1" in call.service.gateway_metrics.render()
    grammar = call.service.job.grammar
    matcher = grammars.compile(grammar).inner
    tokenizer = grammars._read_tokenizer()
    for text, is_good in (
        ('{"name": "x", "arguments": {"a": [1, 1], "z": "\\n"}}', True),
        ('{"name": "x", "arguments": [1]}', False),
        ('{"name": "sh", "arguments": {"cmd": "ls"}}', True),
        ('{"name": "sh", "arguments": {"cmd": 1}}', False),
    ):
        ids = tokenizer.tokenize_str(f"<tool_call>\n{text}\n</tool_call>")
        assert (matcher.validate_tokens(ids) == len(ids)) == is_good, text
    path, body = asked(api, thing(a=BAD[keyword]), True)
    refused = call("POST", path, body)
    if keyword == "oneOf":  # a worker's compiler looks deeper than a gateway
        with pytest.raises(InvalidParameter, match="oneOf"):
            grammars.compile(call.service.job.grammar)
        return
    assert refused.status == 400
    assert refused.body["error"]["param"] == place


@pytest.mark.parametrize(
    "schema",
    [{"type": "any"}, {"type": "string", "minLength": -1}, {"$ref": "#nowhere"}, {"$ref": "#/components/a"},
     {"allOf": [{"type": "string"}, {"type": "integer"}]}],
)  # fmt: skip
def test_what_a_compiler_refuses_of_a_tool_frees_it(
    call: Any, grammars: TokenGrammars, schema: Any
) -> None:
    """Clients send schemas of others' tools, sound or not: no such one refuses a request."""
    whole = {**thing(a=schema), "required": ["a"], "components": {"a": {"type": "string"}}}
    answer = call("POST", *asked("chat", whole, None))
    assert answer.status == 200, answer.body
    assert answer.headers["warnings"].endswith("can be held to: 'tools.x'")
    assert not grammars.compile(call.service.job.grammar).error


def test_a_megabyte_of_tools_is_taken(call: Any, grammars: TokenGrammars) -> None:
    """I17, part: descriptions are no part of a grammar; of too many schemas the last ones are free."""
    long = {"type": "string", "description": "x " * 900}
    path, body = asked("chat", {}, None)
    body["max_tokens"] = 1
    many = [f"t{i}" for i in range(500)]
    body["tools"] = [
        {"type": "function", "function": {"name": name, "parameters": thing(a=long)}}
        for name in many
    ]
    assert len(json.dumps(body)) > 900_000
    answer = call("POST", path, body)
    assert answer.status == 200, answer.body
    assert "'tools.t140'" in answer.headers["warnings"]
    assert "'tools.t100'" not in answer.headers["warnings"]
    assert not grammars.compile(call.service.job.grammar).error


@pytest.mark.parametrize(
    ("schema", "param"),
    [(True, ""), (False, "schema"), (FREE_KEYS, "schema.minProperties")],
)
def test_forms_may_be_booleans_and_are_refused_by_place(call: Any, schema: Any, param: str) -> None:
    """I16, part: in every API that has them."""
    messages = [{"role": "user", "content": "hi"}]
    form = {"type": "json_schema", "name": "x", "schema": schema}
    place = "response_format.json_schema."
    chat = {"messages": messages, "response_format": {"type": "json_schema", "json_schema": form}}
    bodies = [("/v1/chat/completions", place, chat)]
    bodies += [
        ("/v1/completions", place, {"prompt": "a", "response_format": chat["response_format"]})
    ]
    bodies += [("/v1/responses", "text.format.", {"input": "hi", "text": {"format": form}})]
    for path, before, body in bodies:
        answer = call("POST", path, body)
        assert answer.status == (400 if param else 200), answer.body
        if param:
            assert answer.body["error"]["param"] == before + param
