"""Many operations in one request, with a result for each."""

import asyncio
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request

from mallee.api.live.inner import InnerAnswer, answer_of, check_path
from mallee.protocol.errors import InvalidParameter

MAX_OPERATIONS: Final = 256
AT_ONCE: Final = 16
_BEGINNINGS: Final = ("/v1/capsules", "/v1/requests/")
_FILES: Final = ("/export", "/import")


class BatchOperation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: of those on capsules, and on requests and their branches."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: dict[str, Any] | None = None
    idempotency_key: str = ""


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Operations, which run at once: one that needs another's result belongs into the next batch."""

    operations: list[BatchOperation] = []


def check_operations(batch: BatchRequest) -> None:
    """Raises InvalidParameter."""
    num = len(batch.operations)
    if not 1 <= num <= MAX_OPERATIONS:
        raise InvalidParameter("operations", num, f"give 1 to {MAX_OPERATIONS} operations")
    for i, each in enumerate(batch.operations):
        name = f"operations[{i}]"
        check_path(each.path, _BEGINNINGS, _FILES, param=f"{name}.path")
        if each.body is not None and each.method != "POST":
            raise InvalidParameter(f"{name}.body", each.method, "only a POST has a body")
        if (each.body or {}).get("stream"):
            raise InvalidParameter(f"{name}.body.stream", True, "answers of a batch come whole")


async def run(request: Request, batch: BatchRequest) -> dict[str, Any]:
    """The body of the answer. Cancelled, it cancels what still runs; what has ended stays done."""
    room = asyncio.Semaphore(AT_ONCE)

    async def result(each: BatchOperation) -> InnerAnswer:
        body = each.body if each.body is not None or each.method != "POST" else {}
        async with room:
            return await answer_of(request, each.method, each.path, body, each.idempotency_key)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(result(each)) for each in batch.operations]
    answers = [task.result() for task in running]
    return {
        "object": "batch",
        "failed": sum(answer.status >= 400 for answer in answers),
        "data": [answer._asdict() for answer in answers],
    }
