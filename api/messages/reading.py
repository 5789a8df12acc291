"""Anthropic's system prompts and messages, read into the normal form of a conversation."""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mallee.api.messages.signatures import hidden_text
from mallee.api.text.conversation import (
    MAX_MARKS,
    MAX_MESSAGES,
    Known,
    Mark,
    Message,
    ToolCall,
    joined,
    read_arguments,
    sound_arguments,
    with_names,
)
from mallee.protocol.errors import InvalidParameter

ROLES: Final = ("user", "assistant", "system")
ERROR: Final = "Error: "  # before the text of a result with is_error
_MISSING: Final = {
    "image": "this model sees no images; describe them in text",
    "document": "this model reads no documents; give their text",
    "search_result": "give search results as text",
    "tool_reference": "this server searches no tools; give all of them in tools",
    "server_tool_use": "this server runs no tools itself",
    "mcp_tool_use": "this server runs no tools itself",
}


class Dialogue(NamedTuple):
    """`begun`: the beginning of the answer, which goes on. `marks`: every `cache_control` in it.

    `places`: those of marks in messages.
    """

    messages: tuple[Message, ...]
    begun: str
    marks: list[Any]
    places: list[Mark]


def read_dialogue(system: Any, messages: Any) -> Dialogue:
    """Messages of one role that follow each other are one. Raises InvalidParameter naming the place."""
    reader = _Reader()
    if system is not None and (text := reader.text(system, "system")):
        reader.add(Message("system", text), is_marked=bool(reader.marks))
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages", messages, "give a list of at least one message")
    if (num := len(messages)) > MAX_MESSAGES:
        raise InvalidParameter("messages", num, f"give at most {MAX_MESSAGES} messages")
    for i, each in enumerate(messages):
        reader.read(each, f"messages[{i}]")
    found, begun = reader.found, ""
    if found and found[-1].role == "assistant":
        begun = _begun(found.pop(), f"messages[{len(messages) - 1}]")
    if not any(message.role != "system" for message in found):
        raise InvalidParameter("messages", len(messages), "give a message of role user first")
    places: list[Mark] = [
        (at, len(joined(reader.parts[at][:num]).text))
        for at, num in reader.places[-MAX_MARKS:]
        if at < len(found)
    ]
    return Dialogue(with_names(found), begun, reader.marks, places)


def _begun(last: Message, param: str) -> str:
    if last.tool_calls or last.reasoning:
        remedy = "after calls give their results; only text can be the beginning of an answer"
        raise InvalidParameter(param, last.role, remedy)
    if last.text != last.text.rstrip():
        remedy = "the beginning of an answer can't end with white space"
        raise InvalidParameter(f"{param}.content", last.text[-20:], remedy)
    return last.text


