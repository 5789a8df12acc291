"""The normal form of a conversation: messages, tool calls and the functions that may be called.

Every API that takes conversations reads its own messages into this form, and chat templates render it.
Here OpenAI's chat messages are read. Nothing is known of HTTP.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import xxhash

from mallee.protocol.errors import InvalidParameter

MAX_MESSAGES: Final = 4096  # templates may look at each message for each
MAX_FUNCTIONS: Final = 512
BROKEN: Final = "INVALID_JSON"  # names a call's text that is no object of JSON, in one
MAX_LEVELS: Final = 128  # of arguments, which templates and others walk recursively

_KEYS: Final = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning", "refusal"),
    )
)
# Of answers that clients send back as they came, and of requests whose cache is read elsewhere; they
# change no text.
_ECHOED: Final = frozenset(
    ("annotations", "mallee", "provider_specific_fields", "thinking_blocks", "cache_control")
)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAY_BE_HALF: Final = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)


class ToolCall(NamedTuple):
    """A call of a function by the model; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of one role. `reasoning` and `tool_calls` are an assistant's, `tool_call_id` a result's.

    `name`: the speaker's, or of a result its function's.
    """

    role: str
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `parameters`: a JSON schema; empty for one without any."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the functions that the model may call, and what else a template reads."""

    messages: Sequence[Message]
    functions: Sequence[Function] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


MAX_MARKS: Final = 4
"""Of a conversation, as Anthropic allows: a place is looked for by rendering all of it."""

Mark: TypeAlias = tuple[int, int | None]
"""A place in a conversation: a message, and so many characters of its text, or all."""


class Known(dict[str, Any]):
    """A message as a client gave it, which may come again: the same object, that nobody changes.

    `made`: by the one reader that reads it, of it alone.
    """

    made: Any = None


def digest_of(message: Message) -> int:
    """A mark by which the message is known again."""
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(message))


def with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages; results without a name have that of the function whose call they answer."""
    names: dict[str, str] = {}
    found = list(messages)
    for i, given in enumerate(messages):
        for call in given.tool_calls:
            names[call.id] = call.name
        if given.role == "tool" and not given.name and given.tool_call_id in names:
            name, text = names[given.tool_call_id], given.text
            # `replace` takes ten times as long, for each result of a long conversation.
            found[i] = Message(
                "tool", text, given.reasoning, given.tool_calls, given.tool_call_id, name
            )
    return tuple(found)


def joined(messages: Sequence[Message]) -> Message:
    """The parts of one message as one: their texts are lines of it."""
    if len(messages) == 1:
        return messages[0]
    return replace(
        messages[0],
        text="\n".join(each.text for each in messages if each.text),
        reasoning="".join(each.reasoning for each in messages),
        tool_calls=tuple(call for each in messages for call in each.tool_calls),
    )


# OpenAI's chat messages.


def read_messages(value: Any, param: str = "messages") -> tuple[Message, ...]:
    """Chat messages; text parts are joined by newlines. Raises InvalidParameter naming the place."""
    if not isinstance(value, list) or not value:
        raise InvalidParameter(param, value, "give a list of at least one message")
    if (num := len(value)) > MAX_MESSAGES:
        raise InvalidParameter(param, num, f"give at most {MAX_MESSAGES} messages")
    return with_names([_known(each, param, i) for i, each in enumerate(value)])


def _known(value: Any, param: str, place: int) -> Message:
    if type(value) is not Known:
        return _message(value, f"{param}[{place}]")
    if value.made is None:
        value.made = _message(value, f"{param}[{place}]")
    found: Message = value.made
    return found


def read_marks(messages: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """The ends of messages that were read, and of parts in them, which have a `cache_control`."""
    marks: list[Mark] = []
    for i, message in enumerate(messages):
        content, num_chars = message.get("content"), 0
        for part in content if isinstance(content, list) else ():
            num_chars += len(part[part["type"]])
            if part.get("cache_control"):
                marks.append((i, num_chars))
            num_chars += 1  # the line's end
        if message.get("cache_control"):
            marks.append((i, None))
    return marks


def _message(value: Any, param: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidParameter(param, value, 'a message is {"role": ..., "content": ...}')
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameter(f"{param}.role", role, "give a role such as user")
    given = {key for key, each in value.items() if each is not None} - _ECHOED
    if extra := sorted(map(str, given - _KEYS)):
        known = ", ".join(sorted(_KEYS))
        raise InvalidParameter(f"{param}.{extra[0]}", value[extra[0]], f"a message has {known}")
    calls = _calls(value.get("tool_calls"), f"{param}.tool_calls")
    if calls and role != "assistant":
        raise InvalidParameter(f"{param}.tool_calls", role, "the role of calls is assistant")
    call_id = _string(value, "tool_call_id", param)
    if call_id and role != "tool":
        raise InvalidParameter(f"{param}.tool_call_id", role, "the role of results is tool")
    reasoning = _string(value, "reasoning_content", param) or _string(value, "reasoning", param)
    refusal = _string(value, "refusal", param)
    if refusal and role != "assistant":
        raise InvalidParameter(f"{param}.refusal", role, "the role of refusals is assistant")
    return Message(
        role,
        _content(value, param, is_optional=role == "assistant") or refusal,
        reasoning,
        calls,
        call_id,
        _string(value, "name", param),
    )


def _string(value: Mapping[str, Any], key: str, param: str) -> str:
    found = value.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise InvalidParameter(f"{param}.{key}", found, "give a string")
    return found


def _content(value: Mapping[str, Any], param: str, *, is_optional: bool) -> str:
    content, param = value.get("content"), f"{param}.content"
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if not isinstance(content, list):
        raise InvalidParameter(param, content, "give a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        is_known = kind == "text" or (kind == "refusal" and value.get("role") == "assistant")
        text = part[kind] if is_known and kind in part else None
        if not isinstance(text, str):
            raise InvalidParameter(
                f"{param}[{i}]", part, 'only parts {"type": "text", "text": ...} are supported'
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(value: Any, param: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidParameter(param, value, "give a list of tool calls")
    return tuple(_call(each, f"{param}[{i}]") for i, each in enumerate(value))


def _call(value: Any, param: str) -> ToolCall:
    shape = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise InvalidParameter(param, value, f"a tool call is {shape}")
    function = value.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{param}.function", function, f"a tool call is {shape}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"{param}.function.name", name, "give the function's name")
    arguments = read_arguments(function.get("arguments"), f"{param}.function.arguments")
    return ToolCall(_string(value, "id", param), name, arguments)


def is_object(text: str) -> bool:
    """Whether it is that of a JSON object. Raises RecursionError."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def sound_arguments(text: str) -> str:
    """The arguments of a call that the model made, as an object's text; those of a broken one within it.

    Halves of surrogate pairs become U+FFFD.
    """
    if not is_object(text):
        return json.dumps({BROKEN: _SURROGATE.sub("\ufffd", text)}, ensure_ascii=False)
    if _MAY_BE_HALF.search(text) is None:
        return text
    written = json.dumps(json.loads(text), ensure_ascii=False)
    whole = _SURROGATE.sub("\ufffd", written)
    return text if whole == written else whole


