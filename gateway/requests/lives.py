"""The lives of requests: each branch's states with their times, kept for `GET /v1/requests/{request}`."""

from collections import Counter, OrderedDict
from typing import Any, Final

from mallee.gateway.requests.deltas import Delta
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.router.dispatch.verdicts import Verdict, anthropic_reason

MAX_LIVES: Final = 1024
MAX_BRANCHES: Final = 16_384  # of all lives: a few megabytes
_MAX_PLACES: Final = 32  # of one branch that are told, the first ones


class BranchLife:
    """One branch, from its request's arrival to its end. Times are seconds since the arrival.

    waiting -> computing (placed on a worker) -> answering (first token) -> its finish reason. A branch that
    moves to another worker stays in its state; one that is refused or given up may end in any.
    """

    __slots__ = (
        *("accepted_tokens", "cached_tokens", "capsule", "drafted_tokens", "end", "end_s", "error"),
        *("first_token_s", "gap_s", "index", "last_token_s", "num_moves", "num_tokens", "placed_s"),
        *("places", "prefill_tokens", "worker"),
    )

    def __init__(self, index: int) -> None:
        self.index = index  # of its request's branches
        self.worker: WorkerId | None = None
        self.placed_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gap_s: float | None = None  # between its last tokens and those before
        self.end_s: float | None = None
        self.end: str | None = None
        self.error: str | None = None  # its code
        self.capsule: CapsuleId | None = None
        self.places: list[tuple[WorkerId, float]] = []  # where it ran, and since when
        self.drafted_tokens = self.accepted_tokens = 0
        self.cached_tokens = self.prefill_tokens = self.num_tokens = self.num_moves = 0

    @property
    def state(self) -> str:
        if self.end is not None:
            return self.end
        if self.placed_s is None:
            return "waiting"
        return "computing" if self.first_token_s is None else "answering"

    def place(self, worker: WorkerId, at_s: float, *, is_moved: bool) -> None:
        self.worker = worker
        if len(self.places) < _MAX_PLACES:
            self.places.append((worker, at_s))
        self.num_moves += is_moved
        if self.placed_s is None:
            self.placed_s = at_s

    def take(self, delta: Delta, at_s: float) -> None:
        """Take in an update of the branch."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.prefill_tokens = max(self.prefill_tokens, delta.prefill_tokens)
        if delta.tokens:
            self.num_tokens += len(delta.tokens)
            if not delta.injected:  # those were its client's
                self.gap_s = None if self.last_token_s is None else at_s - self.last_token_s
                self.last_token_s = at_s
                if self.first_token_s is None:
                    self.first_token_s = at_s
        if delta.drafts is not None:
            drafted, accepted = delta.drafts
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
        if delta.finish is not None:
            self.capsule = delta.capsule
            self.error = None if delta.error is None else delta.error.code
            self.finish(delta.finish, at_s)

    def finish(self, end: str, at_s: float) -> None:
        self.end, self.end_s = end, at_s

    @property
    def prompt(self) -> str:
        """The use of what was there: computed, extended, or found whole."""
        if not self.cached_tokens:
            return "computed"
        return "extended" if self.prefill_tokens else "found"

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        seconds = self.last_token_s - self.first_token_s
        return (self.num_tokens - 1) / seconds if seconds > 0 else None

    def states(self, prepare_s: float) -> list[dict[str, Any]]:
        """Every state that it has been in, with its begin: seconds since the request came."""
        begins = {
            "tokenizing": -prepare_s,
            "waiting": 0.0,
            "computing": self.placed_s,
            "answering": self.first_token_s,
            self.end: self.end_s,
        }
        return [
            {"state": state, "at_s": at_s + prepare_s}
            for state, at_s in begins.items()
            if state is not None and at_s is not None
        ]

    def record(self, prepare_s: float, *, names_workers: bool) -> dict[str, Any]:
        """The body in `GET /v1/requests/{request}`."""
        places = [
            {"worker": worker if names_workers else None, "at_s": at_s + prepare_s}
            for worker, at_s in self.places
        ]
        return {
            "state": self.state,
            "is_over": self.end is not None,
            "states": self.states(prepare_s),
            "workers": places,
            "moves": self.num_moves,
            "prompt": self.prompt if self.placed_s is not None else None,
            "cached_tokens": self.cached_tokens,
            "prefill_tokens": self.prefill_tokens,
            "output_tokens": self.num_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "tokens_per_s": self.tokens_per_s,
            "capsule": self.capsule,
            "error": self.error,
        }

    def body(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "worker": self.worker,
            "moves": self.num_moves,
            "placed_s": self.placed_s,
            "first_token_s": self.first_token_s,
            "end_s": self.end_s,
            "prompt": self.prompt,
            "cached_tokens": self.cached_tokens,
            "prefill_tokens": self.prefill_tokens,
            "output_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
        }


def verdict_body(verdict: Verdict) -> dict[str, Any]:
    """The way a prompt was served, in OpenAI's words (`prompt_cache_diagnostics`) where it has some."""
    body: dict[str, Any] = {
        "served": verdict.verb,
        "status": "cache_hit" if verdict.cached_tokens and not verdict.reason else "cache_miss",
        "reason": verdict.reason,
        "cache_missed_tokens": verdict.missed_tokens,
        "comparison_reusable_tokens": verdict.reusable_tokens,
    }
    likeness = verdict.likeness
    if likeness is not None:
        body["comparison_response_id"] = likeness.request
        body["first_difference"] = {
            "token": likeness.same_tokens,
            "message": likeness.same_messages if likeness.num_messages else None,
        }
    if verdict.changed_line:
        body["changed_line"] = verdict.changed_line
    if (reason := anthropic_reason(verdict)) is not None:
        body["cache_miss_reason"] = {"type": reason}
    return body