class _Reader:
    """Messages so far, and the marks in them."""

    def __init__(self) -> None:
        self.parts: list[list[Message]] = []  # of each message
        self._read: list[tuple[Message, bool]] = []  # of the message that is being read
        self.marks: list[Any] = []
        self.places: list[tuple[int, int]] = []  # a message, and how many parts of it

    @property
    def found(self) -> list[Message]:
        return [joined(parts) for parts in self.parts]

    def add(self, message: Message, is_marked: bool = False) -> None:
        """`is_marked`: with a mark at its end."""
        self._read.append((message, is_marked))
        role = message.role
        if not self.parts or self.parts[-1][0].role != role or role == "tool":
            self.parts.append([])
        self.parts[-1].append(message)
        if is_marked:
            self.places.append((len(self.parts) - 1, len(self.parts[-1])))

    def read(self, value: Any, param: str) -> None:
        """A message, with what was made of it if that is known."""
        if type(value) is not Known:
            self._message(value, param)
        elif value.made is None:
            num_marks, self._read = len(self.marks), []
            self._message(value, param)
            value.made = tuple(self._read), tuple(self.marks[num_marks:])
        else:
            parts, marks = value.made
            for each in parts:
                self.add(*each)
            self.marks += marks

    def _message(self, value: Any, param: str) -> None:
        if not isinstance(value, dict):
            raise InvalidParameter(param, value, 'a message is {"role": ..., "content": ...}')
        role, content = value.get("role"), value.get("content")
        if role not in ROLES:
            raise InvalidParameter(f"{param}.role", role, f"give {', '.join(ROLES)}")
        # Answers come back as they went out, with all their fields.
        if role != "assistant" and (more := sorted(map(str, value.keys() - {"role", "content"}))):
            raise InvalidParameter(
                f"{param}.{more[0]}", value[more[0]], "a message has role, content"
            )
        param = f"{param}.content"
        if role == "assistant":
            self._assistant(content, param)
        elif role == "user":
            self._user(content, param)
        else:
            self.add(Message("system", self.text(content, param)))

    def text(self, value: Any, param: str) -> str:
        """A string or text blocks, joined by newlines."""
        if isinstance(value, str):
            return value
        return "\n".join(
            self._of_text(block, where) for block, where in self._blocks(value, param, ("text",))
        )

    def _blocks(
        self, value: Any, param: str, known: tuple[str, ...]
    ) -> list[tuple[dict[str, Any], str]]:
        """(block, place) of content blocks, each of a known type."""
        if not isinstance(value, list):
            raise InvalidParameter(param, value, "give a string or a list of content blocks")
        found = []
        for i, block in enumerate(value):
            where = f"{param}[{i}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind not in known:
                remedy = f"give blocks of type {', '.join(known)}"
                if isinstance(kind, str):
                    raise InvalidParameter(f"{where}.type", kind, _MISSING.get(kind, remedy))
                raise InvalidParameter(where, block, remedy)
            if (mark := block.get("cache_control")) is not None:
                self.marks.append(mark)
            found.append((block, where))
        return found

    def _of_text(self, block: dict[str, Any], param: str) -> str:
        return _string(block, "text", param)

    def _user(self, value: Any, param: str) -> None:
        if isinstance(value, str):
            self.add(Message("user", value))
            return
        for block, where in self._blocks(value, param, ("text", "tool_result")):
            if block["type"] == "text":
                message = Message("user", self._of_text(block, where))
            else:
                message = self._result(block, where)
            self.add(message, block.get("cache_control") is not None)

    def _result(self, block: dict[str, Any], param: str) -> Message:
        call_id = _string(block, "tool_use_id", param)
        is_error, content = block.get("is_error"), block.get("content")
        if is_error is not None and not isinstance(is_error, bool):
            raise InvalidParameter(f"{param}.is_error", is_error, "give true or false")
        text = "" if content is None else self.text(content, f"{param}.content")
        return Message("tool", ERROR + text if is_error else text, tool_call_id=call_id)

    def _assistant(self, value: Any, param: str) -> None:
        if isinstance(value, str):
            self.add(Message("assistant", value))
            return
        parts: dict[str, Callable[[dict[str, Any], str], Message]] = {
            "text": lambda block, where: Message("assistant", self._of_text(block, where)),
            "thinking": _thinking,
            "redacted_thinking": lambda *_: Message("assistant"),  # of another server, unreadable
            "tool_use": _call,
        }
        blocks = self._blocks(value, param, tuple(parts))
        if not blocks:
            self.add(Message("assistant"))
        for block, where in blocks:
            message = parts[block["type"]](block, where)
            self.add(message, block.get("cache_control") is not None)


def _thinking(block: dict[str, Any], param: str) -> Message:
    text, signature = _string(block, "thinking", param), block.get("signature")
    if signature is not None and not isinstance(signature, str):
        raise InvalidParameter(f"{param}.signature", signature, "give a string")
    return Message("assistant", reasoning=text or hidden_text(signature or ""))


def _call(block: dict[str, Any], param: str) -> Message:
    call_id, name = _string(block, "id", param), _string(block, "name", param)
    if not name:
        raise InvalidParameter(f"{param}.name", name, "give the tool's name")
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidParameter(f"{param}.input", given, "give a JSON object")
    arguments = read_arguments(given, f"{param}.input")
    return Message("assistant", tool_calls=(ToolCall(call_id, name, arguments),))


def _string(block: dict[str, Any], key: str, param: str) -> str:
    found = block.get(key)
    if not isinstance(found, str):
        raise InvalidParameter(f"{param}.{key}", found, "give a string")
    return found


def input_of(arguments: str) -> dict[str, Any]:
    """The `input` of a call that the model made."""
    found: dict[str, Any] = json.loads(sound_arguments(arguments))
    return found
