"""Anthropic's system prompts and messages, read into the normal form of a conversation."""

import json
from typing import Any, Final, NamedTuple

from mallee.api.entry.decoding import read_part
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
from mallee.protocol.api.messages import (
    AnyMessage,
    Block,
    SystemText,
    TextBlock,
    Thinking,
    ToolResult,
    ToolUse,
)
from mallee.protocol.errors import InvalidParameter

ERROR: Final = "Error: "  # before the text of a result with is_error
_HINTS: Final = {
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
    if system is not None:
        given = read_part(system, SystemText, "system", _HINTS)
        if text := reader.text(given):
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
        given = read_part(value, AnyMessage, param, _HINTS)
        role, content = given.__struct_config__.tag, given.content
        if role == "system" or isinstance(content, str):
            self.add(Message(role, self.text(content)))
            return
        if not content and role == "assistant":
            self.add(Message(role))
        for i, block in enumerate(content):
            self._mark(block)
            message = self._part(role, block, f"{param}.content[{i}]")
            self.add(message, block.cache_control is not None)

    def text(self, content: str | list[TextBlock]) -> str:
        """A text, or text blocks joined by newlines."""
        if isinstance(content, str):
            return content
        for block in content:
            self._mark(block)
        return "\n".join(block.text for block in content)

    def _mark(self, block: Block) -> None:
        if block.cache_control is not None:
            self.marks.append(block.cache_control)

    def _part(self, role: str, block: Block, param: str) -> Message:
        match block:
            case TextBlock():
                return Message(role, block.text)
            case ToolResult():
                text = "" if block.content is None else self.text(block.content)
                shown = ERROR + text if block.is_error else text
                return Message("tool", shown, tool_call_id=block.tool_use_id)
            case ToolUse():
                arguments = read_arguments(block.input, f"{param}.input")
                return Message(role, tool_calls=(ToolCall(block.id, block.name, arguments),))
            case Thinking():
                reasoning = block.thinking or hidden_text(block.signature or "")
                return Message(role, reasoning=reasoning)
        return Message(role)  # of reasoning that can't be read


def input_of(arguments: str) -> dict[str, Any]:
    """The `input` of a call that the model made."""
    found: dict[str, Any] = json.loads(sound_arguments(arguments))
    return found