class RequestLife:
    """All branches of a request; `prepare_s` before its arrival its body was read and tokenized."""

    __slots__ = ("began", "branches", "prepare_s", "verdict")

    def __init__(self, num_branches: int, prepare_s: float, began: float = 0.0) -> None:
        self.began = began  # monotonic seconds
        self.branches = [BranchLife(index) for index in range(num_branches)]
        self.prepare_s = prepare_s
        self.verdict: Verdict | None = None

    @property
    def summary(self) -> str:
        """Its branches by state, their tokens, and the time to the first one, for logs."""
        states = Counter(branch.state for branch in self.branches)
        first = [b.first_token_s for b in self.branches if b.first_token_s is not None]
        counted = ", ".join(f"{num} {state}" for state, num in states.items())
        tokens = sum(branch.num_tokens for branch in self.branches)
        begun = f", the first after {min(first):.3f} s" if first else ""
        return f"{counted}; {tokens} tokens{begun}"

    def body(self) -> dict[str, Any]:
        return {
            "object": "request.life",
            "prepare_s": self.prepare_s,
            "cache": None if self.verdict is None else verdict_body(self.verdict),
            "branches": [branch.body() for branch in self.branches],
        }

    def record(self, request: RequestId, now: float, *, names_workers: bool) -> dict[str, Any]:
        """The body of `GET /v1/requests/{request}`; times are seconds since the request came."""
        ends = [branch.end for branch in self.branches]
        prepare_s = self.prepare_s
        return {
            "id": request,
            "object": "request",
            "age_s": now - self.began + prepare_s,
            "state": "running" if None in ends else "ended",
            "cache": None if self.verdict is None else verdict_body(self.verdict),
            "branches": [
                {"index": i, **branch.record(prepare_s, names_workers=names_workers)}
                for i, branch in enumerate(self.branches)
            ],
        }


class Lives:
    """The youngest lives of a gateway, by request."""

    def __init__(self, most: int = MAX_LIVES, most_branches: int = MAX_BRANCHES) -> None:
        self._most = most
        self._most_branches = most_branches
        self._num_branches = 0
        self._lives: OrderedDict[RequestId, RequestLife] = OrderedDict()

    def begin(
        self, request: RequestId, num_branches: int, prepare_s: float, began: float = 0.0
    ) -> RequestLife:
        """The life of a request that begins at `began` (monotonic seconds); the oldest make room."""
        life = self._lives[request] = RequestLife(num_branches, prepare_s, began)
        self._num_branches += num_branches
        while len(self._lives) > 1 and (
            len(self._lives) > self._most or self._num_branches > self._most_branches
        ):
            _, oldest = self._lives.popitem(last=False)
            self._num_branches -= len(oldest.branches)
        return life

    def get(self, request: RequestId) -> RequestLife | None:
        return self._lives.get(request)
