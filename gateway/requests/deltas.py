"""New tokens of a request's branches, and the queue in which they wait for the client's side.

Everything here is tokens; text (templates, tokenizing, stop strings) belongs to the HTTP side.
"""

import asyncio
from collections import deque
from typing import Final, NamedTuple, Self

from mallee.protocol.errors import MalleeError, SlowReader
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.protocol.messages import EndToken, FinishReason, Kept, Retained, TokenLogprobs
from mallee.protocol.model import BASE_WEIGHTS
from mallee.router.dispatch.verdicts import Verdict


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
    end_token: EndToken | None = None
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # in the first of a branch, if they were requested
    resampled: bool = False  # it went on elsewhere by other draws than an undisturbed answer's

    @classmethod
    def end(cls, branch: int, finish: FinishReason | None) -> "Delta":
        """Nothing more of a branch, and the reason."""
        return cls(
            branch=branch,
            tokens=(),
            finish=finish,
            cached_tokens=0,
            prefill_tokens=0,
            capsule=None,
            boundary=0,
            error=None,
        )

    def first(self, num: int, before: int) -> "Delta":
        """Its first `num` tokens alone; its answer has `before` in front of them."""
        left = [(at, min(n, before + num - at)) for at, n in self.injected if at < before + num]
        tokens, logprobs = self.tokens[:num], self.logprobs[:num]
        return self._replace(tokens=tokens, logprobs=logprobs, injected=tuple(left))

    def with_end(self) -> "Delta":
        """With the token that ended it among its own, if one did."""
        if self.end_token is None:
            return self
        token, report = self.end_token
        logprobs = self.logprobs if report is None else (*self.logprobs, report)
        return self._replace(tokens=(*self.tokens, token), logprobs=logprobs, end_token=None)


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
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return self._error is None

    def end(self) -> None:
        """Nothing follows what waits."""
        self._is_over = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def take(self) -> Delta | None:
        """Take what waits of one branch; None if nothing does."""
        if not self._branches:
            return None
        self._unread_since = None
        branch = self._branches.popleft()
        deltas = self._waiting.pop(branch)
        if len(deltas) == 1:
            self._size = self._size - _size(deltas[0]) if self._branches else 0
            return deltas[0]
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
        return _merged(deltas)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Take what waits of one branch, once something does. Raises SlowReader."""
        while (delta := self.take()) is None:
            if self._error is not None:
                raise self._error
            if self._is_over:
                raise StopAsyncIteration
            assert self._reader is None, "a queue has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return delta


def _size(delta: Delta) -> int:
    num = len(delta.tokens)
    return num + sum(1 + len(top) for _, top in delta.logprobs) if delta.logprobs else num


def _merged(deltas: list[Delta]) -> Delta:
    """All of one branch: the last says how far it is and how it ended."""
    cached = prefill = drafted = accepted = 0
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    injected: list[tuple[int, int]] = []
    has_drafts = False
    for delta in deltas:
        tokens += delta.tokens
        logprobs += delta.logprobs
        injected += delta.injected
        cached = max(cached, delta.cached_tokens)
        prefill = max(prefill, delta.prefill_tokens)
        if delta.drafts is not None:
            has_drafts = True
            drafted += delta.drafts[0]
            accepted += delta.drafts[1]
    return deltas[-1]._replace(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        cached_tokens=cached,
        prefill_tokens=prefill,
        drafts=(drafted, accepted) if has_drafts else None,
        injected=tuple(injected),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
