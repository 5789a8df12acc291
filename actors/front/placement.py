"""Drives our router for a proxy: picks endpoints for prompts, and keeps the bookings true."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from mallee.actors.front.prompts import Prompt
from mallee.protocol.errors import KVMemoryExceeded, MalleeError, NoWorker, Saturated
from mallee.protocol.ids import RequestId, WorkerId
from mallee.router.placement.placer import Placement as Placed
from mallee.router.router import Router

RETRY_AFTER_S: Final = 1


class Picked(NamedTuple):
    """The endpoints of a request, best first; the others are for retries."""

    endpoints: tuple[str, ...]
    overlap_blocks: int  # of its prompt, on the first one
    reason: str


class Refusal(NamedTuple):
    """The client is answered without an endpoint."""

    status: int
    code: str  # for programs, as in OpenAI's errors
    message: str
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: MalleeError) -> "Refusal":
        """As a service refuses by this error."""
        after_s = math.ceil(error.retry_after_s or RETRY_AFTER_S)
        is_later = error.status in (429, 503)
        message = error.client_message
        return cls(error.status, error.code, message, after_s if is_later else None)

    @property
    def body(self) -> bytes:
        """As OpenAI's errors are written."""
        kind = "unavailable" if self.status > 429 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


class Placement:
    """Endpoints for requests, by one router.

    `objectives`: priorities by name; a request of one below 0 may be refused, others only without any pod.
    """

    def __init__(
        self,
        router: Router,
        *,
        block_size: int,
        default_max_tokens: int,
        fallbacks: int,
        objectives: dict[str, int],
    ) -> None:
        self._router = router
        self._block_size = block_size
        self._default_max_tokens = default_max_tokens
        self._fallbacks = fallbacks
        self._objectives = objectives

    def pick(
        self, request: RequestId, prompt: Prompt, subset: Sequence[str] | None
    ) -> Picked | Refusal:
        """Endpoints for `request`, which is booked on the first of them until `free`."""
        among = None if subset is None else [WorkerId(address) for address in subset]
        may_shed = self._objectives.get(prompt.objective, 0) < 0
        try:
            return self._route(request, prompt, among, may_shed=may_shed)
        except Saturated:
            message = f"every endpoint is busy, and objective {prompt.objective} can be dropped"
            return Refusal(429, "saturated", message, RETRY_AFTER_S)
        except NoWorker:
            which = "" if subset is None else f" of the {len(subset)} that the proxy allows"
            message = f"no endpoint{which} is ready"
            return Refusal(503, "no_endpoint", message, RETRY_AFTER_S)

    def served(self, request: RequestId, prompt: Prompt, endpoint: str) -> None:
        """The proxy went elsewhere; the booking follows it. To an unknown one it does not."""
        self._router.free(request)
        if self._router.worker(WorkerId(endpoint)) is not None:
            self.pick(request, prompt._replace(objective=""), [endpoint])

    def first_token(self, request: RequestId) -> None:
        """The prompt is computed."""
        self._router.first_token(request)

    def free(self, request: RequestId) -> None:
        """End the booking, if there is one."""
        self._router.free(request)

    def observe_hit(self, request: RequestId, cached_tokens: int) -> None:
        """Compare what was known of the endpoint with what it had."""
        self._router.observe_hit(request, cached_tokens)

    def _route(
        self,
        request: RequestId,
        prompt: Prompt,
        among: Sequence[WorkerId] | None,
        *,
        may_shed: bool,
    ) -> Picked:
        """Raises NoWorker, Saturated."""
        hashes, num_tokens = prompt.hashes, prompt.num_tokens
        max_tokens = prompt.max_tokens or self._default_max_tokens
        while True:
            try:
                placement = self._router.route(
                    request,
                    hashes,
                    prompt_tokens=num_tokens,
                    max_tokens=max_tokens,
                    may_wait=may_shed,
                    affinity=prompt.affinity,
                    among=among,
                )
                break
            except KVMemoryExceeded as error:
                # Its pod knows better how long it may get, and what to answer if that is too long.
                room = int(error.fields["largest"]) * self._block_size
                num_tokens = max(0, min(num_tokens, room - 1))
                hashes = hashes[: num_tokens // self._block_size]
                max_tokens = max(1, min(max_tokens, room - num_tokens))
        return Picked(
            (placement.address, *self._next_best(placement.address)),
            placement.overlap_blocks,
            _reason(placement, len(hashes)),
        )

    def _next_best(self, first: str) -> list[str]:
        """The cheapest of the other endpoints that the last decision could have chosen."""
        if not self._fallbacks:
            return []
        decision = self._router.decisions(1, candidates=self._fallbacks + 1)[0]
        others = [c for c in decision.candidates if c.worker != first and c.total < float("inf")]
        return [str(candidate.worker) for candidate in others[: self._fallbacks]]


def _reason(placed: Placed, num_blocks: int) -> str:
    """The ground of a decision in a word or two, for a header of the answer."""
    if placed.overlap_blocks:
        return f"prefix {min(1.0, placed.overlap_blocks / max(1, num_blocks)):.2f}"
    if placed.reason != "cost":
        return placed.reason
    return "affinity" if placed.is_home else "load"
