"""Bodies of OpenAI's Responses and Conversations."""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from mallee.protocol.api.generate import (
    NumLogprobs,
    ReasoningTokens,
    ReturnIds,
    Share,
    Temperature,
    ToolChoice,
    TopK,
    TopP,
)
from mallee.protocol.api.shared import (
    OBJECT,
    OBJECTS,
    OMITTED,
    STRING,
    AnyBody,
    AnyRequest,
    Body,
    Page,
    Seed,
    Stream,
    StreamOptions,
    TemplateVariables,
    Tokens,
    Tools,
    shape,
)

MAX_METADATA: Final = 16  # texts
MAX_METADATA_NAME: Final = 64
MAX_METADATA_TEXT: Final = 512
MAX_NEW_ITEMS: Final = 20  # as OpenAI's

Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=MAX_METADATA_NAME)],
        Annotated[str, Meta(max_length=MAX_METADATA_TEXT)],
    ],
    Meta(max_length=MAX_METADATA, description=f"Up to {MAX_METADATA} texts by name."),
]
NewItems = Annotated[
    Any, shape(f"Up to {MAX_NEW_ITEMS}, as `input`.", maxItems=MAX_NEW_ITEMS, **OBJECTS)
]
CallId = Annotated[str, Meta(min_length=1)]


class Part(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A part of a text in an item."""


class InputText(Part, frozen=True, kw_only=True, tag="input_text"):
    text: str


class OutputText(Part, frozen=True, kw_only=True, tag="output_text"):
    text: str


class PlainText(Part, frozen=True, kw_only=True, tag="text"):
    text: str


class Refusal(Part, frozen=True, kw_only=True, tag="refusal"):
    refusal: str


Text = str | list[InputText | OutputText | PlainText | Refusal]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A part of a conversation. Items come back as they went out, with fields that change nothing here."""


class MessageItem(Item, frozen=True, kw_only=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class FunctionCallItem(Item, frozen=True, kw_only=True, tag="function_call"):
    call_id: CallId
    name: str
    arguments: Any = None
    namespace: str | None = None


class CustomCallItem(Item, frozen=True, kw_only=True, tag="custom_tool_call"):
    call_id: CallId
    name: str
    input: str
    namespace: str | None = None


class FunctionResultItem(Item, frozen=True, kw_only=True, tag="function_call_output"):
    call_id: CallId
    output: Text


class CustomResultItem(Item, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    call_id: CallId
    output: Text


class ReasoningItem(Item, frozen=True, kw_only=True, tag="reasoning"):
    """`encrypted_content`: as this server made it, for a client that stores nothing to send back."""

    content: list[ReasoningText] | ReasoningText | None = None
    encrypted_content: str | None = None


AnyItem = (
    MessageItem
    | FunctionCallItem
    | CustomCallItem
    | FunctionResultItem
    | CustomResultItem
    | ReasoningItem
)
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponseRequest(AnyRequest, frozen=True, kw_only=True):
    """From `seed` on, and `top_k` and `min_p`, fields aren't OpenAI's."""

    is_bounded: ClassVar[bool] = True
    is_others: ClassVar[bool] = True
    history: ClassVar[str] = "input"

    input: Annotated[
        Any,
        shape(
            "A text, or items: messages, calls, their results, reasoning.",
            anyOf=[STRING, {"type": "array", "minItems": 1, "items": OBJECT}],
        ),
    ] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[
        Any,
        shape(
            "A conversation to go on from, which the answer is added to.",
            anyOf=[STRING, {**OBJECT, "required": ["id"], "properties": {"id": STRING}}],
        ),
    ] = None
    store: bool = True
    stream: Stream = False
    stream_options: StreamOptions | None = None
    background: bool = False
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call.")] = True
    text: Annotated[Any, shape("`format`: text, json_object or json_schema.", **OBJECT)] = None
    reasoning: Annotated[Any, shape("`effort`, where the template knows it.", **OBJECT)] = None
    include: tuple[Included, ...] = ()
    max_output_tokens: Annotated[Tokens | None, Meta(description="Of reasoning and answer.")] = None
    max_tool_calls: int | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    top_logprobs: NumLogprobs = 0
    truncation: Annotated[str, shape(enum=["disabled", None])] = "disabled"
    metadata: Metadata | None = None
    service_tier: str = "auto"
    seed: Seed | None = None
    ignore_eos: bool = False
    chat_template_kwargs: TemplateVariables = None
    thinking_token_budget: ReasoningTokens = None
    return_token_ids: ReturnIds = False
    client_metadata: Annotated[
        Any, shape("Codex's: the session that a fork's is below.", **OBJECT)
    ] = None


class ConversationRequest(AnyBody, frozen=True, kw_only=True):
    """`POST /v1/conversations`."""

    is_others: ClassVar[bool] = True

    items: NewItems = None
    metadata: Metadata | None = None


class ConversationUpdate(AnyBody, frozen=True, kw_only=True):
    """`POST /v1/conversations/{conversation}`: all of the metadata."""

    is_others: ClassVar[bool] = True

    metadata: Metadata | None = None


class ItemsRequest(AnyBody, frozen=True, kw_only=True):
    """`POST /v1/conversations/{conversation}/items`."""

    is_others: ClassVar[bool] = True

    items: NewItems = None


# Answers

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class Response(Body, frozen=True, kw_only=True):
    """OpenAI's. `mallee`: of its last choice, and how its prompt was made (`turn`, `new_tokens`).

    `store` is false, and `mallee.not_stored` says why, of one that was to be stored and could not be.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    conversation: dict[str, str] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None = None
    user: str | None
    metadata: dict[str, Any]
    mallee: dict[str, Any] = OMITTED

    @property
    def is_over(self) -> bool:
        return self.status not in ("queued", "in_progress")


class ResponseSummary(Body, frozen=True, kw_only=True):
    """A response without its texts and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    conversation: dict[str, str] | None
    model: str
    previous_response_id: str | None
    usage: dict[str, Any] | None
    metadata: dict[str, Any]


class ResponseList(Page[ResponseSummary], frozen=True, kw_only=True):
    """Responses, by id."""


class ResponseDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ConversationBody(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationList(Page[ConversationBody], frozen=True, kw_only=True):
    """Conversations, by id."""


class ConversationItem(Body, frozen=True, kw_only=True):
    id: str
    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ]
    status: Literal["in_progress", "completed", "incomplete"]
    role: str = OMITTED
    content: list[dict[str, Any]] = OMITTED
    summary: list[dict[str, Any]] = OMITTED
    encrypted_content: str = OMITTED
    call_id: str = OMITTED
    name: str = OMITTED
    namespace: str = OMITTED
    arguments: str = OMITTED
    input: str = OMITTED
    output: Any = OMITTED


class ConversationDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ItemList(Page[dict[str, Any]], frozen=True, kw_only=True):
    """Items, the newest first unless asked for in their order."""
