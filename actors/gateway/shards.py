"""Jobs that run as several parts on several workers, and their one answer.

Part k of a job is a request of its own (`part_requests`), with its own booking and its own worker. Its
branches draw as they would in the undivided job: they are numbered from `rows.start` on.
"""

from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from mallee.actors.gateway.answers import CancelBranch, RunningAnswer, SplitAnswer
from mallee.actors.gateway.jobs import Job
from mallee.actors.gateway.service import BranchStream
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, RequestId
from mallee.router.config import RouterConfig
from mallee.router.placement.fanout_pricing import Prices
from mallee.router.placement.fanouts import Part
from mallee.router.router import Router

MAX_PARTS: Final = 64

_WHOLE: Final = Prices(0.0, 0.0, 0.0)


def route_job(
    router: Router,
    request: RequestId,
    job: Job,
    hashes: Hashes,
    *,
    may_wait: bool,
    recomputable: Container[CapsuleId],
) -> list[tuple[RequestId, Part]]:
    """The job's parts, each booked under a name of its own; one if it wasn't split.

    A fork may leave its capsule's worker if the capsule is `recomputable`. Raises as `Router.route`,
    with nothing booked.
    """
    if job.capsule is None and job.num_branches == 1:
        placement = router.route(
            request,
            hashes,
            prompt_tokens=job.prompt_tokens,
            max_tokens=job.max_tokens,
            may_wait=may_wait,
        )
        return [(request, Part(placement, range(1), "stay", _WHOLE))]
    prompt_tokens = job.prompt_tokens
    if job.capsule is not None:
        prompt_tokens = router.capsule(job.capsule).boundary
    names = part_requests(request, job.num_branches)
    parts = router.route_fanout(
        names,
        hashes,
        prompt_tokens=prompt_tokens,
        max_tokens=job.max_tokens,
        suffix_tokens=job.suffix_lengths,
        capsule=job.capsule,
        can_recompute=job.can_leave(recomputable),
        may_wait=may_wait,
    )
    return list(zip(names, parts, strict=False))


def part_requests(request: RequestId, rows: int) -> list[RequestId]:
    """Names for the parts that a job of so many rows can have; the first is its own."""
    return [request, *(RequestId(f"{request}-{k}") for k in range(1, min(rows, MAX_PARTS)))]


def cost_tokens(job: Job, config: RouterConfig, overlap_blocks: int) -> float:
    """Tokens to compute where `overlap_blocks` of its prompt are and, as expected, to generate."""
    generated = job.num_branches * config.cost.steps(job.max_tokens)
    return job.uncached_tokens(overlap_blocks * config.block_size) + generated


class Shard(NamedTuple):
    """A part, the job that it is alone, and its own answer."""

    part: Part
    job: Job
    answer: RunningAnswer


def answer_of(
    request: RequestId,
    job: Job,
    parts: Sequence[tuple[RequestId, Part]],
    cancel_branch: CancelBranch,
) -> tuple[BranchStream, list[Shard]]:
    """The job's one answer, and for each part of it the answer that is fed with its updates."""
    (_, first), *others = parts
    home = first.placement.worker
    if not others:
        answer = RunningAnswer(request, home, len(first.rows), cancel_branch=cancel_branch)
        return answer, [Shard(first, job, answer)]
    whole = SplitAnswer(request, home)
    return whole, [
        Shard(
            part,
            job.part(part.rows),
            whole.add(part.rows, name, part.placement.worker, cancel_branch),
        )
        for name, part in parts
    ]
