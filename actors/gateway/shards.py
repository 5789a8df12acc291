"""Jobs that run as several parts on several workers, and their one answer.

Part k of a job is a request of its own (`part_requests`), with its own booking and its own worker. Its
branches draw what they would draw in the undivided job: they are numbered from `rows.start` on.
"""

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from mallee.actors.gateway.answers import CancelBranch, RunningAnswer, SplitAnswer
from mallee.actors.gateway.service import BranchStream, ForkJob, GenerateJob, Job, PrefillJob, Terms
from mallee.actors.gateway.token_memory import Known
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import Command, Fork, Generate, Prefill, Share, Update, pack_tokens
from mallee.router.config import RouterConfig
from mallee.router.placement.fanouts import Part
from mallee.router.placement.pricing import Prices
from mallee.router.router import Router

MAX_PARTS: Final = 64
RECOMPUTED_TTL_S: Final = 60.0  # of a capsule that is computed to be forked once

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
    if isinstance(job, PrefillJob) or (isinstance(job, GenerateJob) and job.n == 1):
        placement = router.route(
            request,
            hashes,
            prompt_tokens=len(job.tokens),
            max_tokens=0 if isinstance(job, PrefillJob) else job.limits.max_tokens,
            may_wait=may_wait,
        )
        return [(request, Part(placement, range(1), "stay", _WHOLE))]
    if isinstance(job, ForkJob):
        capsule, suffixes = job.capsule, [len(suffix) for suffix in job.suffixes]
        prompt_tokens = router.capsule(capsule).boundary
        # Where a text is in its grammar, only the capsule knows.
        inherits = job.grammar is not None and job.grammar.kind == "inherit"
        can_recompute = not inherits and capsule in recomputable
    else:
        capsule, suffixes, prompt_tokens, can_recompute = None, [0] * job.n, len(job.tokens), True
    names = part_requests(request, len(suffixes))
    parts = router.route_fanout(
        names,
        hashes,
        prompt_tokens=prompt_tokens,
        max_tokens=job.limits.max_tokens,
        suffix_tokens=suffixes,
        capsule=capsule,
        can_recompute=can_recompute,
        may_wait=may_wait,
    )
    return list(zip(names, parts, strict=False))


def part_requests(request: RequestId, rows: int) -> list[RequestId]:
    """Names for the parts that a job of so many rows can have; the first is its own."""
    return [request, *(RequestId(f"{request}-{k}") for k in range(1, min(rows, MAX_PARTS)))]


def part_of(job: Job, rows: range) -> Job:
    """The job of these rows alone."""
    match job:
        case ForkJob():
            return replace(job, suffixes=[job.suffixes[row] for row in rows])
        case GenerateJob():
            return replace(job, n=len(rows))
    return job


def part_command(request: RequestId, job: Job, first_branch: int) -> Command:
    """What a worker is told of a part, whose branches are numbered from `first_branch` on."""
    told = command(request, job)
    if first_branch and isinstance(told, Fork | Generate):
        return msgspec.structs.replace(told, first_branch=first_branch)
    return told


class Recompute(NamedTuple):
    """A capsule that a worker computes anew, to be forked there once it is done and then released."""

    prefill: Prefill
    job: ForkJob  # forks the new capsule

    @property
    def request(self) -> RequestId:
        return RequestId(self.prefill.request)

    @staticmethod
    def counted(update: Update, recomputed: tuple[int, int]) -> Update:
        """`update` of the fork, with tokens (cached, computed) for it before on its first branch."""
        if update.branch:
            return update
        cached, computed = recomputed
        return msgspec.structs.replace(
            update, cached_tokens=cached, prefill_tokens=update.prefill_tokens + computed
        )

    @classmethod
    def of(cls, part: RequestId, job: ForkJob, known: Known) -> "Recompute":
        """To run `job`, a part, on a worker that doesn't have its capsule.

        `known` is what the job continues: the capsule's text up to `job.at`.
        """
        request = RequestId(f"{part}-r")
        # The fork follows at once; if this gateway is gone by then, nobody would release it.
        prefill = Prefill(
            request, pack_tokens(known.tokens), known.salt, RECOMPUTED_TTL_S, share(job.terms)
        )
        return cls(prefill, replace(job, capsule=capsule_id(request), at=None))


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
    """The job's one answer, and what each part of it is to be fed to."""
    (_, first), *others = parts
    home = first.placement.worker
    if not others:
        answer = RunningAnswer(request, home, len(first.rows), cancel_branch=cancel_branch)
        return answer, [Shard(first, job, answer)]
    whole = SplitAnswer(request, home)
    return whole, [
        Shard(
            part,
            part_of(job, part.rows),
            whole.add(part.rows, name, part.placement.worker, cancel_branch),
        )
        for name, part in parts
    ]


# Jobs as workers are told of them, and what they weigh.


def num_branches(job: Job) -> int:
    """Branches that answer the job."""
    if isinstance(job, ForkJob):
        return len(job.suffixes)
    return job.n if isinstance(job, GenerateJob) else 1


def cost_tokens(job: Job, config: RouterConfig, overlap_blocks: int) -> float:
    """Tokens to compute where `overlap_blocks` of its prompt are and, as expected, to generate."""
    if isinstance(job, ForkJob):
        prefill = sum(len(suffix) for suffix in job.suffixes)
    else:
        prefill = max(1, len(job.tokens) - overlap_blocks * config.block_size)
    if isinstance(job, PrefillJob):
        return prefill
    return prefill + num_branches(job) * config.cost.steps(job.limits.max_tokens)


def share(terms: Terms) -> Share:
    """Whose the job is on its worker: sessions of different tenants are never one."""
    session = ""
    if terms.tenant or terms.session:
        session = (
            f"{len(terms.tenant)}:{terms.tenant}{terms.session}"  # no two pairs write the same
        )
    return Share(session, terms.weight, float(terms.priority))


def command(request: RequestId, job: Job) -> Command:
    """What a worker is told of the job."""
    whose = share(job.terms)
    match job:
        case PrefillJob():
            return Prefill(request, pack_tokens(job.tokens), job.salt, job.ttl_s, whose)
        case GenerateJob():
            return Generate(
                request,
                pack_tokens(job.tokens),
                job.limits,
                job.sampling,
                job.n,
                job.salt,
                share=whose,
                grammar=job.grammar,
            )
        case ForkJob():
            return Fork(
                request,
                job.capsule,
                tuple(pack_tokens(suffix) for suffix in job.suffixes),
                job.limits,
                job.sampling,
                share=whose,
                grammar=job.grammar,
                at=job.at,
            )
