"""Updates of branches with their tokens counted: all that a replay reads."""

from typing import Any, NamedTuple, TypeAlias

from mallee.protocol.errors import MalleeError
from mallee.protocol.messages import (
    ALL_BRANCHES,
    CapsuleReply,
    FinishReason,
    Frame,
    TokenLogprobs,
    Update,
)
from mallee.worker.kv.text import Text
from mallee.worker.sched.branch import Branch
from mallee.worker.updates import End, prompt_tokens

WireError: TypeAlias = tuple[str, str, dict[str, Any]]


class CountedUpdate(NamedTuple):
    """An update of one branch, as `protocol.messages.Update`, with its tokens counted."""

    request: str
    branch: int
    num_tokens: int
    finish: FinishReason | None
    cached_tokens: int
    prefill_tokens: int
    capsule: str | None
    boundary: int
    error: WireError | None

    @property
    def position(self) -> int:
        """Not told: in a replay nothing is lost or told twice."""
        return -1

    @property
    def injected(self) -> str:
        """Nothing is: a replay has no other text."""
        return ""


def counted(update: Update) -> CountedUpdate:
    """`update` as counts."""
    return CountedUpdate(
        request=update.request,
        branch=update.branch,
        num_tokens=len(update.tokens),
        finish=update.finish,
        cached_tokens=update.cached_tokens,
        prefill_tokens=update.prefill_tokens,
        capsule=update.capsule,
        boundary=update.boundary,
        error=update.error,
    )


class CountedSink:
    """A `worker.updates.UpdateSink` that keeps no tokens, and no progress unless it `reports_progress`."""

    __slots__ = ("_unsent", "in_flight", "reports_progress")

    def __init__(self, reports_progress: bool) -> None:
        self.reports_progress = reports_progress
        self._unsent: list[CountedUpdate] = []
        self.in_flight: dict[Branch, int] = {}  # tokens drawn since `begin`, but for first ones

    def begin(self) -> None:
        """Begin another step."""
        if self.in_flight:
            self.in_flight = {}

    def __len__(self) -> int:
        return len(self._unsent)

    def emit(
        self,
        branch: Branch,
        tokens: Text | tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        end: End | None = None,
        injected: str = "",
    ) -> None:
        num_tokens = len(tokens)
        if not self.reports_progress and branch.num_output > num_tokens:  # its first was reported
            self.in_flight[branch] = num_tokens
            if end is None:
                return
            num_tokens = branch.num_output - 1
        cached, computed = prompt_tokens(branch)
        self._unsent.append(
            CountedUpdate(
                request=branch.job.command.request,
                branch=branch.index if end is None else end.branch,
                num_tokens=num_tokens,
                finish=None if end is None else end.finish,
                cached_tokens=cached,
                prefill_tokens=computed,
                capsule=None if end is None else end.capsule,
                boundary=0 if end is None else end.boundary,
                error=end.error.to_wire() if end is not None and end.error is not None else None,
            )
        )

    def refuse(self, gateway: str, request: str, error: MalleeError) -> None:
        update = CountedUpdate(
            request=request,
            branch=ALL_BRANCHES,
            num_tokens=0,
            finish="error",
            cached_tokens=0,
            prefill_tokens=0,
            capsule=None,
            boundary=0,
            error=error.to_wire(),
        )
        self._unsent.append(update)

    def reply(self, gateway: str, reply: CapsuleReply) -> None:
        """Drop it: a replay asks nothing about capsules."""

    def drop(self, gateway: str) -> None:
        """Keep the updates: a driver of several gateways drops its own."""

    def drain(self, step: int) -> dict[str, Frame]:
        """No frames: `take` has the updates."""
        return {}

    def take(self) -> list[CountedUpdate]:
        """Everything since the last time."""
        updates, self._unsent = self._unsent, []
        return updates
