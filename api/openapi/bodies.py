"""Bodies of answers as types: for the document alone, the code that answers writes them itself.

Fields that are not always there have defaults. Tests hold real answers against them, name by name.
"""

from typing import Any, Literal

import msgspec

from mallee.search.results import NodeResult

OMITTED: Any = msgspec.UNSET


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON object."""


class ErrorFields(Body, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Body, frozen=True, kw_only=True):
    """Every refusal and failure, as OpenAI's."""

    error: ErrorFields


class PromptDetails(Body, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionDetails(Body, frozen=True, kw_only=True):
    """Tokens that were drafted: those that were drawn, and those that were not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Body, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = OMITTED


class ChoiceExtras(Body, frozen=True, kw_only=True):
    """`mallee` of a finished choice. `capsule`: the state that it left behind, which can be forked."""

    worker: str | None
    capsule: str | None
    boundary: int | None
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int
    weight_version: dict[str, str]
    accepted_prediction_tokens: int = OMITTED
    rejected_prediction_tokens: int = OMITTED
    retain: dict[str, Any] = OMITTED
    cache: dict[str, Any] = OMITTED
    kept: Literal["kept", "refused"] = OMITTED
    injected: list[dict[str, int]] = OMITTED
    ended_by: Literal["tokens", "wall_s", "regex", "logprob", "done", "score"] = OMITTED
    score: float | None = OMITTED
    score_error: str = OMITTED
    error: dict[str, Any] = OMITTED


class AnyChoice(Body, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    logprobs: dict[str, Any] | None
    mallee: ChoiceExtras = OMITTED


class TextChoice(AnyChoice, frozen=True, kw_only=True):
    text: str


class ChatChoice(AnyChoice, frozen=True, kw_only=True):
    message: dict[str, Any]


class AnyAnswer(Body, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: UsageBody


class SpentBody(Body, frozen=True, kw_only=True):
    """Tokens that were computed for a search, in its tree or not, and the requests that it made."""

    prefill_tokens: int
    completion_tokens: int
    requests: int


class Search(Body, frozen=True, kw_only=True):
    """The tree of a search. `principal`: numbers of nodes from the root to the selected one."""

    object: Literal["search"]
    created: int
    model: str
    seed: int
    text: str
    score: float | None
    reason: Literal["done", "found", "tokens", "nodes", "expansions"]
    principal: list[int]
    tokens: int
    expansions: int
    blocks: int
    spent: SpentBody
    nodes: list[NodeResult]


class Completion(AnyAnswer, frozen=True, kw_only=True):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Chat(AnyAnswer, frozen=True, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Response(Body, frozen=True, kw_only=True):
    """OpenAI's. `mallee`: of its last choice, and how its prompt was made (`turn`, `new_tokens`)."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    conversation: dict[str, str] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None
    metadata: dict[str, Any]
    mallee: dict[str, Any] = OMITTED


class ResponseDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: bool


class ConversationBody(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationItem(Body, frozen=True, kw_only=True):
    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: str = OMITTED
    content: list[dict[str, Any]] = OMITTED
    summary: list[dict[str, Any]] = OMITTED
    encrypted_content: str = OMITTED
    call_id: str = OMITTED
    name: str = OMITTED
    namespace: str = OMITTED
    arguments: str = OMITTED
    output: Any = OMITTED


class ConversationDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


class ItemList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Fork(AnyAnswer, frozen=True, kw_only=True):
    object: Literal["capsule.fork"]
    choices: list[TextChoice]


class Restore(AnyAnswer, frozen=True, kw_only=True):
    object: Literal["capsule.restore"]
    choices: list[TextChoice]


class AnthropicErrorFields(Body, frozen=True, kw_only=True):
    type: str
    message: str
    param: str | None
    code: str


class AnthropicError(Body, frozen=True, kw_only=True):
    """Every refusal and failure on Anthropic's paths."""

    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str


class AnthropicUsage(Body, frozen=True, kw_only=True):
    """A prompt has the sum of its three counts of input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens: int
    service_tier: Literal["standard"]


class AnthropicMessage(Body, frozen=True, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: AnthropicUsage
    mallee: ChoiceExtras
    diagnostics: dict[str, Any] | None = OMITTED


class TokenCount(Body, frozen=True, kw_only=True):
    input_tokens: int


class Capsule(Body, frozen=True, kw_only=True):
    """Fields that only its worker tells may be left out; of a failed one `error` says why."""

    id: str
    object: Literal["capsule"]
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
    tier: Literal["device", "host", "disk", "none"] = OMITTED
    nbytes: int = OMITTED
    shared_nbytes: int = OMITTED
    drawn: int | None = OMITTED
    aligned_tokens: int = OMITTED


class Failure(Body, frozen=True, kw_only=True):
    message: str
    code: str


class NodeExtras(Body, frozen=True, kw_only=True):
    """`capsule`: of a node that keeps it."""

    request: str
    worker: str | None
    capsule: str | None
    cached_tokens: int
    prefill_tokens: int
    completion_tokens: int


class GraphNode(Body, frozen=True, kw_only=True):
    """A node as it stands; times are milliseconds since the graph began.

    `resumed`: an earlier run of the graph has done it.
    """

    kind: Literal["prefill", "branch", "join", "tool", "map"]
    status: Literal["waiting", "queued", "running", "done", "failed", "cancelled"]
    after: str | None
    cause: str | None
    ready_ms: float | None
    start_ms: float | None
    first_token_ms: float | None
    end_ms: float | None
    resumed: bool = OMITTED
    error: Failure = OMITTED
    output: str = OMITTED
    items: list[str] = OMITTED
    finish_reason: str | None = OMITTED
    mallee: NodeExtras = OMITTED


class GraphStep(Body, frozen=True, kw_only=True):
    node: str
    ms: float


class GraphBody(Body, frozen=True, kw_only=True):
    """`path`: the nodes that the end waited for, one after the other; their times add up to `wall_ms`."""

    id: str
    object: Literal["graph"]
    created: int
    model: str
    status: Literal["running", "done", "failed", "cancelled"]
    outputs: dict[str, str]
    wall_ms: float | None
    path: list[GraphStep] = OMITTED
    usage: UsageBody
    nodes: dict[str, GraphNode]


class GraphDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["graph.deleted"]
    deleted: bool
    cancelled: bool


class GraphResult(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["graph.result"]
    node: str


class Pruned(Body, frozen=True, kw_only=True):
    object: Literal["branches.pruned"]
    request: str
    branches: list[int]


class CapsulePruned(Body, frozen=True, kw_only=True):
    """`left`: capsules below it whose workers did not release them."""

    id: str
    object: Literal["capsule.pruned"]
    requests: list[str]
    released: int
    left: int


class Prioritized(Body, frozen=True, kw_only=True):
    object: Literal["branches.prioritized"]
    request: str
    branches: list[int]
    priority: int


class Injected(Body, frozen=True, kw_only=True):
    object: Literal["branch.injected"]
    request: str
    branch: int
    at: int
    tokens: int


class NewCapsule(Capsule, frozen=True, kw_only=True):
    """Of one that is not waited for, nothing is known of its computing yet."""

    prefill_tokens: int = OMITTED
    cached_tokens: int = OMITTED
    usage: UsageBody = OMITTED
    imported: dict[str, int] = OMITTED


class CapsuleList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Capsule]
    last_id: str | None
    has_more: bool
    unknown: int


class CapsuleCount(Body, frozen=True, kw_only=True):
    object: Literal["capsule.count"]
    count: int
    tokens: int
    unknown: int


class CapsulesDeleted(Body, frozen=True, kw_only=True):
    object: Literal["capsules.deleted"]
    deleted: int


class CapsuleText(Body, frozen=True, kw_only=True):
    """`text` is that of the capsule's `tokens` from number `start` on, special tokens as they are written."""

    id: str
    object: Literal["capsule.text"]
    start: int
    tokens: int
    text: str


class CapsuleDeleted(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["capsule.deleted"]
    deleted: bool


class RecordDeleted(Body, frozen=True, kw_only=True):
    session: str
    object: Literal["session.record.deleted"]
    deleted: bool


class Session(Body, frozen=True, kw_only=True):
    """`running`: requests of this gateway. `capsules` are those that are remembered."""

    id: str
    object: Literal["session"]
    parent: str | None
    created: int
    last_used: int
    capsules: int
    running: int


class SessionList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Session]
    last_id: str | None
    has_more: bool


class SessionNode(Body, frozen=True, kw_only=True):
    """A capsule of a session. `is_root`: another session's. Not `held`: no worker has it any more."""

    capsule: str
    parent: str | None
    request: str
    tokens: int
    created: int
    is_root: bool
    held: bool
    worker: str | None
    pinned: bool = OMITTED
    tier: Literal["device", "host", "disk", "none"] = OMITTED


class Resource(Body, frozen=True, kw_only=True):
    """`reserved`: for what runs below or at other gateways; what that doesn't use returns."""

    limit: float
    used: float
    reserved: float
    left: float


class SessionBudget(Body, frozen=True, kw_only=True):
    """null: not bounded by it. Not `kept`: the gateway that kept it is gone, or can't be asked."""

    kept: bool
    tokens: Resource | None
    branches: Resource | None
    wall_s: Resource | None


class BoundSession(Session, frozen=True, kw_only=True):
    """`budget`: the session's own."""

    budget: SessionBudget | None


class SessionTree(BoundSession, frozen=True, kw_only=True):
    """Nodes are in the order in which they were left. `children`: sessions whose parent it is."""

    children: list[str]
    nodes: list[SessionNode]


class SessionFork(BoundSession, frozen=True, kw_only=True):
    capsule: str


class SessionClosed(Body, frozen=True, kw_only=True):
    """`released` capsules; `left` ones whose workers are silent; `cancelled` requests of this gateway."""

    id: str
    object: Literal["session.closed"]
    closed: bool
    released: int
    left: int
    cancelled: int


class Model(Body, frozen=True, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Weights(Body, frozen=True, kw_only=True):
    object: Literal["weights"]
    version: str
    number: int
    serving: str
    workers: list[dict[str, Any]]


class Worker(Body, frozen=True, kw_only=True):
    worker: str
    object: Literal["worker"]
    incarnation: str
    address: str
    state: str
    device: str
    num_blocks: int
    active_blocks: int
    indexed_blocks: int
    rows: int
    waiting: int
    prefill_tokens: int
    lease_age_s: float
    is_whole: bool
    is_new: bool
    lends_at: str
    weight_version: str
    weight_change: dict[str, Any] | None
    metrics_at: str
    use: dict[str, int] | None
    tiers: dict[str, Any] | None


class WorkerList(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[Worker]


class WorkerDraining(Body, frozen=True, kw_only=True):
    worker: str
    object: Literal["worker.draining"]


class Decisions(Body, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    life: dict[str, Any] = OMITTED


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
    object: Literal["request"]
    created: float
    age_s: float
    state: Literal["running", "ended"]
    cache: dict[str, Any] | None
    branches: list[BranchLife]


class MetricsTarget(Body, frozen=True, kw_only=True):
    targets: list[str]
    labels: dict[str, str]


class Health(Body, frozen=True, kw_only=True):
    """Strangers are told the status alone."""

    status: Literal["ok", "degraded", "unavailable"]
    gateway: str = OMITTED
    broker: Literal["up", "down"] = OMITTED
    workers: list[dict[str, Any]] = OMITTED


class Status(Body, frozen=True, kw_only=True):
    status: Literal["live", "ready", "unavailable"]
