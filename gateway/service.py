"""The seam between the HTTP API and the gateway: token jobs in, streams of branch deltas out.

Everything here is tokens; text (templates, tokenizing, stop strings) belongs to the HTTP side.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from mallee.gateway.capsule_files.exports import Export
from mallee.gateway.capsule_files.imports import Import
from mallee.gateway.sessions.sessions import GatewaySessions
from mallee.gateway.shared.records import SharedRecords
from mallee.protocol.errors import MalleeError, SlowReader
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.protocol.messages import (
    CapsuleStatus,
    FinishReason,
    Kept,
    Retained,
    Share,
    TokenLogprobs,
)
from mallee.protocol.model import BASE_WEIGHTS, ModelSpec
from mallee.router.dispatch.jobs import Job
from mallee.router.dispatch.verdicts import Verdict
from mallee.runtime.telemetry.families import content_type

metrics_type: Final = content_type
"""The type of `Service.metrics`, for the header `accept`."""


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
    verdict: Verdict | None = None  # on the request's prompt, in branch 0
    retained: Retained | None = None  # at the end, if retention was asked for
    weights: tuple[str, str] = (BASE_WEIGHTS.label, BASE_WEIGHTS.label)  # versions at start and end
    kept: Kept = ""  # whether its capsule was pinned, if it was to be
    drafts: tuple[int, int] | None = None  # tokens drafted, and those of them that were drawn
    injected: tuple[tuple[int, int], ...] = ()  # tokens of the answer before, and how many were

    def first(self, num: int, before: int) -> "Delta":
        """Its first `num` tokens alone; its answer has `before` in front of them."""
        left = [(at, min(n, before + num - at)) for at, n in self.injected if at < before + num]
        tokens, logprobs = self.tokens[:num], self.logprobs[:num]
        return self._replace(tokens=tokens, logprobs=logprobs, injected=tuple(left))


MAX_WAITING: Final = 1 << 16
"""Tokens and log-probabilities that may wait for a reader that takes nothing: a few megabytes."""

PATIENCE_S: Final = 10.0  # before a reader counts as one that takes nothing
MAX_BURST: Final = 1 << 20  # that may wait in any case: engines can be faster than their gateway
MAX_MERGED: Final = 1 << 12  # of one delta: milliseconds to write down


class DeltaQueue:
    """A queue of one reader. Belongs to one event loop.

    What waits of one branch comes out as one delta, up to `MAX_MERGED`, branches in the order of their
    oldest: a reader that is late gets as many tokens in fewer steps. Nothing follows a branch's delta with
    `finish`.
    """

    __slots__ = (
        *("_branches", "_burst", "_error", "_is_over", "_limit", "_reader", "_size"),
        *("_unread_since", "_waiting"),
    )

    def __init__(self, limit: int = MAX_WAITING, burst: int = MAX_BURST) -> None:
        self._limit = limit
        self._burst = burst
        self._branches: deque[int] = deque()  # those that have something waiting
        self._waiting: dict[int, list[Delta]] = {}
        self._size = 0  # of what waits, as `MAX_WAITING` counts
        self._unread_since: float | None = None  # seconds; of the first put since the last take
        self._reader: asyncio.Future[None] | None = None
        self._error: SlowReader | None = None
        self._is_over = False

    def put(self, delta: Delta, now: float) -> bool:
        """False if more waits at `now` (monotonic seconds) than a reader may leave.

        Then all of it is dropped, the reader gets SlowReader, and the answer is to be given up.
        """
        if self._error is not None:
            return False
        waiting = self._waiting.get(delta.branch)
        if waiting is None:
            self._waiting[delta.branch] = [delta]
            self._branches.append(delta.branch)
        else:
            waiting.append(delta)
        if self._unread_since is None:
            self._unread_since = now
        self._size += _size(delta)
        unread_s = now - self._unread_since
        if self._size > (self._limit if unread_s > PATIENCE_S else self._burst):
            self._error = SlowReader(self._size, unread_s)
            self._branches.clear()
            self._waiting.clear()
        self._wake()
        return self._error is None

    def end(self) -> None:
        """Nothing follows what waits."""
        self._is_over = True
        self._wake()

    def take(self) -> Delta | None:
        """Take what waits of one branch; None if nothing does."""
        if not self._branches:
            return None
        self._unread_since = None
        branch = self._branches.popleft()
        deltas = self._waiting.pop(branch)
        num = size = 0
        for delta in deltas:
            num += 1
            size += _size(delta)
            if size >= MAX_MERGED:
                break
        if num < len(deltas):
            self._branches.appendleft(branch)
            self._waiting[branch] = deltas[num:]
            del deltas[num:]
        self._size -= size
        return delta if num == 1 else _merged(deltas)

    async def get(self) -> Delta | None:
        """Take what waits of one branch, once something does; None at the end. Raises SlowReader."""
        while not self._branches:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            assert self._reader is None, "a queue has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.take()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _size(delta: Delta) -> int:
    return len(delta.tokens) + sum(1 + len(top) for _, top in delta.logprobs)


def _merged(deltas: list[Delta]) -> Delta:
    """All of one branch: the last says how far it is and how it ended."""
    last = deltas[-1]
    drafts = [delta.drafts for delta in deltas if delta.drafts is not None]
    return last._replace(
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        logprobs=tuple(each for delta in deltas for each in delta.logprobs),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        prefill_tokens=max(delta.prefill_tokens for delta in deltas),
        drafts=(sum(d for d, _ in drafts), sum(a for _, a in drafts)) if drafts else None,
        injected=tuple(each for delta in deltas for each in delta.injected),
    )


class BranchStream(Protocol):
    """The running answer to one job: deltas of all its branches, interleaved, then the end.

    Leaving the iteration early must be followed by `aclose`, which cancels what still runs.
    """

    @property
    def request(self) -> RequestId: ...

    @property
    def worker(self) -> WorkerId:
        """Known once it is `opened`."""
        ...

    async def opened(self) -> None:
        """Return once a worker has the job. Raises MalleeError if none will; cancelled, it is given up."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def take(self) -> Delta | None:
        """The next delta if one waits; None also at the end."""
        ...

    def cancel(self, branch: int) -> None:
        """End one branch early; no further delta of it is delivered."""
        ...

    def cut(
        self, branch: int, at: int, residue: Tokens, end: FinishReason = "stop"
    ) -> CapsuleId | None:
        """End a branch where its client saw its last text: after `at` tokens, prompt and all, and `residue`.

        Returns the capsule of that text, also if the branch has ended by itself; None: it left none.
        """
        ...

    async def aclose(self) -> None:
        """Cancel every branch still running. Idempotent."""
        ...


