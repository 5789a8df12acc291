"""Runs a prefill job to its capsule."""

import asyncio
from contextlib import suppress
from typing import Any, NamedTuple

from mallee.actors.http.answers import Usage, capsule_body
from mallee.actors.service import CapsuleInfo, Delta, PrefillJob, Service
from mallee.protocol.errors import InternalError, Unavailable, UnknownCapsule
from mallee.protocol.ids import CapsuleId, WorkerId, capsule_id


class MadeCapsule(NamedTuple):
    """A capsule just made, and what it took."""

    capsule: CapsuleId
    worker: WorkerId
    boundary: int
    cached_tokens: int
    prefill_tokens: int

    def body(self, model: str, created: int, prompt_tokens: int) -> dict[str, Any]:
        """The answer to `POST /v1/capsules`."""
        info = CapsuleInfo(self.capsule, self.worker, self.boundary, created)
        return {
            **capsule_body(info, model),
            "prefill_tokens": self.prefill_tokens,
            "cached_tokens": self.cached_tokens,
            "usage": Usage(prompt_tokens, 0, self.cached_tokens).body(),
        }


async def prefill(service: Service, job: PrefillJob) -> MadeCapsule:
    """The capsule of `job`. Raises MalleeError; cancelled, it leaves nothing running and no capsule."""
    stream = await service.start(job)
    last: Delta | None = None
    try:
        async for delta in stream:
            last = delta
            if delta.finish is not None:
                break
    except asyncio.CancelledError:
        # The news that the capsule is made may be here unread: nobody will ever ask for it.
        with suppress(UnknownCapsule):
            await service.release_capsule(capsule_id(stream.request))
        raise
    finally:
        await stream.aclose()
    if last is None or last.finish is None:
        raise InternalError("the prefill ended without a result")
    if last.finish == "error":
        raise last.error or InternalError("the prefill failed")
    if last.capsule is None:
        raise Unavailable(
            f"worker {stream.worker} computed the prompt but kept no capsule; retry later"
        )
    return MadeCapsule(
        last.capsule, stream.worker, last.boundary, last.cached_tokens, last.prefill_tokens
    )
