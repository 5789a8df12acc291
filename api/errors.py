"""Errors as HTTP answers in OpenAI's shape."""

import math
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from mallee.protocol.api.shared import ErrorBody, ErrorFields
from mallee.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    MalleeError,
    NotFound,
    shown,
)

RETRY_AFTER_S = 1
CLIENT_GONE = 499  # never read by a client; keeps such requests apart in metrics

_TYPES = {
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


_SESSIONS: Final = "/v1/sessions/"
# Beginnings of paths that clients of other servers know, and their names in a refusal.
UNSERVED: Final = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/pooling": "pooling",
    "/classify": "classification",
    "/v1/moderations": "moderations",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores",
    "/score": "scores",
    "/v1/files": "files",
    "/v1/uploads": "uploads",
    "/v1/batches": "batches",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/vector_stores": "vector stores",
    "/v1/evals": "evals",
    "/v1/containers": "containers",
    "/v1/chat/completions": "stored completions",
    "/v1/messages/batches": "batches",
    "/v1/complete": "text completions of Anthropic's",
}


class BodyTooLarge(BadRequest):
    """The request body is longer than this server reads."""

    status = 413
    code = "request_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the request body is larger than {limit} bytes; send token ids, or a shorter prompt",
            limit=limit,
        )


class ImportTooLarge(BodyTooLarge):
    """The file of a capsule is larger than this server takes."""

    def __init__(self, limit: int) -> None:
        BadRequest.__init__(
            self,
            f"the capsule's file is larger than {limit} bytes; raise imports.max_gib of the server, or"
            " create the capsule from its text",
            limit=limit,
        )


class TooManyValues(BadRequest):
    """The request body has more values than this server reads."""

    status = 413
    code = "request_too_large"

    def __init__(self, num: int, limit: int) -> None:
        super().__init__(
            f"the request body has {num} values and names > {limit}; send fewer prompts at once, or text"
            " instead of token ids",
            num=num,
            limit=limit,
        )


class AnswerTooLarge(BadRequest):
    """An answer has more log-probabilities than one body may have."""

    code = "answer_too_large"

    def __init__(self, num: int, limit: int) -> None:
        super().__init__(
            f"the answer has {num} log-probabilities > {limit} of one body; give stream=true, or ask for"
            " fewer tokens, branches or logprobs",
            param="logprobs",
            limit=limit,
        )


class SlowBody(BadRequest):
    """The request body came too slowly, or not at all."""

    status = 408
    code = "slow_body"

    def __init__(self, nbytes: int, seconds: float, rate: int) -> None:
        super().__init__(
            f"{nbytes} bytes of the request body came in {seconds:.0f} s, and not all of it: send it at"
            f" {rate} bytes a second at least",
            nbytes=nbytes,
            seconds=seconds,
        )


class UnsupportedEncoding(BadRequest):
    """The request body is compressed."""

    status = 415
    code = "unsupported_content_encoding"

    def __init__(self, encoding: str) -> None:
        super().__init__(f"content-encoding {shown(encoding)}: send the body as it is")


class MethodNotAllowed(BadRequest):
    """The path exists, the method doesn't."""

    status = 405
    code = "method_not_allowed"


class NotServed(NotFound):
    """A path of OpenAI's or of another server's, which this one has not."""

    code = "not_served"

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: this server has no {what}; it generates text, at /v1/chat/completions,"
            " /v1/completions and /v1/capsules (GET /openapi.json has all paths)",
            what=what,
        )


class KeyReused(BadRequest):
    """Another request was sent under the same idempotency key."""

    status = 422
    code = "idempotency_key_reused"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key {shown(key)} was sent with another body or path; give each request a key of"
            " its own",
            param="idempotency-key",
            key=key,
        )


class AnswerNotKept(BadRequest):
    """The answer of a key is too large to be given again, and runs."""

    status = 409
    code = "answer_not_kept"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the request of Idempotency-Key {shown(key)} runs, and its answer is too large to be given"
            " twice; send it again when it has ended, or without a key",
            param="idempotency-key",
            key=key,
        )


class ClientGone(Exception):
    """The client hung up before its answer was ready."""


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status >= 500:
        return _TYPES.get(status, "server_error")
    return _TYPES.get(status, "invalid_request_error")


def error_fields(error: MalleeError) -> ErrorFields:
    return ErrorFields(
        message=error.client_message,
        type=error_type(error.status),
        param=error.fields.get("param"),
        code=error.code,
    )


def error_body(error: MalleeError) -> ErrorBody:
    return ErrorBody(error=error_fields(error))


def error_response(error: MalleeError) -> Response:
    """The error as an answer; 429 and 503 carry `retry-after`.

    If the request's own deadline is over, or its work was done in vain, `x-should-retry` stops OpenAI's
    clients from retrying.
    """
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(math.ceil(error.fields.get("retry_after_s", RETRY_AFTER_S)))
    is_late = isinstance(error, DeadlineExceeded) and error.fields.get("is_own")
    if is_late or error.fields.get("was_computed"):
        headers["x-should-retry"] = "false"
    if error.status in (408, 413, 415):
        headers["connection"] = "close"  # the rest of the body is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error_body(error)), error.status, headers, "application/json"
    )


def unexpected(request_id: str) -> InternalError:
    """The error that hides a bug of ours from clients: an id to look for in the log, nothing else."""
    return InternalError(f"internal error; it was logged as request {request_id}")


def answer_to(error: MalleeError | HTTPException | ClientGone, scope: Scope) -> Response:
    """The answer to a request that is refused, or whose client has gone."""
    if isinstance(error, MalleeError):
        return error_response(error)
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_GONE)
    path = scope["path"]
    where = f"{shown(scope['method'])[1:-1]} {shown(path)[1:-1]}"
    if error.status_code == 405:
        answer = error_response(MethodNotAllowed(f"{where}: this path has other methods only"))
        answer.headers.update(error.headers or {})
        return answer
    if error.status_code == 404:
        if (what := _unserved(path)) is not None:
            return error_response(NotServed(where, what))
        remedy = "; the name of a session has no slash" if path.startswith(_SESSIONS) else ""
        return error_response(NotFound(f"{where}: there is no such path{remedy}"))
    return error_response(BadRequest(f"{where}: {error.detail}"))


def _unserved(path: str) -> str | None:
    return next((UNSERVED[head] for head in UNSERVED if f"{path}/".startswith(f"{head}/")), None)
