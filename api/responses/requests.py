"""The body of `POST /v1/responses`, checked, and as the chat request that it amounts to."""

from typing import Final

from mallee.api.grammars import FREE_TEXT, OutputFormat, json_schema
from mallee.api.responses.tools import chat_choice
from mallee.protocol.api.generate import EFFORTS, ChatRequest
from mallee.protocol.api.responses import ResponseRequest
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.messages import Grammar

LOGPROBS: Final = "message.output_text.logprobs"
SEALED: Final = "reasoning.encrypted_content"
SUMMARIES: Final = ("auto", "concise", "detailed")


def check(body: ResponseRequest) -> None:
    """Raises BadRequest for what can't be done."""
    if body.truncation != "disabled":
        remedy = "not supported; leave it out, or give disabled"
        raise InvalidParameter("truncation", body.truncation, remedy)
    if body.background and not body.store:
        raise BadRequest("background needs store=true", param="background")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream=true", param="stream_options")


def conversation_of(body: ResponseRequest) -> str | None:
    """The id of the conversation that is gone on from. Raises BadRequest."""
    match body.conversation:
        case None:
            return None
        case str(name) | {"id": str(name)}:
            pass
        case given:
            raise InvalidParameter("conversation", given, 'give an id, or {"id": ...}')
    if body.previous_response_id is not None:
        raise BadRequest(
            "give conversation or previous_response_id, not both", param="conversation"
        )
    return name


def effort_of(body: ResponseRequest) -> str | None:
    """`reasoning.effort`. Raises InvalidParameter."""
    given = body.reasoning
    if given is None:
        return None
    known = ("effort", "summary", "generate_summary")
    if not isinstance(given, dict):
        raise InvalidParameter("reasoning", given, 'give {"effort": ...}')
    for name, value in given.items():
        if name not in known and value is not None:
            raise InvalidParameter(f"reasoning.{name}", value, "not supported; leave it out")
        if name in known[1:] and value is not None and value not in SUMMARIES:
            raise InvalidParameter(f"reasoning.{name}", value, f"give {', '.join(SUMMARIES)}")
    effort = given.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidParameter("reasoning.effort", effort, f"give one of {', '.join(EFFORTS)}")
    return None if effort is None else str(effort)


def output_of(body: ResponseRequest) -> OutputFormat:
    """The form that `text` asks for. Raises InvalidParameter."""
    given = body.text
    if given is None:
        return FREE_TEXT
    if not isinstance(given, dict):
        raise InvalidParameter("text", given, 'give {"format": {"type": ...}}')
    for name, value in given.items():
        neutral = value is None or (name == "verbosity" and value == "medium")
        if name != "format" and not neutral:
            raise InvalidParameter(f"text.{name}", value, "not supported; leave it out")
    form = given.get("format")
    if form is None:
        return FREE_TEXT
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return FREE_TEXT
    if kind == "json_object":
        return OutputFormat(Grammar("json_object"), "text.format")
    if kind != "json_schema":
        remedy = "give text, json_object or json_schema"
        raise InvalidParameter("text.format.type", kind, remedy)
    param = "text.format.schema"
    return OutputFormat(json_schema(form.get("schema"), param), param).checked()


def chat_request(body: ResponseRequest) -> ChatRequest:
    """The same wishes for the answer; conversation, tools and form are read apart. Raises as `check`."""
    shared = {name: getattr(body, name) for name in AnyRequest.__struct_fields__}
    shows = LOGPROBS in body.include
    return ChatRequest(
        **shared,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stream=body.stream,
        ignore_eos=body.ignore_eos,
        max_completion_tokens=body.max_output_tokens,
        thinking_token_budget=body.thinking_token_budget,
        tool_choice=chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        return_token_ids=body.return_token_ids,
        logprobs=shows,
        top_logprobs=body.top_logprobs if shows else None,
    )
