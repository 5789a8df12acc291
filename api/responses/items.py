"""Items, the Responses API's parts of a conversation: read into messages, and as they are shown."""

import base64
import binascii
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from mallee.api.entry.decoding import read_part
from mallee.api.entry.pages import read_paging
from mallee.api.responses.tools import arguments_of, full_name, read_namespace
from mallee.api.text.conversation import (
    MAX_MESSAGES,
    Known,
    Message,
    joined,
    read_messages,
    with_names,
)
from mallee.protocol.api.responses import (
    AnyItem,
    CustomCallItem,
    CustomResultItem,
    FunctionCallItem,
    FunctionResultItem,
    ItemList,
    MessageItem,
    ReasoningItem,
    Refusal,
    Text,
)
from mallee.protocol.errors import BadRequest, InvalidParameter, MalleeError

STATES: Final = ("in_progress", "completed", "incomplete")
_HINTS: Final = {
    "item_reference": "name its response as previous_response_id, or give the item",
}
_SEALED: Final = "mallee1."  # begins `encrypted_content`


def read_input(value: Any, param: str = "input") -> tuple[list[dict[str, Any]], list[Message]]:
    """The items of `input`, and the messages that they are. Raises BadRequest naming the place."""
    if value is None:
        raise BadRequest(f"{param} is required", param=param)
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidParameter(param, value, "give a text, or a list of at least one item")
    if (num := len(value)) > MAX_MESSAGES:
        raise InvalidParameter(param, num, f"give at most {MAX_MESSAGES} items")
    items = [_item(each, f"{param}[{i}]") for i, each in enumerate(value)]
    pairs = enumerate(zip(value, items, strict=True))
    return items, _joined([_known(each, item, param, i) for i, (each, item) in pairs])


def messages_of(items: list[dict[str, Any]], param: str) -> list[Message]:
    """The messages that the items are."""
    return _joined([_message(item, f"{param}[{i}]") for i, item in enumerate(items)])


def _joined(parts: list[Message]) -> list[Message]:
    """Reasoning, a message and calls in a row are one message of the assistant."""
    found: list[list[Message]] = []  # parts of each message
    is_open = has_answer = False  # the last is an assistant's; it has a text or calls
    for part in parts:
        if not (is_open and part.role == "assistant") or (part.text and has_answer):
            found.append([])
            has_answer = False
        found[-1].append(part)
        is_open = part.role == "assistant"
        has_answer = has_answer or bool(part.text or part.tool_calls)
    return list(with_names([joined(parts) for parts in found]))


def _item(value: Any, param: str) -> dict[str, Any]:
    """The item, whose type is a message's unless it says another."""
    if not isinstance(value, dict):
        raise InvalidParameter(param, value, 'give an object, such as {"role", "content"}')
    return {"type": "message", **value} if "role" in value else {**value}


def _known(value: Any, item: dict[str, Any], param: str, place: int) -> Message:
    if type(value) is not Known:
        return _message(item, f"{param}[{place}]")
    if value.made is None:
        value.made = _message(item, f"{param}[{place}]")
    made: Message = value.made
    return made


def _message(item: dict[str, Any], param: str) -> Message:
    match read_part(item, AnyItem, param, _HINTS):
        case MessageItem() as given:
            return Message(given.role, _text(given.content))
        case FunctionCallItem() as given:
            return _call(given, given.arguments, param)
        case CustomCallItem() as given:
            return _call(given, arguments_of(given.input), param)
        case FunctionResultItem() | CustomResultItem() as given:
            return Message("tool", _text(given.output), tool_call_id=given.call_id)
        case given:
            return Message("assistant", reasoning=_reasoning(given, param))


def _call(item: FunctionCallItem | CustomCallItem, arguments: Any, param: str) -> Message:
    name = full_name(read_namespace(item.namespace, param), item.name)
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    given = [{"role": "assistant", "tool_calls": [call]}]
    try:
        (found,) = read_messages(given, "\0")
    except InvalidParameter as error:
        raise renamed(error, "\0[0].tool_calls[0].function", param) from error
    return found


