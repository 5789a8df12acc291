"""The running answers of a gateway: updates from workers become deltas for their readers."""

import asyncio
from collections.abc import AsyncIterator, Callable

from mallee.actors.service import Delta
from mallee.protocol.errors import MalleeError, from_wire
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import ALL_BRANCHES, Update


class RunningAnswer:
    """One job's branches on one worker; a `BranchStream`. Belongs to one event loop.

    Every branch gets exactly one delta with `finish`, however it ends; then the iteration ends.
    `cancel_branch(request, branch | None, n)` is called when the reader gives up `branch`, or all n
    that are still open. With `sink`, deltas and the end (None) go there instead of to an iteration.
    """

    def __init__(
        self,
        request: RequestId,
        worker: WorkerId,
        branches: int,
        *,
        cancel_branch: Callable[[RequestId, int | None, int], None],
        sink: Callable[[Delta | None], None] | None = None,
    ) -> None:
        self._request = request
        self._worker = worker
        self._open = set(range(branches))
        self._cancel_branch = cancel_branch
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._put = sink or self._deltas.put_nowait
        if not branches:
            self._put(None)

    @property
    def request(self) -> RequestId:
        return self._request

    @property
    def worker(self) -> WorkerId:
        return self._worker

    @property
    def open_branches(self) -> frozenset[int]:
        return frozenset(self._open)

    @property
    def is_over(self) -> bool:
        """Whether every branch has ended."""
        return not self._open

    def feed(self, update: Update) -> list[Delta]:
        """Queue what `update` says for the reader; returns the deltas of branches still open."""
        error = from_wire(update.error) if update.error is not None else None
        indices = sorted(self._open) if update.branch == ALL_BRANCHES else [update.branch]
        deltas = [
            Delta(
                index,
                update.tokens,
                update.finish,
                update.cached_tokens,
                update.prefill_tokens,
                CapsuleId(update.capsule) if update.capsule is not None else None,
                update.boundary,
                error,
                logprobs=update.logprobs,
            )
            for index in indices
            if index in self._open
        ]
        self._push(deltas)
        return deltas

    def fail(self, error: MalleeError) -> list[Delta]:
        """End every open branch with `error`."""
        deltas = [Delta(i, (), "error", 0, 0, None, 0, error) for i in sorted(self._open)]
        self._push(deltas)
        return deltas

    def cancel(self, branch: int) -> None:
        """End one branch early; no further delta of it is delivered."""
        if branch in self._open:
            self._close_branch(branch)
            self._cancel_branch(self._request, branch, 1)

    async def aclose(self) -> None:
        """Cancel every branch still running. Idempotent."""
        if self._open:
            given_up = sorted(self._open)
            for branch in given_up:
                self._close_branch(branch)
            self._cancel_branch(self._request, None, len(given_up))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (delta := await self._deltas.get()) is not None:
            yield delta

    def _push(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._put(delta)
            if delta.finish is not None:
                self._close_branch(delta.branch)

    def _close_branch(self, branch: int) -> None:
        self._open.discard(branch)
        if not self._open:
            self._put(None)
