"""The API's operations, one row each: its routes and its document are made from them."""

from collections.abc import Mapping
from functools import partial
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
    that is answered with success. `refusals`: statuses beside those that all have, and the 404 of paths that
    name something.
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


_get = partial(Operation, "GET")
_post = partial(Operation, "POST")
_put = partial(Operation, "PUT")
_delete = partial(Operation, "DELETE")


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
_MADE: Final = (404, 409, 410)  # a capsule may be unknown; of other weights or computing; or gone
_CAPSULE: Final = "/v1/capsules/{capsule}"
_SESSION: Final = "/v1/sessions/{session}"
_RESPONSE: Final = "/v1/responses/{response}"
_CONVERSATION: Final = "/v1/conversations/{conversation}"
_ITEMS: Final = {**_PAGE, "order": {"type": "string", "enum": ["asc", "desc"]}}
_BRANCH: Final = "/v1/requests/{request}/branches/{branch}"
_RECORD: Final = f"{_SESSION}/record"


# A table, of one to four lines a row: the formatter would give each argument a line.
# fmt: off
OPERATIONS: Final = (
    _post("/v1/completions", "completions", "Answers to a prompt", generate.Completion,
        body=generate.CompletionRequest,
        example={"prompt": "A mallee is", "max_tokens": 16, "n": 2}, refusals=(404, 409),
        streams=True),
    _post("/v1/chat/completions", "chat", "Answers to a conversation", generate.Chat,
        body=generate.ChatRequest, example={**_MESSAGES, "max_tokens": 16}, refusals=(404, 409),
        streams=True),
    _post("/v1/messages", "messages.create", "Answers, as Anthropic's API",
        messages.AnthropicMessage, body=messages.MessagesRequest,
        example={**_MESSAGES, "max_tokens": 16}, refusals=(404, 409), streams=True,
        error=messages.AnthropicError, busy=OVERLOADED),
    _post("/v1/messages/count_tokens", "messages.count_tokens", "Tokens of a prompt",
        messages.TokenCount, body=messages.CountRequest, example=_MESSAGES, refusals=(404,),
        error=messages.AnthropicError, busy=OVERLOADED),
    _post("/tokenize", "tokenize", "Text or messages as token ids", generate.Tokenized,
        body=generate.TokenizeRequest, example={"prompt": "A mallee is", "return_token_strs": True},
        refusals=(404,)),
    _post("/v1/tokenize", "tokenize", "As /tokenize", generate.Tokenized,
        body=generate.TokenizeRequest, example=_MESSAGES, refusals=(404,)),
    _post("/detokenize", "detokenize", "Token ids as text", generate.Detokenized,
        body=generate.DetokenizeRequest, example={"tokens": [1, 2, 3]}, refusals=(404,)),
    _post("/v1/detokenize", "detokenize", "As /detokenize", generate.Detokenized,
        body=generate.DetokenizeRequest, example={"tokens": [1, 2, 3]}, refusals=(404,)),
    _post("/v1/search", "searches.create", "A whole search of texts, in one call", SearchAnswer,
        body=SearchRequest,
        example={"prompt": "A mallee is", "policy": {"type": "best_of_n", "n": 2, "max_tokens": 8}},
        refusals=_MADE, streams=True),
    _post("/v1/responses", "responses.create", "An answer that the server remembers",
        responses.Response, body=responses.ResponseRequest,
        example={"input": "Why do mallees re-sprout?", "max_output_tokens": 16},
        refusals=(404, 409), streams=True),
    _get("/v1/responses", "responses.list", "The caller's responses, a page at a time",
        responses.ResponseList, query=_PAGE),
    _get(_RESPONSE, "responses.get", "A stored response", responses.Response,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
        streams=True),
    _delete(_RESPONSE, "responses.delete", "Forget a response; its capsule stays",
        responses.ResponseDeleted),
    _post(f"{_RESPONSE}/cancel", "responses.cancel", "End a background response",
        responses.Response),
    _get(f"{_RESPONSE}/input_items", "responses.input_items", "The items of its input",
        responses.ItemList, query=_ITEMS),
    _post("/v1/conversations", "conversations.create", "Begin a conversation",
        responses.ConversationBody, body=responses.ConversationRequest,
        example={"items": [{"role": "user", "content": "I grow mallees."}],
                 "metadata": {"topic": "trees"}}),
    _get("/v1/conversations", "conversations.list", "The caller's conversations, a page at a time",
        responses.ConversationList, query=_PAGE),
    _get(_CONVERSATION, "conversations.get", "A conversation", responses.ConversationBody),
    _post(_CONVERSATION, "conversations.update", "Replace a conversation's metadata",
        responses.ConversationBody, body=responses.ConversationUpdate,
        example={"metadata": {"topic": "fires"}}),
    _delete(_CONVERSATION, "conversations.delete", "Forget a conversation",
        responses.ConversationDeleted),
    _get(f"{_CONVERSATION}/items", "conversations.list_items", "Its items", responses.ItemList,
        query=_ITEMS),
    _post(f"{_CONVERSATION}/items", "conversations.add_items", "Add items to its end",
        responses.ItemList, body=responses.ItemsRequest,
        example={"items": [{"role": "user", "content": "Mine re-sprouted."}]}),
    _get(f"{_CONVERSATION}/items/{{item}}", "conversations.get_item", "One item of it",
        responses.ConversationItem),
    _delete(f"{_CONVERSATION}/items/{{item}}", "conversations.delete_item", "Drop an item",
        responses.ConversationBody),
    _get("/v1/models", "models", "The models served: one", generate.ModelList),
    _get("/v1/models/weights", "operators.weights", "Versions of the model's weights",
        operator.Weights, refusals=(403,)),
    _post("/v1/models/weights", "operators.change_weights", "Serve other weights", operator.Weights,
        body=operator.WeightsRequest, example={"version": "step-100"}, successes=(200, 202),
        refusals=(403, 409)),
    _get("/v1/models/{model:path}", "model", "One model", generate.Model),
    _post("/v1/capsules", "capsules.create", "Compute a prompt once and keep its state",
        capsules.NewCapsule, body=capsules.CapsuleRequest,
        example={"prompt": "A long document ...", "ttl_s": 600}, successes=(200, 202),
        refusals=(404, 409)),
    _get("/v1/capsules", "capsules.list", "The caller's capsules, a page at a time",
        capsules.CapsuleList, query={**_FILTER, **_PAGE}),
    _delete("/v1/capsules", "capsules.delete_many", "Forget the capsules that are meant",
        capsules.CapsulesDeleted, query={**_FILTER, "all": {"type": "boolean"}}),
    _get("/v1/capsules/count", "capsules.count", "Number of the capsules that are meant",
        capsules.CapsuleCount, query=_FILTER),
    _post("/v1/capsules/import", "capsules.take", "A capsule from the file of an export",
        capsules.NewCapsule, body=BYTES, query=_IMPORT, refusals=(404, 409)),
    _get(f"{_CAPSULE}/export", "capsules.export", "A capsule as a file", BYTES, refusals=_MADE),
    _post(f"{_CAPSULE}/restore", "capsules.restore", "Go on as the branch it was taken from",
        generate.Restore, body=generate.RestoreRequest, example={"max_tokens": 16}, refusals=_MADE,
        streams=True),
    _post(f"{_CAPSULE}/rewind", "capsules.rewind", "A capsule of its first tokens",
        capsules.Capsule, body=capsules.RewindRequest, example={"to": 2}, refusals=_MADE),
    _post(f"{_CAPSULE}/prune", "capsules.prune", "Cancel and forget all below a capsule",
        capsules.CapsulePruned, body=shared.AnyRequest, example={}),
    _post(f"{_CAPSULE}/pin", "capsules.pin", "Keep it", capsules.Capsule, body=capsules.PinRequest,
        example={"ttl_s": 600}, refusals=_MADE),
    _delete(f"{_CAPSULE}/pin", "capsules.unpin", "Keep it only while there is room",
        capsules.Capsule, refusals=_MADE),
    _post(f"{_CAPSULE}/demote", "capsules.demote", "Move it to host memory or disk",
        capsules.Capsule, body=capsules.DemoteRequest, example={"tier": "host"}, refusals=_MADE),
    _post(f"{_CAPSULE}/promote", "capsules.promote", "Bring it back to the device",
        capsules.Capsule, body=shared.AnyRequest, example={}, refusals=_MADE),
    _get("/v1/requests/{request}", "records.get", "The course of a request", capsules.RequestLife),
    _post("/v1/requests/{request}/capsules", "capsules.capture", "A capsule of a running branch",
        capsules.Capsule, body=capsules.CaptureRequest, example={"branch": 0}, refusals=_MADE),
    _post("/v1/requests/{request}/prune", "branches.prune", "Cancel running branches",
        capsules.Pruned, body=capsules.PruneRequest, example={"branches": [1, 2]}),
    _post("/v1/requests/{request}/prioritize", "branches.prioritize",
        "Priority of running branches", capsules.Prioritized, body=capsules.PrioritizeRequest,
        example={"priority": 5, "branches": [0]}),
    _post(f"{_BRANCH}/inject", "branches.inject", "Tokens into a running branch", capsules.Injected,
        body=capsules.InjectRequest, example={"suffix": " The tool says: 42.", "mode": "append"},
        refusals=(409,)),
    _get(_CAPSULE, "capsules.get", "A capsule", capsules.Capsule),
    _get(f"{_CAPSULE}/text", "capsules.text", "Its text, from a token on", capsules.CapsuleText,
        query={"start": {"type": "integer", "minimum": 0, "default": 0},
               "return_token_ids": {"type": "boolean"}}, refusals=(410,)),
    _delete(_CAPSULE, "capsules.delete", "Forget it", capsules.CapsuleDeleted),
    _post(f"{_CAPSULE}/fork", "capsules.fork", "Continue it many times", generate.Fork,
        body=generate.ForkRequest,
        example={"suffixes": [" Question one?", " Question two?"], "max_tokens": 16},
        refusals=_MADE, streams=True),
    _get(_RECORD, "get_record", "The record of a session", BYTES),
    _delete(_RECORD, "delete_record", "Forget it", sessions.RecordDeleted),
    _get("/v1/sessions", "sessions.list", "The caller's sessions, a page at a time",
        sessions.SessionList, query=_PAGE),
    _get("/v1/watch", "ui.watch", "The caller's sessions, as they change", EVENTS,
        query={"seconds": _count(MAX_WATCH_S, MAX_WATCH_S)}),
    _post(f"{_SESSION}/fork", "sessions.fork", "A session that begins with its capsule",
        sessions.SessionFork, body=sessions.SessionForkRequest, example={"session": "another"},
        refusals=(409,)),
    _get(_SESSION, "sessions.show", "A session as a tree of capsules", sessions.SessionTree),
    _put(_SESSION, "sessions.put", "Give it a budget; it may be new", sessions.BoundSession,
        body=sessions.SessionRequest, example={"budget": {"tokens": 2000, "branches": 50}},
        refusals=(409,)),
    _delete(_SESSION, "sessions.close", "End it: release its capsules, end its requests",
        sessions.SessionClosed),
    _get("/v1/router/explain", "operators.explain", "Reasons of the last decisions, or of one",
        operator.Decisions,
        query={"request": {"type": "string", "minLength": 1}, "limit": _count(16, MAX_DECISIONS),
               "candidates": _count(16, MAX_CANDIDATES)},
        refusals=(403, 404)),
    _get("/v1/router/workers", "operators.workers", "The workers as this gateway sees them",
        operator.WorkerList, refusals=(403,)),
    _get("/v1/router/metrics-targets", "operators.metrics_targets", "Addresses for Prometheus",
        list[operator.MetricsTarget], refusals=(403,)),
    _post("/v1/router/workers/{worker}/drain", "operators.drain_worker", "Have a worker leave",
        operator.WorkerDraining, successes=(202,), refusals=(403,)),
    _get("/health", "health", "State of the gateway", operator.Health, successes=(200, 503),
        is_open=True),
    _get("/health/live", "live", "Whether the process answers", operator.Status, is_open=True),
    _get("/health/ready", "ready", "Whether requests are served", operator.Status,
        successes=(200, 503), is_open=True),
    _get("/metrics", "operators.metrics", "Prometheus' text", TEXT, refusals=(403,)),
    _get("/openapi.json", "openapi", "This document", JSON, is_open=True),
    _get("/docs", "page", "This document for people", HTML, is_open=True),
    _get("/ui", "ui.page", "Sessions and workers, live, for people", HTML, is_open=True),
    _get("/ui/{file}", "ui.file", "A file of that page", (HTML, "text/css", "text/javascript"),
        is_open=True),
)
# fmt: on