def _reasoning(item: ReasoningItem, param: str) -> str:
    content, sealed_text = item.content, item.encrypted_content
    if content is not None:
        parts = content if isinstance(content, list) else [content]
        return "".join(part.text for part in parts)
    return "" if sealed_text is None else _unsealed(sealed_text, param)


def _text(content: Text) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)


def sealed(reasoning: str) -> str:
    """`encrypted_content`, not encrypted: the client's own text, for one that stores nothing to send back."""
    return _SEALED + base64.b64encode(reasoning.encode(errors="replace")).decode()


def _unsealed(value: str, param: str) -> str:
    try:
        if not value.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(value.removeprefix(_SEALED), validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidParameter(
            f"{param}.encrypted_content", value, "another server made it; leave the item out"
        ) from None


_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def shown(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items of an input as lists show them: with ids and states, contents as parts, and nothing unknown."""
    return [_shown(item, f"{name}_in{i}") for i, item in enumerate(items)]


def _shown(item: dict[str, Any], name: str) -> dict[str, Any]:
    kind, status, given = item["type"], item.get("status"), item.get("id")
    made: dict[str, Any] = {
        "id": given if isinstance(given, str) and given else f"{_PREFIXES[kind]}_{name}",
        "type": kind,
        "status": status if status in STATES else "completed",
    }
    match kind:
        case "message":
            text = "output_text" if item["role"] == "assistant" else "input_text"
            made |= {"role": item["role"], "content": _parts(item["content"], text)}
        case "function_call" | "custom_tool_call":
            made |= {"call_id": item["call_id"], "name": item["name"]}
            if kind == "custom_tool_call":
                made["input"] = item["input"]
            else:
                (call,) = _message(item, "").tool_calls
                made["arguments"] = call.arguments
            if item.get("namespace") is not None:
                made["namespace"] = item["namespace"]
        case "function_call_output" | "custom_tool_call_output":
            output = item["output"]
            shown_output = output if isinstance(output, str) else _parts(output, "input_text")
            made |= {"call_id": item["call_id"], "output": shown_output}
        case _:
            content, sealed_text = item.get("content"), item.get("encrypted_content")
            made["summary"] = []
            if content is not None:
                parts = content if isinstance(content, list) else [content]
                made["content"] = [{"type": "reasoning_text", "text": p["text"]} for p in parts]
            if sealed_text is not None:
                made["encrypted_content"] = sealed_text
    return made


def _parts(content: Any, kind: str) -> list[dict[str, Any]]:
    """Parts of a text that was read; `kind` is that of a plain text."""
    found: list[dict[str, Any]] = []
    for part in [{"type": kind, "text": content}] if isinstance(content, str) else content:
        key = "refusal" if part["type"] == "refusal" else "text"
        made = {"type": part["type"], key: part[key]}
        found.append({**made, "annotations": []} if part["type"] == "output_text" else made)
    return found


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> ItemList:
    """A list of items by `limit`, `order` and `after`. Raises InvalidParameter."""
    paging, order = read_paging(query), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", order, "give asc or desc")
    found = items if order == "asc" else items[::-1]
    begin = 0
    if "after" in query:
        begin = 1 + next((i for i, item in enumerate(found) if item["id"] == paging.after), -1)
        if not begin:
            raise InvalidParameter("after", paging.after, "give the id of an item of this list")
    return paging.page(ItemList, found[begin : begin + paging.most], id_of=itemgetter("id"))


def renamed(error: MalleeError, old: str, new: str) -> MalleeError:
    """`error` about the client's own field."""
    fields = {**error.fields}
    fields["param"] = str(fields.get("param")).replace(old, new, 1)
    return type(error).with_message(error.message.replace(old, new, 1), **fields)
