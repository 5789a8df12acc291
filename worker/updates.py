"""Collects a step's branch updates into one frame per gateway."""

import logging
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol, TypeAlias

from mallee.protocol.errors import MalleeError
from mallee.protocol.messages import (
    ALL_BRANCHES,
    CapsuleReply,
    EndToken,
    FinishReason,
    Frame,
    Generate,
    Kept,
    Retained,
    TokenLogprobs,
    Update,
)
from mallee.worker.kv.text import Text
from mallee.worker.sched.branch import Branch
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.scheduler import SchedulerStats


class End(NamedTuple):
    """The end of a branch, or of a member of it, `branch`, as its gateway is told."""

    branch: int
    finish: FinishReason
    capsule: str | None  # that it leaves
    boundary: int
    error: MalleeError | None
    kept: Kept
    retained: Retained | None
    token: EndToken | None = None


class UpdateSink(Protocol):
    """Takes updates of branches; hands each gateway its own."""

    reports_progress: bool
    """Whether it wants tokens of branches that drew before and go on."""

    def __len__(self) -> int:
        """0 if nothing waits for any gateway."""
        ...

    def emit(
        self,
        branch: Branch,
        tokens: Text | tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        end: End | None = None,
        injected: str = "",
    ) -> None:
        """One update of `branch`, which goes on without an `end`, for the gateway that asked for it."""
        ...

    def refuse(self, gateway: str, request: str, error: MalleeError) -> None:
        """`request` never began."""
        ...

    def reply(self, gateway: str, reply: CapsuleReply) -> None:
        """The answer to a command about a capsule."""
        ...

    def drop(self, gateway: str) -> None:
        """The gateway is gone: forget its updates."""
        ...

    def drain(self, step: int) -> dict[str, Frame]:
        """Frames of everything since the last drain."""
        ...


class FrameSink:
    """Collects updates; `drain` hands them over as one frame a gateway and starts afresh."""

    __slots__ = ("_replies", "_updates", "reports_progress")

    def __init__(self) -> None:
        self.reports_progress = True
        self._updates: dict[str, list[Update]] = {}
        self._replies: dict[str, list[CapsuleReply]] = {}  # few

    def __len__(self) -> int:
        return len(self._updates) + len(self._replies)

    def emit(
        self,
        branch: Branch,
        tokens: Text | tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        end: End | None = None,
        injected: str = "",
    ) -> None:
        """One update of `branch`, which goes on without an `end`, for the gateway that asked for it."""
        job, position = branch.job, branch.num_output - len(tokens)
        request, ids = job.command.request, tokens if isinstance(tokens, tuple) else tuple(tokens)
        cached, computed = prompt_tokens(branch)
        drafts, answer = None, branch.answer
        if answer is not None and answer.untold_drafts is not None:
            drafts, answer.untold_drafts = answer.untold_drafts, None
        scores: tuple[TokenLogprobs, ...] = ()
        if job.scores and not position:  # the first of a branch
            scores = tuple(job.scores)
        if end is None:
            update = Update(
                request,
                branch.index,
                ids,
                cached_tokens=cached,
                prefill_tokens=computed,
                logprobs=logprobs,
                position=position,
                drafts=drafts,
                injected=injected,
                prompt_logprobs=scores,
            )
        else:
            update = Update(
                request=request,
                branch=end.branch,
                tokens=ids,
                finish=end.finish,
                cached_tokens=cached,
                prefill_tokens=computed,
                capsule=end.capsule,
                boundary=end.boundary,
                error=end.error.to_wire() if end.error is not None else None,
                logprobs=logprobs,
                position=position,
                kept=end.kept,
                retained=end.retained,
                drafts=drafts,
                end_token=end.token,
                prompt_logprobs=scores,
            )
        self._updates.setdefault(job.gateway, []).append(update)

    def refuse(self, gateway: str, request: str, error: MalleeError) -> None:
        """`request` never began."""
        self.tell(gateway, Update(request, ALL_BRANCHES, finish="error", error=error.to_wire()))

    def tell(self, gateway: str, update: Update) -> None:
        """An update that is made already."""
        self._updates.setdefault(gateway, []).append(update)

    def reply(self, gateway: str, reply: CapsuleReply) -> None:
        """The answer to a command about a capsule."""
        self._replies.setdefault(gateway, []).append(reply)

    def drop(self, gateway: str) -> None:
        """The gateway is gone: forget its updates."""
        self._updates.pop(gateway, None)
        self._replies.pop(gateway, None)

    def drain(self, step: int) -> dict[str, Frame]:
        """Everything since the last drain."""
        updates, self._updates = self._updates, {}
        frames = {gateway: Frame(step, tuple(own)) for gateway, own in updates.items()}
        if self._replies:
            replies, self._replies = self._replies, {}
            for gateway, answers in replies.items():
                frames[gateway] = Frame(step, tuple(updates.get(gateway, ())), tuple(answers))
        return frames


def prompt_tokens(branch: Branch) -> tuple[int, int]:
    """Prompt tokens found and computed, (0, 0) before the branch is admitted.

    What n branches of one prompt share was computed once: branch 0 reports it.
    """
    cached = branch.cached_tokens
    if cached is None:
        return 0, 0
    if branch.index > 0 and isinstance(branch.job.command, Generate):
        return cached, 0
    prompt_len = branch.origin_len + len(branch.tokens) - branch.num_output
    return cached, prompt_len - cached


# The engine's debug logs: what was forked, what each step does. Off unless switched on by name.
#
# They are Python loggers at level DEBUG: while one is off nothing is formatted and nothing is counted.

DebugLog: TypeAlias = Literal["forks", "steps"]

_forks = logging.getLogger("mallee.engine.forks")
_steps = logging.getLogger("mallee.engine.steps")
_LOGS: dict[DebugLog, logging.Logger] = {"forks": _forks, "steps": _steps}


for _log in _LOGS.values():
    _log.setLevel(logging.INFO)  # whatever the level of all others is


def switch_on(names: Iterable[DebugLog]) -> None:
    """These logs, and no other, are written from now on, to wherever the process logs to."""
    wanted = set(names)
    for name, log in _LOGS.items():
        log.setLevel(logging.DEBUG if name in wanted else logging.INFO)


def log_fork(request: str, num_branches: int, boundary: int, num_computed: int) -> None:
    """`request` begins that many branches after `boundary` tokens, `num_computed` of them computed."""
    _forks.debug(
        "%s: %d branches at token %d, %d of it computed",
        request,
        num_branches,
        boundary,
        num_computed,
    )


def log_step(step: int, plan: Plan, stats: SchedulerStats) -> None:
    """Log the work of a step. `stats` are those after planning."""
    _steps.debug(
        "step %d: %d decode, %d chunks of %d tokens, %d draw only, %d copies, %d failed;"
        " %d run, %d wait, %d preempted so far",
        step,
        len(plan.decodes),
        len(plan.chunks),
        sum(len(chunk.tokens) for chunk in plan.chunks),
        len(plan.ready),
        len(plan.copies),
        len(plan.failed),
        stats.running,
        stats.waiting,
        stats.num_preemptions,
    )


def is_on(name: DebugLog) -> bool:
    """Whether that log is written."""
    return _LOGS[name].isEnabledFor(logging.DEBUG)