def read_arguments(value: Any, param: str) -> str:
    """The text of a JSON object, given as such or as the object; other texts are a broken call's.

    Halves of surrogate pairs become U+FFFD.
    """
    text = "{}" if value is None or value == "" else value
    try:
        text = sound_arguments(text) if isinstance(text, str) else text
        found = json.loads(text) if isinstance(text, str) else text
    except RecursionError:
        raise _too_deep(param, value) from None
    if not isinstance(found, dict):
        raise InvalidParameter(
            param, value, 'give the text of a JSON object, such as {"city": "Oslo"}'
        )
    if is_deeper(found, MAX_LEVELS):
        raise _too_deep(param, value)
    if isinstance(text, str):
        return text
    return _SURROGATE.sub("\ufffd", json.dumps(found, ensure_ascii=False))


def _too_deep(param: str, value: Any) -> InvalidParameter:
    return InvalidParameter(param, value, f"give at most {MAX_LEVELS} levels of lists and objects")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in each other at more than `levels` levels."""
    row = [value]
    for _ in range(levels):
        inner = [each.values() if isinstance(each, dict) else each for each in row]
        row = [each for several in inner for each in several if isinstance(each, dict | list)]
    return bool(row)


class Declared(NamedTuple):
    """A function as a request declares it. `param` names the place in errors."""

    fields: Mapping[str, Any]  # name, description, strict, and the schema
    param: str
    schema: str = "parameters"  # the key of the schema


def chat_function(tool: Any, param: str) -> Declared:
    """A function in OpenAI's `tools` of chat. Raises InvalidParameter."""
    shape = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidParameter(param, tool, f"a tool is {shape}")
    fields, param = tool.get("function"), f"{param}.function"
    if not isinstance(fields, dict):
        raise InvalidParameter(param, fields, f"a tool is {shape}")
    return Declared(fields, param)


def read_functions(
    tools: Any, declared: Callable[[Any, str], Declared] = chat_function
) -> tuple[Function, ...]:
    """The functions of `tools`; `declared` reads one tool. Raises InvalidParameter naming the place."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise InvalidParameter("tools", tools, "give a list of tools")
    if (num := len(tools)) > MAX_FUNCTIONS:
        raise InvalidParameter("tools", num, f"give at most {MAX_FUNCTIONS} tools")
    found: dict[str, Function] = {}
    for i, tool in enumerate(tools):
        fields, param, schema = declared(tool, f"tools[{i}]")
        function = _function(fields, param, schema)
        if function.name in found:
            raise InvalidParameter(f"{param}.name", function.name, "give each function once")
        found[function.name] = function
    return tuple(found.values())


def _function(fields: Mapping[str, Any], param: str, schema: str) -> Function:
    name, parameters = fields.get("name"), fields.get(schema)
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        remedy = "give 1 to 128 letters, digits, and _ . : / -"
        raise InvalidParameter(f"{param}.name", name, remedy)
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidParameter(f"{param}.{schema}", parameters, "give a JSON schema")
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidParameter(f"{param}.strict", strict, "give true or false")
    return Function(name, _string(fields, "description", param), parameters or {}, bool(strict))
