"""The API's operations, one row each: its routes and its document are made from them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mallee.api.capsules.bulk import MAX_AGE_S, TIERS
from mallee.api.entry.pages import MAX_LISTED
from mallee.api.messages.errors import OVERLOADED
from mallee.api.search.requests import SearchAnswer, SearchRequest
from mallee.protocol.api import capsules, generate, messages, operator, responses, sessions, shared

JSON, EVENTS, BYTES = "application/json", "text/event-stream", "application/octet-stream"
TEXT, HTML, FORM = "text/plain", "text/html", "application/x-www-form-urlencoded"

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
MAX_DECISIONS: Final = 128
MAX_CANDIDATES: Final = 4096
MAX_WATCH_S: Final = 25


class Operation(NamedTuple):
    """A method and path, and what it takes and gives.

    `handler` is the name of a method of `Api`, or of one of its rooms: "capsules.fork".
    `body` and `answer` are structs, or a media type; an answer may have one of several. `example` is a body
    that is answered with success. `refusals`: statuses beside those that all have.
    """

    method: str
    path: str
    handler: str
    summary: str
    answer: Any
    body: Any = None
    example: Mapping[str, Any] = NOTHING
    query: Mapping[str, Mapping[str, Any]] = NOTHING
    successes: tuple[int, ...] = (200,)
    refusals: tuple[int, ...] = ()
    streams: bool = False
    is_open: bool = False  # to callers without a key
    error: Any = shared.ErrorBody
    busy: int = 503  # the status where nothing can be served now

    @property
    def tag(self) -> str:
        words = self.path.removeprefix("/v1").split("/")
        return words[1].partition(".")[0]


def _count(default: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


_FILTER: Final[Mapping[str, Mapping[str, Any]]] = {
    "request": {"type": "string", "minLength": 1},
    "pinned": {"type": "boolean"},
    "tier": {"type": "string", "enum": list(TIERS)},
    "min_age_s": {"type": "number", "minimum": 0, "maximum": MAX_AGE_S},
}
_PAGE: Final[Mapping[str, Mapping[str, Any]]] = {
    "limit": _count(20, MAX_LISTED),
    "after": {"type": "string"},
}
_IMPORT: Final[Mapping[str, Mapping[str, Any]]] = {
    "model": {"type": "string"},
    "user": {"type": "string"},
    "ttl_s": {"type": "number"},
    "session": {"type": "string"},
    "priority": {"type": "integer"},
    "weight": {"type": "number"},
    "deadline_s": {"type": "number"},
}
_MESSAGES: Final = {"messages": [{"role": "user", "content": "Why do mallees re-sprout?"}]}
_MADE: Final = (
    404,
    409,
    410,
)  # what works on a capsule may not find it, or find it stale or computing
_CAPSULE: Final = "/v1/capsules/{capsule}"
_SESSION: Final = "/v1/sessions/{session}"
_RESPONSE: Final = "/v1/responses/{response}"
_CONVERSATION: Final = "/v1/conversations/{conversation}"
_ITEMS: Final = {**_PAGE, "order": {"type": "string", "enum": ["asc", "desc"]}}
_BRANCH: Final = "/v1/requests/{request}/branches/{branch}"
_RECORD: Final = f"{_SESSION}/record"


OPERATIONS: Final = (
    Operation(
        method="POST",
        path="/v1/completions",
        handler="completions",
        summary="Answers to a prompt",
        answer=generate.Completion,
        body=generate.CompletionRequest,
        example={"prompt": "A mallee is", "max_tokens": 16, "n": 2},
        refusals=(404, 409),
        streams=True,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions",
        handler="chat",
        summary="Answers to a conversation",
        answer=generate.Chat,
        body=generate.ChatRequest,
        example={**_MESSAGES, "max_tokens": 16},
        refusals=(404, 409),
        streams=True,
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        handler="messages.create",
        summary="Answers, as Anthropic's API",
        answer=messages.AnthropicMessage,
        body=messages.MessagesRequest,
        example={**_MESSAGES, "max_tokens": 16},
        refusals=(404, 409),
        streams=True,
        error=messages.AnthropicError,
        busy=OVERLOADED,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        handler="messages.count_tokens",
        summary="Tokens of a prompt",
        answer=messages.TokenCount,
        body=messages.CountRequest,
        example=_MESSAGES,
        refusals=(404,),
        error=messages.AnthropicError,
        busy=OVERLOADED,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        handler="tokenize",
        summary="Text or messages as token ids",
        answer=generate.Tokenized,
        body=generate.TokenizeRequest,
        example={"prompt": "A mallee is", "return_token_strs": True},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/tokenize",
        handler="tokenize",
        summary="As /tokenize",
        answer=generate.Tokenized,
        body=generate.TokenizeRequest,
        example=_MESSAGES,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler="detokenize",
        summary="Token ids as text",
        answer=generate.Detokenized,
        body=generate.DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/detokenize",
        handler="detokenize",
        summary="As /detokenize",
        answer=generate.Detokenized,
        body=generate.DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/search",
        handler="searches.create",
        summary="A whole search of texts, in one call",
        answer=SearchAnswer,
        body=SearchRequest,
        example={"prompt": "A mallee is", "policy": {"type": "best_of_n", "n": 2, "max_tokens": 8}},
        refusals=_MADE,
        streams=True,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        handler="responses.create",
        summary="An answer that the server remembers",
        answer=responses.Response,
        body=responses.ResponseRequest,
        example={"input": "Why do mallees re-sprout?", "max_output_tokens": 16},
        refusals=(404, 409),
        streams=True,
    ),
    Operation(
        "GET",
        "/v1/responses",
        "responses.list",
        "The caller's responses, a page at a time",
        responses.ResponseList,
        query=_PAGE,
    ),
    Operation(
        "GET",
        _RESPONSE,
        "responses.get",
        "A stored response",
        responses.Response,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
        refusals=(404,),
        streams=True,
    ),
    Operation(
        "DELETE",
        _RESPONSE,
        "responses.delete",
        "Forget a response; its capsule stays",
        responses.ResponseDeleted,
        refusals=(404,),
    ),
    Operation(
        "POST",
        f"{_RESPONSE}/cancel",
        "responses.cancel",
        "End a background response",
        responses.Response,
        refusals=(404,),
    ),
    Operation(
        "GET",
        f"{_RESPONSE}/input_items",
        "responses.input_items",
        "The items of its input",
        responses.ItemList,
        query=_ITEMS,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/conversations",
        handler="conversations.create",
        summary="Begin a conversation",
        answer=responses.ConversationBody,
        body=responses.ConversationRequest,
        example={
            "items": [{"role": "user", "content": "I grow mallees."}],
            "metadata": {"topic": "trees"},
        },
    ),
    Operation(
        "GET",
        "/v1/conversations",
        "conversations.list",
        "The caller's conversations, a page at a time",
        responses.ConversationList,
        query=_PAGE,
    ),
    Operation(
        "GET",
        _CONVERSATION,
        "conversations.get",
        "A conversation",
        responses.ConversationBody,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path=_CONVERSATION,
        handler="conversations.update",
        summary="Replace a conversation's metadata",
        answer=responses.ConversationBody,
        body=responses.ConversationUpdate,
        example={"metadata": {"topic": "fires"}},
        refusals=(404,),
    ),
    Operation(
        "DELETE",
        _CONVERSATION,
        "conversations.delete",
        "Forget a conversation",
        responses.ConversationDeleted,
        refusals=(404,),
    ),
    Operation(
        "GET",
        f"{_CONVERSATION}/items",
        "conversations.list_items",
        "Its items",
        responses.ItemList,
        query=_ITEMS,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path=f"{_CONVERSATION}/items",
        handler="conversations.add_items",
        summary="Add items to its end",
        answer=responses.ItemList,
        body=responses.ItemsRequest,
        example={"items": [{"role": "user", "content": "Mine re-sprouted."}]},
        refusals=(404,),
    ),
    Operation(
        "GET",
        f"{_CONVERSATION}/items/{{item}}",
        "conversations.get_item",
        "One item of it",
        responses.ConversationItem,
        refusals=(404,),
    ),
    Operation(
        "DELETE",
        f"{_CONVERSATION}/items/{{item}}",
        "conversations.delete_item",
        "Drop an item",
        responses.ConversationBody,
        refusals=(404,),
    ),
    Operation("GET", "/v1/models", "models", "The models served: one", generate.ModelList),
    Operation(
        "GET",
        "/v1/models/weights",
        "operators.weights",
        "Versions of the model's weights",
        operator.Weights,
        refusals=(403,),
    ),
    Operation(
        method="POST",
        path="/v1/models/weights",
        handler="operators.change_weights",
        summary="Serve other weights",
        answer=operator.Weights,
        body=operator.WeightsRequest,
        example={"version": "step-100"},
        successes=(200, 202),
        refusals=(403, 409),
    ),
    Operation(
        "GET", "/v1/models/{model:path}", "model", "One model", generate.Model, refusals=(404,)
    ),
    Operation(
        method="POST",
        path="/v1/capsules",
        handler="capsules.create",
        summary="Compute a prompt once and keep its state",
        answer=capsules.NewCapsule,
        body=capsules.CapsuleRequest,
        example={"prompt": "A long document ...", "ttl_s": 600},
        successes=(200, 202),
        refusals=(404, 409),
    ),
    Operation(
        "GET",
        "/v1/capsules",
        "capsules.list",
        "The caller's capsules, a page at a time",
        capsules.CapsuleList,
        query={**_FILTER, **_PAGE},
    ),
    Operation(
        "DELETE",
        "/v1/capsules",
        "capsules.delete_many",
        "Forget the capsules that are meant",
        capsules.CapsulesDeleted,
        query={**_FILTER, "all": {"type": "boolean"}},
    ),
    Operation(
        "GET",
        "/v1/capsules/count",
        "capsules.count",
        "Number of the capsules that are meant",
        capsules.CapsuleCount,
        query=_FILTER,
    ),
    Operation(
        "POST",
        "/v1/capsules/import",
        "capsules.take",
        "A capsule from the file of an export",
        capsules.NewCapsule,
        BYTES,
        query=_IMPORT,
        refusals=(404, 409),
    ),
    Operation(
        "GET",
        f"{_CAPSULE}/export",
        "capsules.export",
        "A capsule as a file",
        BYTES,
        refusals=_MADE,
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/restore",
        handler="capsules.restore",
        summary="Go on as the branch it was taken from",
        answer=generate.Restore,
        body=generate.RestoreRequest,
        example={"max_tokens": 16},
        refusals=_MADE,
        streams=True,
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/rewind",
        handler="capsules.rewind",
        summary="A capsule of its first tokens",
        answer=capsules.Capsule,
        body=capsules.RewindRequest,
        example={"to": 2},
        refusals=_MADE,
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/prune",
        handler="capsules.prune",
        summary="Cancel and forget all below a capsule",
        answer=capsules.CapsulePruned,
        body=shared.AnyRequest,
        example={},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/pin",
        handler="capsules.pin",
        summary="Keep it",
        answer=capsules.Capsule,
        body=capsules.PinRequest,
        example={"ttl_s": 600},
        refusals=_MADE,
    ),
    Operation(
        "DELETE",
        f"{_CAPSULE}/pin",
        "capsules.unpin",
        "Keep it only while there is room",
        capsules.Capsule,
        refusals=_MADE,
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/demote",
        handler="capsules.demote",
        summary="Move it to host memory or disk",
        answer=capsules.Capsule,
        body=capsules.DemoteRequest,
        example={"tier": "host"},
        refusals=_MADE,
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/promote",
        handler="capsules.promote",
        summary="Bring it back to the device",
        answer=capsules.Capsule,
        body=shared.AnyRequest,
        example={},
        refusals=_MADE,
    ),
    Operation(
        "GET",
        "/v1/requests/{request}",
        "records.get",
        "The course of a request",
        capsules.RequestLife,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request}/capsules",
        handler="capsules.capture",
        summary="A capsule of a running branch",
        answer=capsules.Capsule,
        body=capsules.CaptureRequest,
        example={"branch": 0},
        refusals=_MADE,
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request}/prune",
        handler="branches.prune",
        summary="Cancel running branches",
        answer=capsules.Pruned,
        body=capsules.PruneRequest,
        example={"branches": [1, 2]},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/requests/{request}/prioritize",
        handler="branches.prioritize",
        summary="Priority of running branches",
        answer=capsules.Prioritized,
        body=capsules.PrioritizeRequest,
        example={"priority": 5, "branches": [0]},
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path=f"{_BRANCH}/inject",
        handler="branches.inject",
        summary="Tokens into a running branch",
        answer=capsules.Injected,
        body=capsules.InjectRequest,
        example={"suffix": " The tool says: 42.", "mode": "append"},
        refusals=(404, 409),
    ),
    Operation("GET", _CAPSULE, "capsules.get", "A capsule", capsules.Capsule, refusals=(404,)),
    Operation(
        "GET",
        f"{_CAPSULE}/text",
        "capsules.text",
        "Its text, from a token on",
        capsules.CapsuleText,
        query={"start": {"type": "integer", "minimum": 0, "default": 0}},
        refusals=(404, 410),
    ),
    Operation(
        "DELETE",
        _CAPSULE,
        "capsules.delete",
        "Forget it",
        capsules.CapsuleDeleted,
        refusals=(404,),
    ),
    Operation(
        method="POST",
        path=f"{_CAPSULE}/fork",
        handler="capsules.fork",
        summary="Continue it many times",
        answer=generate.Fork,
        body=generate.ForkRequest,
        example={"suffixes": [" Question one?", " Question two?"], "max_tokens": 16},
        refusals=_MADE,
        streams=True,
    ),
    Operation("GET", _RECORD, "get_record", "The record of a session", BYTES, refusals=(404,)),
    Operation(
        "DELETE", _RECORD, "delete_record", "Forget it", sessions.RecordDeleted, refusals=(404,)
    ),
    Operation(
        "GET",
        "/v1/sessions",
        "sessions.list",
        "The caller's sessions, a page at a time",
        sessions.SessionList,
        query=_PAGE,
    ),
    Operation(
        "GET",
        "/v1/watch",
        "ui.watch",
        "The caller's sessions, as they change",
        EVENTS,
        query={"seconds": _count(MAX_WATCH_S, MAX_WATCH_S)},
    ),
    Operation(
        method="POST",
        path=f"{_SESSION}/fork",
        handler="sessions.fork",
        summary="A session that begins with its capsule",
        answer=sessions.SessionFork,
        body=sessions.SessionForkRequest,
        example={"session": "another"},
        refusals=(404,),
    ),
    Operation(
        "GET",
        _SESSION,
        "sessions.show",
        "A session as a tree of capsules",
        sessions.SessionTree,
        refusals=(404,),
    ),
    Operation(
        method="PUT",
        path=_SESSION,
        handler="sessions.put",
        summary="Give it a budget; it may be new",
        answer=sessions.BoundSession,
        body=sessions.SessionRequest,
        example={"budget": {"tokens": 2000, "branches": 50}},
        refusals=(404, 409),  # 404: a slash in its name
    ),
    Operation(
        "DELETE",
        _SESSION,
        "sessions.close",
        "End it: release its capsules, end its requests",
        sessions.SessionClosed,
        refusals=(404,),
    ),
    Operation(
        "GET",
        "/v1/router/explain",
        "operators.explain",
        "Reasons of the last decisions, or of one",
        operator.Decisions,
        query={
            "request": {"type": "string", "minLength": 1},
            "limit": _count(16, MAX_DECISIONS),
            "candidates": _count(16, MAX_CANDIDATES),
        },
        refusals=(403, 404),
    ),
    Operation(
        "GET",
        "/v1/router/workers",
        "operators.workers",
        "The workers as this gateway sees them",
        operator.WorkerList,
        refusals=(403,),
    ),
    Operation(
        "GET",
        "/v1/router/metrics-targets",
        "operators.metrics_targets",
        "Addresses for Prometheus",
        list[operator.MetricsTarget],
        refusals=(403,),
    ),
    Operation(
        "POST",
        "/v1/router/workers/{worker}/drain",
        "operators.drain_worker",
        "Have a worker leave",
        operator.WorkerDraining,
        successes=(202,),
        refusals=(403, 404),
    ),
    Operation(
        "GET",
        "/health",
        "health",
        "State of the gateway",
        operator.Health,
        successes=(200, 503),
        is_open=True,
    ),
    Operation(
        "GET", "/health/live", "live", "Whether the process answers", operator.Status, is_open=True
    ),
    Operation(
        "GET",
        "/health/ready",
        "ready",
        "Whether requests are served",
        operator.Status,
        successes=(200, 503),
        is_open=True,
    ),
    Operation("GET", "/metrics", "operators.metrics", "Prometheus' text", TEXT, refusals=(403,)),
    Operation("GET", "/openapi.json", "openapi", "This document", JSON, is_open=True),
    Operation("GET", "/docs", "page", "This document for people", HTML, is_open=True),
    Operation(
        "GET", "/ui", "ui.page", "Sessions and workers, live, for people", HTML, is_open=True
    ),
    Operation(
        "GET",
        "/ui/{file}",
        "ui.file",
        "A file of that page",
        (HTML, "text/css", "text/javascript"),
        refusals=(404,),
        is_open=True,
    ),
)
