"""The running answers of a gateway: updates from workers become deltas for their readers."""

import logging
from collections.abc import Callable
from typing import Self, TypeAlias

from mallee.actors.gateway.service import Delta, DeltaQueue
from mallee.protocol.errors import MalleeError, from_wire
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.protocol.messages import ALL_BRANCHES, Update

log = logging.getLogger(__name__)

CancelBranch: TypeAlias = Callable[[RequestId, int | None, int], None]


class _Answer:
    """The reader's side of a running answer."""

    def __init__(self, request: RequestId, worker: WorkerId) -> None:
        self.request = request
        self.worker = worker  # of branch 0
        self._deltas = DeltaQueue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        delta = await self._deltas.get()
        if delta is None:
            raise StopAsyncIteration
        return delta

    def take(self) -> Delta | None:
        """The next delta if one waits."""
        return self._deltas.take()

    def give_up(self) -> None:
        """Cancel every branch still running."""
        raise NotImplementedError

    async def aclose(self) -> None:
        self.give_up()

    def _to_reader(self, delta: Delta | None) -> None:
        if delta is None:
            self._deltas.end()
        elif not self._deltas.put(delta):
            log.warning("%s: its client does not read, it is given up", self.request)
            self.give_up()


class RunningAnswer(_Answer):
    """One job's branches on one worker; a `BranchStream`. Belongs to one event loop.

    Every branch gets exactly one delta with `finish`, however it ends; then the iteration ends.
    `cancel_branch(request, branch | None, n)` is called when the reader gives up `branch`, or all n
    that are still open. With `sink`, deltas and the end (None) go there instead of to an iteration.
    """

    def __init__(
        self,
        request: RequestId,
        worker: WorkerId,
        num_branches: int,
        *,
        cancel_branch: CancelBranch,
        sink: Callable[[Delta | None], None] | None = None,
    ) -> None:
        super().__init__(request, worker)
        self._open = set(range(num_branches))
        self._cancel_branch = cancel_branch
        self._put = sink or self._to_reader
        if not num_branches:
            self._put(None)

    @property
    def open_branches(self) -> frozenset[int]:
        return frozenset(self._open)

    @property
    def is_over(self) -> bool:
        """Whether every branch has ended."""
        return not self._open

    def feed(self, update: Update) -> list[Delta]:
        """Queue the update for the reader; returns the deltas of branches still open."""
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
        if branch in self._open:
            self._close_branch(branch)
            self._cancel_branch(self.request, branch, 1)

    def give_up(self) -> None:
        if self._open:
            given_up = sorted(self._open)
            for branch in given_up:
                self._close_branch(branch)
            self._cancel_branch(self.request, None, len(given_up))

    def _push(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._put(delta)
            if delta.finish is not None:
                self._close_branch(delta.branch)

    def _close_branch(self, branch: int) -> None:
        self._open.discard(branch)
        if not self._open:
            self._put(None)


class SplitAnswer(_Answer):
    """One job's branches on several workers; a `BranchStream`. Belongs to one event loop.

    The parts belong to workers of their own and end on their own; a branch has here the number that
    it has in the job.
    """

    def __init__(self, request: RequestId, worker: WorkerId) -> None:
        super().__init__(request, worker)
        self._parts: list[tuple[range, RunningAnswer]] = []
        self._num_running = 0

    def add(
        self,
        rows: range,
        request: RequestId,
        worker: WorkerId,
        cancel_branch: CancelBranch,
    ) -> RunningAnswer:
        """The part that answers `rows`, to be fed with the updates of `request` on `worker`.

        All parts are added before the first is fed.
        """

        def take(delta: Delta | None) -> None:
            if delta is not None:
                branch = rows.start + delta.branch
                self._to_reader(delta._replace(branch=branch, worker=worker))
                return
            self._num_running -= 1
            if not self._num_running:
                self._to_reader(None)

        self._num_running += 1
        part = RunningAnswer(request, worker, len(rows), cancel_branch=cancel_branch, sink=take)
        self._parts.append((rows, part))
        return part

    def cancel(self, branch: int) -> None:
        for rows, part in self._parts:
            if branch in rows:
                part.cancel(branch - rows.start)

    def give_up(self) -> None:
        for _, part in self._parts:
            part.give_up()
