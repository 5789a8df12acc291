"""Bodies of Anthropic's requests: their fields, and those that change nothing or are refused."""

from typing import Any, Final, NamedTuple

import msgspec

from mallee.api.messages.tools import custom_tool, read_choice
from mallee.api.terms import read_ttl_s
from mallee.api.text.conversation import Function, read_functions
from mallee.protocol.api.generate import ChatRequest
from mallee.protocol.api.messages import EFFORTS, CountRequest, MessagesRequest
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import BadRequest, InvalidParameter

FIVE_MINUTES_S: Final = 300.0
LEAST_BUDGET: Final = 1024


class Thought(NamedTuple):
    """The wish for reasoning. `effort` is as OpenAI's, None: as the model's template has it."""

    effort: str | None
    is_shown: bool = True
    budget: int | None = None  # tokens


def read_thinking(request: CountRequest, max_tokens: int | None) -> Thought:
    """`thinking` and `output_config.effort`. Without `thinking` there is none, if the template lets it be.

    Raises InvalidParameter.
    """
    given, effort = request.thinking, _config(request).get("effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidParameter("output_config.effort", effort, f"give {', '.join(EFFORTS)}")
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or kind == "disabled":
        return Thought("none")
    if kind not in ("enabled", "adaptive", "between_tools"):
        raise InvalidParameter("thinking", given, "give a type: enabled, adaptive or disabled")
    display = given.get("display") or "summarized"
    if display not in ("summarized", "omitted"):
        raise InvalidParameter("thinking.display", display, "give summarized or omitted")
    is_shown = display == "summarized"
    if kind != "enabled":
        return Thought(effort, is_shown)
    budget = given.get("budget_tokens")
    is_count = isinstance(budget, int) and not isinstance(budget, bool)
    if not is_count or budget < LEAST_BUDGET:
        remedy = f"give {LEAST_BUDGET} tokens or more"
        raise InvalidParameter("thinking.budget_tokens", budget, remedy)
    if max_tokens is not None and budget >= max_tokens:
        remedy = f"give less than max_tokens, {max_tokens}"
        raise InvalidParameter("thinking.budget_tokens", budget, remedy)
    return Thought(effort or "high", is_shown, budget)


def functions_of(request: CountRequest) -> tuple[Function, ...]:
    """The functions of `tools`. Raises InvalidParameter: also for what only Anthropic's servers can do."""
    _check(request)
    return read_functions(request.tools, custom_tool)


def sampling(request: MessagesRequest, functions: tuple[Function, ...]) -> ChatRequest:
    """The fields beside the conversation, by OpenAI's names. Raises BadRequest by Anthropic's."""
    if request.max_tokens is None:
        raise BadRequest("max_tokens is required", param="max_tokens")
    if request.container is not None:
        raise InvalidParameter("container", request.container, "no code runs here; leave it out")
    choice = read_choice(request.tool_choice, functions)
    shared = {name: getattr(request, name) for name in AnyRequest.__struct_fields__}
    return ChatRequest(
        **shared,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop=list(request.stop_sequences) or None,
        stream=request.stream,
        tool_choice=choice.value,
        parallel_tool_calls=choice.several,
        response_format=_response_format(request),
    )


def owner_of(request: CountRequest) -> str:
    """`metadata.user_id`: the client's own user. Raises InvalidParameter."""
    if request.metadata is None:
        return ""
    user = request.metadata.get("user_id") if isinstance(request.metadata, dict) else 0
    if user is not None and not isinstance(user, str):
        raise InvalidParameter("metadata", request.metadata, 'give {"user_id": "..."}')
    return user or ""


def with_marks(request: MessagesRequest, marks: list[Any]) -> tuple[MessagesRequest, float]:
    """The request with the longest time of all `cache_control` marks as its own; the seconds, 0 if none.

    Raises InvalidParameter.
    """
    marks = marks if request.cache_control is None else [request.cache_control, *marks]
    longest, found = 0.0, None
    for mark in marks:
        if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
            remedy = 'give {"type": "ephemeral", "ttl": "5m" or "1h"}'
            raise InvalidParameter("cache_control", mark, remedy)
        seconds = read_ttl_s(mark.get("ttl") or "5m", "cache_control.ttl")
        if seconds > longest:
            longest, found = seconds, {"type": "ephemeral", "ttl": mark.get("ttl") or "5m"}
    return msgspec.structs.replace(request, cache_control=found), longest


def _config(request: CountRequest) -> dict[str, Any]:
    config = request.output_config
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise InvalidParameter("output_config", config, "give an object")
    return config


def _response_format(request: CountRequest) -> dict[str, Any] | None:
    """The JSON schema of `output_config.format`, or of the older `output_format`, as OpenAI's."""
    new, old = _config(request).get("format"), request.output_format
    if new is not None and old is not None:
        raise InvalidParameter("output_format", old, "output_config.format says it already")
    param, given = ("output_config.format", new) if old is None else ("output_format", old)
    if given is None:
        return None
    match given:
        case {"type": "json_schema", "schema": dict() | bool() as schema}:
            described = {"name": "answer", "schema": schema}
            return {"type": "json_schema", "json_schema": described}
    raise InvalidParameter(param, given, 'give {"type": "json_schema", "schema": {...}}')


def _check(request: CountRequest) -> None:
    """Raises InvalidParameter for what only Anthropic's servers can do."""
    if request.mcp_servers:
        remedy = "this server calls no others; leave it out"
        raise InvalidParameter("mcp_servers", request.mcp_servers, remedy)
    if request.compaction is not None:
        remedy = "this server shortens no history; do that in the client"
        raise InvalidParameter("compaction", request.compaction, remedy)
