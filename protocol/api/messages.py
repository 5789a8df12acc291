"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from mallee.protocol.api.generate import MAX_STOPS, StopText, TopP
from mallee.protocol.api.shared import (
    MESSAGES,
    OBJECT,
    OBJECTS,
    OMITTED,
    STRING,
    AnyRequest,
    Body,
    ChoiceExtras,
    ErrorFields,
    Seed,
    Stream,
    Tokens,
    shape,
)

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A part of a message. Answers come back as they went out, with fields that change nothing here."""

    cache_control: Any = None


class TextBlock(Block, frozen=True, kw_only=True, tag="text"):
    text: str


class ToolResult(Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ToolUse(Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]


class Thinking(Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinking(Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Another server's, which can't be read here."""


class SystemMessage(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="role",
    tag="system",
    forbid_unknown_fields=True,
):
    content: str | list[TextBlock]


class UserMessage(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="role",
    tag="user",
    forbid_unknown_fields=True,
):
    content: str | list[TextBlock | ToolResult]


class AssistantMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"
):
    content: str | list[TextBlock | Thinking | RedactedThinking | ToolUse]


AnyMessage = SystemMessage | UserMessage | AssistantMessage
SystemText = str | list[TextBlock]


class CountRequest(AnyRequest, frozen=True, kw_only=True):
    """Fields that the prompt depends on, of messages and of their count."""

    is_others: ClassVar[bool] = True
    history: ClassVar[str] = "messages"

    messages: Annotated[Any, shape("Anthropic's.", **MESSAGES)] = None
    system: Annotated[Any, shape("Text, or text blocks.", anyOf=[STRING, OBJECTS])] = None
    tools: Annotated[Any, shape("Anthropic's, of the client.", **OBJECTS)] = None
    tool_choice: Annotated[Any, shape("Anthropic's.", **OBJECT)] = None
    thinking: Annotated[Any, shape("Anthropic's: enabled, adaptive or disabled.", **OBJECT)] = None
    output_config: Annotated[Any, shape("Anthropic's `effort` and `format`.", **OBJECT)] = None
    output_format: Annotated[Any, shape("As `output_config.format`.", **OBJECT)] = None
    context_management: Annotated[
        Any, shape("Changes nothing: a history is read whole.", **OBJECT)
    ] = None
    metadata: Annotated[Any, shape("`user_id`: a tenant.", **OBJECT)] = None
    mcp_servers: Annotated[Any, shape("Not supported.", maxItems=0, **OBJECTS)] = None
    compaction: Annotated[Any, shape("Not supported.", enum=[None])] = None
    speed: Literal["standard", "fast"] | None = None
    betas: Annotated[Any, shape("Change nothing.", type="array", items=STRING)] = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Anthropic's. `max_tokens` is required."""

    is_bounded: ClassVar[bool] = True

    max_tokens: Annotated[
        Tokens | None, Meta(description="At most so many tokens of an answer.")
    ] = None
    stop_sequences: Annotated[
        tuple[StopText, ...],
        Meta(max_length=MAX_STOPS, description=f"Up to {MAX_STOPS} texts that end an answer."),
    ] = ()
    temperature: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, description="0: off.")] = 0
    seed: Seed | None = None
    ignore_eos: bool = False
    stream: Stream = False
    thread: Annotated[Any, shape("Anthropic's: create, or continue.", **OBJECT)] = None
    diagnostics: Annotated[Any, shape("Ask for the reason of a miss.", **OBJECT)] = None
    container: Annotated[Any, shape("Not supported.", enum=[None])] = None
    inference_geo: str | None = None


# Answers


class AnthropicError(Body, frozen=True, kw_only=True):
    """Every refusal and failure on Anthropic's paths."""

    type: Literal["error"] = "error"
    error: ErrorFields
    request_id: str


class CacheCreation(Body, frozen=True, kw_only=True):
    """Input tokens that are retained, by the time."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class AnthropicUsage(Body, frozen=True, kw_only=True):
    """A prompt has the sum of its three counts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class AnthropicBegun(Body, frozen=True, kw_only=True):
    """A message in a stream's first event."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicMessage(AnthropicBegun, frozen=True, kw_only=True):
    stop_reason: str
    mallee: ChoiceExtras
    diagnostics: dict[str, Any] | None = OMITTED


class TokenCount(Body, frozen=True, kw_only=True):
    input_tokens: int