class OpenBranch(NamedTuple):
    """A branch that has not ended. `tail` are the last tokens that it drew, `state` as in its life."""

    branch: int
    state: str
    num_tokens: int
    tail: tuple[int, ...]


class CapsuleInfo(NamedTuple):
    """A capsule as the gateway knows it."""

    capsule: CapsuleId
    worker: (
        WorkerId | None
    )  # None: it went with its worker, and is computed again by its next fork; or
    # it is computing, and waits for a worker
    boundary: int  # committed tokens
    created: float  # seconds since the epoch, as this gateway learned of it
    is_stale: bool = False  # made by weights that have been replaced: it can't be forked
    status: CapsuleStatus | None = None  # by its worker, if it was asked and has answered
    is_computing: bool = False  # its prefill has not ended
    error: MalleeError | None = None  # by which its prefill has failed: there is no capsule


class Subtree(NamedTuple):
    """Requests that went on from a capsule, or from one that such a request left, as one gateway has them."""

    requests: list[RequestId]
    ended: list[RequestId]  # of them, those that were not over
    left: list[CapsuleId]  # capsules that all of them left, which are still there


class Service(Protocol):
    """The gateway as the HTTP API needs it."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        ...

    def new_name(self, scope: Scope, account: str = "") -> RequestId:
        """A name for a request to come, which its answer's id is made from before it starts.

        `account`, if one bounds it, can be told from the name, and from those of its capsules.
        """
        ...

    async def start(
        self, job: Job, prepare_s: float = 0.0, *, name: RequestId | None = None
    ) -> BranchStream:
        """Route the job and send it off; it waits where there is no room, as its terms say.

        It took `prepare_s` to read and tokenize it. `name`: a new one of its scope, if it has one.
        Raises MalleeError before anything is sent.
        """
        ...

    async def begin(
        self, job: Job, prepare_s: float = 0.0, *, name: RequestId | None = None
    ) -> BranchStream:
        """As `start`, but without a wait for a worker: the stream may not be `opened` yet.

        The capsule that `job` `makes` can be forked from now on.
        """
        ...

    async def capsule(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """Raises UnknownCapsule, also for one of another scope; CapsuleLost; what its prefill failed by."""
        ...

    async def tokens(self, capsule: CapsuleId, scope: Scope) -> Tokens:
        """The tokens of a capsule, from the first one on. Raises UnknownCapsule, UnknownText."""
        ...

    async def inspect(self, capsule: CapsuleId, scope: Scope) -> CapsuleInfo:
        """As `capsule`, with what its worker says of it; also of one whose prefill has failed."""
        ...

    def capsules(self, scope: Scope, after: str) -> Iterator[CapsuleInfo]:
        """The capsules of `scope` whose names come after `after`, in order; not those that go meanwhile."""
        ...

    async def capture(
        self, request: RequestId, branch: int, ttl_s: float, scope: Scope
    ) -> CapsuleInfo:
        """Take a capsule of a running branch at its next boundary; it goes on as if nothing had happened.

        Raises UnknownBranch, CapsulesFull, Unavailable.
        """
        ...

    async def inject(
        self, request: RequestId, branch: int, tokens: Tokens, scope: Scope, *, replaces: bool
    ) -> int:
        """Have a running branch go on after `tokens`; returns the tokens of its answer before them.

        Once they are in its text. `replaces`: those that wait are dropped. Raises UnknownBranch,
        InvalidParameter, QueueFull, Superseded.
        """
        ...

    def runs(self, request: RequestId, scope: Scope) -> bool:
        """Whether a request of that scope runs at this gateway."""
        ...

    def open_branches(self, request: RequestId, scope: Scope) -> list[OpenBranch]:
        """The branches of a request of this gateway that have not ended."""
        ...

    def prune(
        self, request: RequestId, branches: Collection[int] | None, scope: Scope
    ) -> list[int]:
        """Cancel branches of a request, or all; returns those that ran. Raises UnknownRequest."""
        ...

    def prune_below(
        self, capsule: CapsuleId, origins: Iterable[CapsuleId | RequestId], scope: Scope
    ) -> Subtree:
        """Cancel what of the subtree of `capsule` began here below `origins`, which belong to it.

        Those are capsules, and requests for the capsules that they left. Raises UnknownCapsule for a
        capsule of another scope; origins of another one have nothing below them.
        """
        ...

    def prioritize(
        self, request: RequestId, branches: Collection[int] | None, priority: float, scope: Scope
    ) -> list[int]:
        """Change the priority of branches, or all, from their workers' next step on.

        Returns those that are not over. Raises UnknownRequest.
        """
        ...

    async def rewind(self, capsule: CapsuleId, to: int, ttl_s: float, scope: Scope) -> CapsuleInfo:
        """A capsule of the first `to` tokens of another. Raises as `capsule`; also CapsulesFull."""
        ...

    async def pin(self, capsule: CapsuleId, ttl_s: float | None, scope: Scope) -> CapsuleInfo:
        """Keep a capsule until deleted or unused for `ttl_s` (0: no limit); None: no more."""
        ...

    async def demote(self, capsule: CapsuleId, tier: int, scope: Scope) -> CapsuleInfo:
        """Move a capsule to host memory (1) or disk (2); returns once it is there, on disk once durable.

        Raises as `capsule`; also InvalidParameter, TierFull, StorageError, Unavailable.
        """
        ...

    async def promote(self, capsule: CapsuleId, share: Share, scope: Scope) -> CapsuleInfo:
        """Bring a capsule back to the device; returns once it is there. Raises as `demote`."""
        ...

    async def export(self, capsule: CapsuleId, scope: Scope) -> Export:
        """A capsule as the bytes of a file; must be closed.

        Raises as `capsule`; also CapsuleStale, InvalidParameter: its worker lends no KV; Unavailable.
        """
        ...

    @property
    def max_import_nbytes(self) -> int:
        """Bytes of an imported file, at most; 0: nothing is imported here."""
        ...

    async def begin_import(self) -> Import:
        """Take in a capsule; must be closed. Raises InvalidParameter, Unavailable, StorageError."""
        ...

    async def release_capsule(self, capsule: CapsuleId, scope: Scope) -> None:
        """Raises as `capsule`."""
        ...

    async def read_record(self, session: str, scope: Scope) -> bytes:
        """The record of a session of `scope`. Raises NotFound, InvalidParameter: nothing is recorded here."""
        ...

    async def delete_record(self, session: str, scope: Scope) -> None:
        """Raises as `read_record`."""
        ...

    @property
    def records(self) -> SharedRecords:
        """Records that gateways keep in memory, for all of them."""
        ...

    @property
    def sessions(self) -> GatewaySessions:
        """The sessions of clients, as trees of their capsules."""
        ...

    def is_kept(self, capsule: CapsuleId) -> bool:
        """Whether a worker holds it, as far as is known here."""
        ...

    def decisions(self, request: RequestId | None, limit: int, candidates: int) -> dict[str, Any]:
        """The body of `GET /v1/router/explain`: see `gateway.explain`. Raises NotFound."""
        ...

    def life(self, request: RequestId, scope: Scope, *, names_workers: bool) -> dict[str, Any]:
        """The course of a request of `scope`: `RequestLife.record`. Raises UnknownRequest."""
        ...

    async def workers(self) -> dict[str, Any]:
        """The body of `GET /v1/router/workers`."""
        ...

    async def drain_worker(self, worker: WorkerId) -> None:
        """Have a worker take nothing new and leave. Raises NotFound, Unavailable."""
        ...

    async def change_weights(
        self, label: str, *, path: str | None, drain_s: float, wait_s: float
    ) -> dict[str, Any]:
        """Have every worker serve a new version of the weights: `FleetWeights.change`."""
        ...

    def weights(self) -> dict[str, Any]:
        """The versions that workers serve; JSON-able."""
        ...

    def health(self) -> dict[str, Any]:
        """`status` ok | degraded | unavailable, workers, broker state; JSON-able."""
        ...

    def metrics_targets(self) -> list[dict[str, Any]]:
        """The body of `GET /v1/router/metrics-targets`: `gateway.explain`."""
        ...

    def metrics(self, accept: str = "") -> bytes:
        """Prometheus's exposition for the header `accept`."""
        ...
