"""Bodies of what draws tokens: completions, chat, forks and restores."""

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from mallee.protocol.api.shared import (
    OBJECT,
    OMITTED,
    STRING,
    SUFFIX,
    TOKEN_IDS,
    AnyRequest,
    Body,
    ChoiceExtras,
    Count,
    InjectedAt,
    Messages,
    Seed,
    Stream,
    StreamOptions,
    TemplateVariables,
    Tokens,
    Tools,
    UsageBody,
    shape,
)
from mallee.protocol.messages import MAX_LOGIT_BIAS, MAX_LOGPROBS

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_STOPS: Final = 16
MAX_STOP_IDS: Final = 1024
MAX_REASONING: Final = (1 << 31) - 1

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(ge=0, le=1, description="0: the likeliest token alone.")]
TopK = Annotated[int, Meta(ge=-1, description="0 and -1: off.")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_LOGIT_BIAS, description="-100 to 100 by token id."),
]
Branches = Annotated[int, Meta(ge=1, description="Branches of each prompt.")]
MaxTokens = Annotated[Tokens | None, Meta(description="At most so many tokens of an answer.")]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
PromptLogprobs = Annotated[
    NumLogprobs | None,
    Meta(
        description="vLLM's: so many of the likeliest in each place of the prompt, and its own token."
    ),
]
ReturnIds = Annotated[
    bool, Meta(description="vLLM's: token ids of prompt and answer, with the one that ended it.")
]
StopText = Annotated[str, Meta(min_length=1)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None,
    Meta(description=f"Text that ends an answer, or up to {MAX_STOPS} of them."),
]
ReasoningTokens = Annotated[
    Annotated[int, Meta(ge=0, le=MAX_REASONING)] | None,
    Meta(description="At most so many tokens of reasoning: then its end is the next token."),
]
ToolChoice = Annotated[
    Any,
    shape(
        "Whether some must be called, and which.",
        anyOf=[{"enum": ["none", "auto", "required"]}, OBJECT],
    ),
]


class DrawFields(AnyRequest, frozen=True, kw_only=True):
    """The way in which tokens are drawn, and texts that end them."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
    seed: Seed | None = None
    stop: Stop = None


class SamplingFields(DrawFields, frozen=True, kw_only=True):
    """Fields of every generating request. At most one says the form of the answer."""

    is_bounded: ClassVar[bool] = True

    max_tokens: MaxTokens = None
    stop_token_ids: Annotated[
        tuple[int, ...], Meta(max_length=MAX_STOP_IDS, description="Ids that end an answer.")
    ] = ()
    include_stop_str_in_output: bool = False
    min_tokens: Count = 0
    ignore_eos: bool = False
    response_format: Annotated[Any, shape("OpenAI's.", **OBJECT)] = None
    structured_outputs: Annotated[Any, shape("vLLM's.", **OBJECT)] = None
    guided_json: Annotated[Any, shape("A JSON schema.", anyOf=[OBJECT, STRING])] = None
    guided_regex: Annotated[Any, shape("A regular expression.", **STRING)] = None
    guided_choice: Annotated[Any, shape("Texts.", type="array", items=STRING)] = None
    guided_grammar: Annotated[Any, shape("Lark or GBNF.", **STRING)] = None
    return_token_ids: ReturnIds = False
    stream: Stream = False
    stream_options: StreamOptions | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`logprobs` counts the likeliest tokens to report; false is the same as to leave it out.

    `echo`: text and `logprobs` begin with the prompt's; `max_tokens` may be 0 then.
    """

    is_others: ClassVar[bool] = True

    prompt: Annotated[
        Any,
        shape(
            "Text, token ids, or several of either.",
            anyOf=[
                STRING,
                {"type": "array", "items": STRING},
                TOKEN_IDS,
                {"type": "array", "items": TOKEN_IDS},
            ],
        ),
    ] = None
    max_tokens: Annotated[Count | None, Meta(description="As elsewhere; 0 with `echo`.")] = None
    logprobs: NumLogprobs | bool | None = None
    prompt_logprobs: PromptLogprobs = None
    echo: bool = False
    n: Branches = 1


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """OpenAI's, with vLLM's fields. Its messages may name tools, reasoning and cached places.

    `continue_final_message`: the answer goes on inside the last message, an assistant's.
    `include_reasoning` false leaves the reasoning out of what is sent.
    """

    is_others: ClassVar[bool] = True
    history: ClassVar[str] = "messages"

    messages: Messages = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call.")] = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: Annotated[
        str | None, shape("Where the template knows it.", enum=[*EFFORTS, None])
    ] = None
    thinking_token_budget: ReasoningTokens = None
    max_completion_tokens: Annotated[Tokens | None, Meta(description="As `max_tokens`.")] = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    prompt_logprobs: PromptLogprobs = None
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    n: Branches = 1


