"""The seam between the HTTP API and the gateway: token jobs in, streams of branch deltas out.

Everything here is tokens; text (templates, tokenizing, stop strings) belongs to the HTTP side.
"""

from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple, Protocol

from mallee.actors.gateway.jobs import Job
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import FinishReason, TokenLogprobs
from mallee.protocol.model import ModelSpec

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Delta(NamedTuple):
    """New tokens of one branch. The last delta of a branch has `finish`; if that is "error", `error`.

    `logprobs` has one entry per token if they were requested.
    """

    branch: int
    tokens: tuple[int, ...]
    finish: FinishReason | None
    cached_tokens: int
    prefill_tokens: int
    capsule: CapsuleId | None
    boundary: int
    error: MalleeError | None
    worker: WorkerId | None = None  # where the branch runs, if not on its stream's worker
    logprobs: tuple[TokenLogprobs, ...] = ()


class BranchStream(Protocol):
    """The running answer to one job: deltas of all its branches, interleaved, then the end.

    Leaving the iteration early must be followed by `aclose`, which cancels what still runs.
    """

    @property
    def request(self) -> RequestId: ...

    @property
    def worker(self) -> WorkerId: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self, branch: int) -> None:
        """End one branch early; no further delta of it is delivered."""
        ...

    async def aclose(self) -> None:
        """Cancel every branch still running. Idempotent."""
        ...


class CapsuleInfo(NamedTuple):
    """A capsule as the gateway knows it."""

    capsule: CapsuleId
    worker: WorkerId
    boundary: int  # committed tokens
    created: float  # seconds since the epoch, as this gateway learned of it


class Service(Protocol):
    """The gateway as the HTTP API needs it."""

    @property
    def model(self) -> ModelSpec: ...

    async def start(self, job: Job) -> BranchStream:
        """Route the job and send it off; it waits where there is no room, as its terms say.

        Raises MalleeError before anything is sent.
        """
        ...

    def capsule(self, capsule: CapsuleId) -> CapsuleInfo:
        """Raises UnknownCapsule."""
        ...

    async def release_capsule(self, capsule: CapsuleId) -> None:
        """Raises UnknownCapsule."""
        ...

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        """The body of `GET /v1/router/explain`: see `gateway.explain`. Raises NotFound."""
        ...

    def workers(self) -> dict[str, Any]:
        """The body of `GET /v1/router/workers`."""
        ...

    def health(self) -> dict[str, Any]:
        """`status` ok | degraded | unavailable, workers, broker state; JSON-able."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition, of type `METRICS_CONTENT_TYPE`."""
        ...
