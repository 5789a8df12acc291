"""The body of `POST /v1/responses`, checked, and as the chat request that it amounts to."""

import json
from typing import Any, ClassVar, Final

from mallee.api.chat.reading import EFFORTS
from mallee.api.grammars import FREE_TEXT, OutputFormat
from mallee.api.responses.tools import chat_choice
from mallee.api.schemas import AnyRequest, ChatRequest, StreamOptions
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.messages import MAX_LOGPROBS, Grammar

LOGPROBS: Final = "message.output_text.logprobs"
SEALED: Final = "reasoning.encrypted_content"
SUMMARIES: Final = ("auto", "concise", "detailed")
MAX_METADATA: Final = (16, 64, 512)  # pairs, characters of a name, of a value


class ResponseRequest(AnyRequest, frozen=True, kw_only=True):
    """From `seed` on, and `top_k` and `min_p`, fields aren't OpenAI's."""

    is_bounded: ClassVar[bool] = True

    history: ClassVar[str] = "input"

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = False
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: Any = None
    reasoning: Any = None
    include: tuple[str, ...] = ()
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_logprobs: int = 0
    truncation: str = "disabled"
    metadata: Any = None
    service_tier: str = "auto"
    seed: int | None = None
    ignore_eos: bool = False
    chat_template_kwargs: Any = None
    thinking_token_budget: int | None = None


def check(body: ResponseRequest) -> None:
    """Raises BadRequest for what can't be done."""
    if body.truncation != "disabled":
        remedy = "not supported; leave it out, or give disabled"
        raise InvalidParameter("truncation", body.truncation, remedy)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidParameter("max_output_tokens", body.max_output_tokens, "give at least 1")
    if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidParameter("top_logprobs", body.top_logprobs, f"give 0 to {MAX_LOGPROBS}")
    for i, name in enumerate(body.include):
        if name not in (LOGPROBS, SEALED):
            raise InvalidParameter(f"include[{i}]", name, f"give {LOGPROBS} or {SEALED}")
    if body.background and not body.store:
        raise BadRequest("background needs store=true", param="background")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream=true", param="stream_options")
    check_metadata(body.metadata)


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


def check_metadata(value: Any) -> None:
    most, name_chars, value_chars = MAX_METADATA
    fits = value is None or (
        isinstance(value, dict)
        and len(value) <= most
        and all(
            len(name) <= name_chars and isinstance(text, str) and len(text) <= value_chars
            for name, text in value.items()
        )
    )
    if not fits:
        remedy = f"give at most {most} texts of {value_chars} characters by names of {name_chars}"
        raise InvalidParameter("metadata", value, remedy)


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
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise InvalidParameter("text.format.schema", schema, "give a JSON schema")
    return OutputFormat(Grammar("json_schema", json.dumps(schema)), "text.format.schema").checked()


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
        logprobs=shows,
        top_logprobs=body.top_logprobs if shows else None,
    )