class ForkRequest(SamplingFields, frozen=True, kw_only=True):
    """Branches of a capsule: one for each of `suffixes` or `suffix_ids`, or `n` without any."""

    suffixes: Annotated[
        list[Any] | None,
        shape(
            "One for each branch: text, token ids, or messages that go on.",
            items={"anyOf": SUFFIX},
        ),
    ] = None
    suffix_ids: Annotated[
        list[list[int]] | None,
        shape("As `suffixes`, of token ids alone.", items=TOKEN_IDS),
    ] = None
    n: Annotated[Tokens | None, Meta(description="Branches without suffixes.")] = None
    at: Annotated[Tokens | None, Meta(description="Only the capsule's first so many tokens.")] = (
        None
    )
    logprobs: NumLogprobs | bool | None = None


class RestoreRequest(AnyRequest, frozen=True, kw_only=True):
    """Fields of an answer that goes on; how it draws is the capsule's. `max_tokens`: tokens from here on."""

    is_bounded: ClassVar[bool] = True

    at: Annotated[Tokens | None, Meta(description="Only the capsule's first so many tokens.")] = (
        None
    )
    max_tokens: MaxTokens = None
    stop: Stop = None
    include_stop_str_in_output: bool = False
    return_token_ids: ReturnIds = False
    stream: Stream = False
    stream_options: StreamOptions | None = None


class TokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """vLLM's. `add_special_tokens`: those of a text's beginning; by default with `prompt` alone.

    `add_generation_prompt`: end rendered `messages` where the assistant's answer begins.
    """

    is_others: ClassVar[bool] = True

    prompt: Annotated[Any, shape("Text.", **STRING)] = None
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateVariables = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(AnyRequest, frozen=True, kw_only=True):
    """vLLM's. Special tokens become text too."""

    is_others: ClassVar[bool] = True

    tokens: Annotated[list[int] | None, shape("Token ids.", **TOKEN_IDS)] = None


# Answers


class InjectedExtras(Body, frozen=True, kw_only=True):
    """`mallee` of a choice that goes on."""

    injected: list[InjectedAt]


class AnyChoice(Body, frozen=True, kw_only=True):
    """`token_ids`, if asked for: of the answer, or of a stream's part; each has its entry in `logprobs`."""

    index: int
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    token_ids: list[int] = OMITTED
    mallee: ChoiceExtras = OMITTED


class TextChoice(AnyChoice, frozen=True, kw_only=True):
    """`prompt_token_ids`: of a completion; of a fork `suffix_token_ids`, which follow the capsule's."""

    text: str
    prompt_token_ids: list[int] = OMITTED
    suffix_token_ids: list[int] = OMITTED
    prompt_logprobs: list[Any] = OMITTED


class FunctionCall(Body, frozen=True, kw_only=True):
    name: str = OMITTED
    arguments: str


class Call(Body, frozen=True, kw_only=True):
    """A call of a function; in a stream its `index`, and only in its first part `id` and `name`."""

    index: int = OMITTED
    id: str = OMITTED
    type: Literal["function"] = OMITTED
    function: FunctionCall


class ChatMessage(Body, frozen=True, kw_only=True):
    """An answer. Its reasoning has both names that clients read."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    reasoning_content: str = OMITTED
    reasoning: str = OMITTED
    tool_calls: list[Call] = OMITTED


class ChatDelta(Body, frozen=True, kw_only=True):
    """A part of an answer that is streamed; the first one has the role."""

    role: Literal["assistant"] = OMITTED
    content: str | None = OMITTED
    reasoning_content: str = OMITTED
    reasoning: str = OMITTED
    tool_calls: list[Call] = OMITTED


class ChatChoice(AnyChoice, frozen=True, kw_only=True):
    message: ChatMessage


class ChunkChoice(AnyChoice, frozen=True, kw_only=True):
    """Of a stream: `text` of completions and forks, `delta` of chat. The first has ids before the answer."""

    text: str = OMITTED
    prompt_token_ids: list[int] = OMITTED
    suffix_token_ids: list[int] = OMITTED
    delta: ChatDelta = OMITTED


class AnyAnswer(Body, frozen=True, kw_only=True):
    """`prompt_token_ids`, if asked for: a chat's prompt, or the capsule; of a stream in the first chunk."""

    id: str
    created: int
    model: str
    prompt_token_ids: list[int] = OMITTED


class Chunk(AnyAnswer, frozen=True, kw_only=True):
    """A part of an answer that is streamed; `usage` in the last one, if it was asked for."""

    object: str
    choices: list[ChunkChoice]
    usage: UsageBody | None = OMITTED


class WholeBody(AnyAnswer, frozen=True, kw_only=True):
    """An answer that is not streamed."""

    choices: list[Any]
    usage: UsageBody


class Completion(WholeBody, frozen=True, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class Chat(WholeBody, frozen=True, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: list[Any] = OMITTED


class Fork(WholeBody, frozen=True, kw_only=True):
    object: Literal["capsule.fork"] = "capsule.fork"
    choices: list[TextChoice]


class Restore(WholeBody, frozen=True, kw_only=True):
    object: Literal["capsule.restore"] = "capsule.restore"
    choices: list[TextChoice]


class Tokenized(Body, frozen=True, kw_only=True):
    """`token_strs`: as the vocabulary writes them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Body, frozen=True, kw_only=True):
    prompt: str


class Model(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mallee"
    max_model_len: int


class ModelList(Body, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
