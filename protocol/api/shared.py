"""Parts that bodies have in common, and the rule for fields that they don't have."""

from typing import Annotated, Any, ClassVar, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

OMITTED: Any = msgspec.UNSET
"""The default of an answer's field that is not always there."""

MAX_TENANT: Final = 128  # characters; names that differ beyond are one tenant
MAX_SALT: Final = 256
MAX_CACHE_KEY: Final = 256
MAX_SESSION: Final = 128
MAX_PRIORITY: Final = 1000
MAX_DEADLINE_S: Final = 86_400
MAX_WEIGHT: Final = 1000
MAX_AMOUNT: Final = 1 << 40  # of a budget
MAX_WALL_S: Final = 86_400
MAX_REGEX: Final = 512  # characters
MAX_WINDOW: Final = 1024  # tokens
MAX_EVERY: Final = 1 << 20  # the same

OTHERS_HARMLESS: Final = frozenset(
    {
        "client_metadata",
        "include_reasoning",
        "metadata",
        "prompt_cache_retention",
        "request_id",
        "service_tier",
        "store",
    }
)
"""Fields of other APIs that change no answer here: accepted, and ignored."""

OTHERS_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "instructions": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "output_config": ({},),
    "output_format": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "system": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of other APIs, or other paths, that change answers, by the values at which they change nothing."""


def shape(description: str = "", **schema: Any) -> Meta:
    """Describe a field that its handler reads by itself; `schema` is its JSON Schema."""
    return Meta(description=description or None, extra_json_schema=schema)


STRING: Final = {"type": "string"}
OBJECT: Final = {"type": "object"}
OBJECTS: Final = {"type": "array", "items": OBJECT}
TOKEN_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
MESSAGES: Final = {"type": "array", "minItems": 1, "items": OBJECT}
SUFFIX: Final = [
    STRING,
    TOKEN_IDS,
    {**OBJECT, "required": ["messages"], "properties": {"messages": MESSAGES}},
]

# Types of single fields.
Tokens = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Index = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Indices = Annotated[list[Index], Meta(description="Indices; all, if left out.")]
Prompt = Annotated[Any, shape("Text or token ids.", anyOf=[STRING, TOKEN_IDS])]
Messages = Annotated[Any, shape("A conversation, for the model's own template.", **MESSAGES)]
Tools = Annotated[Any, shape("Functions that may be called, as OpenAI's.", maxItems=512, **OBJECTS)]
TemplateVariables = Annotated[Any, shape("Variables that the template reads.", **OBJECT)]
Ttl = Annotated[Seconds | None, Meta(description="Seconds without use until it ends.")]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Stream = Annotated[bool, Meta(description="Server-sent events instead of one body.")]
SessionName = Annotated[str, Meta(max_length=MAX_SESSION, extra_json_schema={"pattern": "^[^/]*$"})]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON object of an answer."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One JSON object of a request, below its first level; unknown fields are refused."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`continuous_usage_stats`, vLLM's: with `include_usage` each chunk has the usage so far.

    `include_obfuscation` is accepted and ignored: padding of chunks is not offered.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Keep(Part, frozen=True, kw_only=True):
    """The time for which a capsule is pinned, as with `CapsuleRequest`."""

    ttl_s: Ttl = None


class BudgetFields(Part, frozen=True, kw_only=True):
    """Bounds of a request or a session, and of all that is below it."""

    tokens: Annotated[int, Meta(ge=1, le=MAX_AMOUNT)] | None = None
    branches: Annotated[int, Meta(ge=1, le=MAX_AMOUNT)] | None = None
    wall_s: Annotated[float, Meta(gt=0, le=MAX_WALL_S)] | None = None


class LogprobFields(Part, frozen=True, kw_only=True):
    """A branch ends when the mean log-probability of its last `tokens` is `below`."""

    below: Annotated[float, Meta(le=0)]
    tokens: Annotated[int, Meta(ge=1, le=MAX_WINDOW)] = 16


class ScoreFields(Part, frozen=True, kw_only=True):
    """A verifier at `url` scores the texts so far, one at most each `every` tokens.

    A branch ends when its score is `below`. `required`: a call that fails ends those it asked for.
    """

    url: str
    below: float
    every: Annotated[int, Meta(ge=1, le=MAX_EVERY)] = 32
    required: bool = False


class StopWhenFields(Part, frozen=True, kw_only=True):
    """`done`: the others end when so many choices have ended by themselves."""

    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX)] | None = None
    done: Annotated[int, Meta(ge=1)] | None = None
    logprob: LogprobFields | None = None
    score: ScoreFields | None = None


class Extras(Part, frozen=True, kw_only=True):
    """The `mallee` object of a request. `session`: the tree that it belongs to, of the tenant's.

    `parent_session`: the session that it branched off from. `session_final`: the session ends with it.
    `keep`: pin the capsules that its answers leave. `record`: into the session's record. `weight`: of its
    session among those of its tenant. `diagnostics`: the answer says how its prompt was served.
    """

    keep: bool | Keep = False
    record: bool = False
    priority: Priority | None = None
    deadline_s: Annotated[float, Meta(ge=0, le=MAX_DEADLINE_S)] | None = None
    session: SessionName = ""
    parent_session: SessionName = ""
    session_final: bool = False
    weight: Annotated[float, Meta(ge=1 / MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0
    diagnostics: bool = False
    budget: BudgetFields | None = None
    stop_when: StopWhenFields | None = None


class AnyBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request. `null` means that a field is left out."""

    is_bounded: ClassVar[bool] = False  # it may have a budget, and conditions to stop by
    is_others: ClassVar[bool] = False  # of another's API, whose clients send more fields than these
    history: ClassVar[str] = ""  # the list that clients send again with more at its end


