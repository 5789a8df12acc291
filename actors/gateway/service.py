"""The seam between the HTTP API and the gateway: token jobs in, streams of branch deltas out.

Everything here is tokens; text (templates, tokenizing, stop strings) is the HTTP side's work.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import FinishReason, Grammar, Limits, Sampling, TokenLogprobs
from mallee.protocol.model import ModelSpec

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Terms(NamedTuple):
    """How a job waits if no worker has room, and whose it is on its worker.

    `tenant` and `session` are the client's text: not for logs.
    """

    tenant: str = ""
    priority: int = 0  # among its tenant's jobs, and on a worker in its session: higher first
    deadline_s: float | None = None  # to be taken by a worker within, from now
    session: str = ""  # of the tenant
    weight: float = 1.0  # of the session among those that a worker computes for


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """Continue `tokens` n times (one prefill, n branches)."""

    tokens: Tokens
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    salt: str = ""
    terms: Terms = NO_TERMS
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Compute `tokens` once and keep the state as a capsule; ttl_s 0 means until deleted."""

    tokens: Tokens
    salt: str = ""
    ttl_s: float = 0.0
    terms: Terms = NO_TERMS


@dataclass(frozen=True, slots=True)
class ForkJob:
    """Continue a capsule once per suffix (an empty suffix samples the capsule's own next token).

    With `at`, continue its first `at` tokens instead of all.
    """

    capsule: CapsuleId
    suffixes: Sequence[Tokens]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    terms: Terms = NO_TERMS
    grammar: Grammar | None = None
    at: int | None = None


Job = GenerateJob | PrefillJob | ForkJob


class Delta(NamedTuple):
    """News of one branch. The last delta of a branch has `finish`; if that is "error", `error`.

    `logprobs` has one entry per token if they were asked for.
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
    """What the gateway knows of a capsule."""

    capsule: CapsuleId
    worker: WorkerId
    boundary: int  # committed tokens
    created: float  # seconds since the epoch, as this gateway learned of it


class Service(Protocol):
    """What the HTTP API needs of a gateway."""

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
