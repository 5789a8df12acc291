"""Bodies of capsules, and of a request's running branches."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from mallee.protocol.api.shared import (
    OMITTED,
    SUFFIX,
    AnyRequest,
    Body,
    ErrorFields,
    Index,
    Indices,
    Messages,
    Page,
    Priority,
    Prompt,
    TemplateVariables,
    Tokens,
    Tools,
    Ttl,
    UsageBody,
    shape,
)

Tier = Literal["device", "host", "disk", "none"]


class CapsuleRequest(AnyRequest, frozen=True, kw_only=True):
    """`add_generation_prompt`: end rendered `messages` where the assistant's answer begins.

    `ttl_s`: seconds that the capsule is kept without being used; 0: until it is deleted, if that may be.
    """

    prompt: Prompt = None
    messages: Messages = None
    tools: Tools = None
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: bool = False
    ttl_s: Ttl = None
    wait: Annotated[
        bool, Meta(description="False: answered at once, before the capsule is there.")
    ] = True


class ImportRequest(AnyRequest, frozen=True, kw_only=True):
    """The query beside a capsule's file. `ttl_s` as with `CapsuleRequest`."""

    ttl_s: Ttl = None


class CaptureRequest(AnyRequest, frozen=True, kw_only=True):
    branch: Index = 0
    ttl_s: Ttl = None


class RewindRequest(AnyRequest, frozen=True, kw_only=True):
    to: Annotated[Tokens | None, Meta(description="The tokens that are left.")] = None
    ttl_s: Ttl = None


class PinRequest(AnyRequest, frozen=True, kw_only=True):
    ttl_s: Ttl = None


class DemoteRequest(AnyRequest, frozen=True, kw_only=True):
    tier: Literal["host", "disk"] | None = None


class PruneRequest(AnyRequest, frozen=True, kw_only=True):
    branches: Indices | None = None


class PrioritizeRequest(AnyRequest, frozen=True, kw_only=True):
    priority: Priority | None = None
    branches: Indices | None = None


class InjectRequest(AnyRequest, frozen=True, kw_only=True):
    suffix: Annotated[Any, shape("Text, token ids, or messages that go on.", anyOf=SUFFIX)] = None
    mode: Annotated[
        Literal["append", "replace"],
        Meta(description="Behind what waits already, or instead of it."),
    ] = "append"


# Answers


class Capsule(Body, frozen=True, kw_only=True):
    """Fields that only its worker tells may be left out; of a failed one `error` says why."""

    id: str
    object: Literal["capsule"] = "capsule"
    created: int
    model: str
    worker: str | None
    tokens: int
    status: Literal["computing", "ready", "failed"]
    computed_tokens: int = OMITTED
    error: ErrorFields = OMITTED
    stale: bool = OMITTED
    pinned: bool = OMITTED
    ttl_s: float | None = OMITTED
    tier: Tier = OMITTED
    nbytes: int = OMITTED
    shared_nbytes: int = OMITTED
    drawn: int | None = OMITTED
    aligned_tokens: int = OMITTED


class Imported(Body, frozen=True, kw_only=True):
    """Tokens of an import that came with its file, tokens that were computed, and the file's size."""

    fetched_tokens: int
    computed_tokens: int
    bytes: int


class NewCapsule(Capsule, frozen=True, kw_only=True):
    """Of one that is not waited for, nothing is known of its computing yet."""

    prefill_tokens: int = OMITTED
    cached_tokens: int = OMITTED
    usage: UsageBody = OMITTED
    imported: Imported = OMITTED


class CapsuleList(Page[Capsule], frozen=True, kw_only=True):
    """`unknown`: capsules whose workers did not answer."""

    unknown: int


class CapsuleCount(Body, frozen=True, kw_only=True):
    object: Literal["capsule.count"] = "capsule.count"
    count: int
    tokens: int
    unknown: int


class CapsulesDeleted(Body, frozen=True, kw_only=True):
    object: Literal["capsules.deleted"] = "capsules.deleted"
    deleted: int


class CapsuleText(Body, frozen=True, kw_only=True):
    """`text` is that of the capsule's `tokens` from number `start` on, special tokens as they are written.

    `token_ids`, if asked for, are those tokens.
    """

    id: str
    object: Literal["capsule.text"] = "capsule.text"
    start: int
    tokens: int
    text: str
    token_ids: list[int] = OMITTED


class CapsuleDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["capsule.deleted"] = "capsule.deleted"
    deleted: bool = True


class CapsulePruned(Body, frozen=True, kw_only=True):
    """`left`: capsules below it whose workers did not release them."""

    id: str
    object: Literal["capsule.pruned"] = "capsule.pruned"
    requests: list[str]
    released: int
    left: int


class Pruned(Body, frozen=True, kw_only=True):
    object: Literal["branches.pruned"] = "branches.pruned"
    request: str
    branches: list[int]


class Prioritized(Body, frozen=True, kw_only=True):
    object: Literal["branches.prioritized"] = "branches.prioritized"
    request: str
    branches: list[int]
    priority: int


class Injected(Body, frozen=True, kw_only=True):
    object: Literal["branch.injected"] = "branch.injected"
    request: str
    branch: int
    at: int
    tokens: int


class BranchState(Body, frozen=True, kw_only=True):
    state: str
    at_s: float


class BranchPlace(Body, frozen=True, kw_only=True):
    worker: str | None
    at_s: float


class BranchLife(Body, frozen=True, kw_only=True):
    """`prompt`: the use of what was cached."""

    index: int
    state: Literal[
        "waiting",
        "computing",
        "answering",
        "stop",
        "length",
        "cancelled",
        "error",
        "budget",
        "condition",
        "refused",
    ]
    is_over: bool
    states: list[BranchState]
    workers: list[BranchPlace]
    moves: int
    prompt: Literal["computed", "extended", "found"] | None
    cached_tokens: int
    prefill_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_s: float | None
    capsule: str | None
    error: str | None


class RequestLife(Body, frozen=True, kw_only=True):
    """The course of a request. Times are seconds since it came, `created` since the epoch."""

    id: str
    object: Literal["request"] = "request"
    created: float
    age_s: float
    state: Literal["running", "ended"]
    cache: dict[str, Any] | None
    branches: list[BranchLife]