class AnyRequest(AnyBody, frozen=True, kw_only=True):
    """Fields of every request: its owner, its place in the queue, its wishes for the cache."""

    model: Annotated[str | None, Meta(description="May be left out: there is one.")] = None
    user: Annotated[str, Meta(description="The tenant, unless a key or a header names one.")] = ""
    safety_identifier: Annotated[str, Meta(description="The tenant, before `user`.")] = ""
    cache_salt: Annotated[
        str,
        Meta(max_length=MAX_SALT, description="Requests with different salts share no cache."),
    ] = ""
    session_id: Annotated[
        SessionName, Meta(description="The session, as vLLM and SGLang name it.")
    ] = ""
    mallee: Annotated[Extras, Meta(description="Fields of Mallee's own.")] = Extras()
    nvext: Annotated[Any, shape("NVIDIA Dynamo's `agent_hints`.", **OBJECT)] = None
    kv_hints: Annotated[Any, shape("`actions` of retention.", **OBJECT)] = None
    prompt_cache_key: Annotated[
        str, Meta(max_length=MAX_CACHE_KEY, description="Of prompts with much in common.")
    ] = ""
    prompt_cache_options: Annotated[Any, shape("OpenAI's: `mode` and `ttl`.", **OBJECT)] = None
    cache_control: Annotated[
        Any, shape('Anthropic\'s: {"type": "ephemeral", "ttl"}.', **OBJECT)
    ] = None


# Parts of answers


class ErrorFields(Body, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Body, frozen=True, kw_only=True):
    """Every refusal and failure, as OpenAI's."""

    error: ErrorFields


class Failure(Body, frozen=True, kw_only=True):
    message: str
    code: str


class PromptDetails(Body, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionDetails(Body, frozen=True, kw_only=True):
    """Tokens that were drafted: those that were drawn, and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Body, frozen=True, kw_only=True):
    """Token counts of one request; a prompt shared by several branches counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = OMITTED


class WeightVersions(Body, frozen=True, kw_only=True):
    """Versions of the weights at the beginning and the end of an answer."""

    start: str
    end: str


class Retained(Body, frozen=True, kw_only=True):
    outcome: str
    asked_bytes: int
    bytes: int


class InjectedAt(Body, frozen=True, kw_only=True):
    at: int
    tokens: int


class ChoiceExtras(Body, frozen=True, kw_only=True):
    """`mallee` of a finished choice. `capsule`: the state that it left behind, which can be forked.

    `resampled`: its worker was lost, and it went on by other draws than those of an undisturbed answer.
    """

    worker: str | None
    capsule: str | None
    boundary: int | None
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int
    weight_version: WeightVersions
    accepted_prediction_tokens: int = OMITTED
    rejected_prediction_tokens: int = OMITTED
    retain: Retained = OMITTED
    cache: dict[str, Any] = OMITTED
    kept: Literal["kept", "refused"] = OMITTED
    injected: list[InjectedAt] = OMITTED
    resampled: bool = OMITTED
    ended_by: Literal["tokens", "wall_s", "regex", "logprob", "done", "score"] = OMITTED
    score: float | None = OMITTED
    score_error: str = OMITTED
    error: Failure = OMITTED


class Page(Body, Generic[T], frozen=True, kw_only=True):
    """A part of a list. If it `has_more`, the next part is that `after` the `last_id`."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
