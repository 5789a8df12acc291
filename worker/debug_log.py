"""The engine's debug logs: what was forked, what each step does. Off unless switched on by name.

They are Python loggers at level DEBUG: while one is off nothing is formatted and nothing is counted.
"""

import logging
from collections.abc import Iterable
from typing import Literal, TypeAlias

from mallee.worker.sched.plan import Plan
from mallee.worker.sched.scheduler import SchedulerStats

DebugLog: TypeAlias = Literal["forks", "steps"]

_forks = logging.getLogger("mallee.engine.forks")
_steps = logging.getLogger("mallee.engine.steps")
_LOGS: dict[DebugLog, logging.Logger] = {"forks": _forks, "steps": _steps}


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
    """What a step is about to do. `stats` as they are after planning."""
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
    """Whether anybody reads that log."""
    return _LOGS[name].isEnabledFor(logging.DEBUG)
