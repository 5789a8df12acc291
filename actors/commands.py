"""Jobs as workers are told of them, and what they weigh."""

from mallee.actors.service import ForkJob, GenerateJob, Job, PrefillJob, Terms
from mallee.protocol.ids import RequestId
from mallee.protocol.messages import Command, Fork, Generate, Prefill, Share, pack_tokens
from mallee.router.records import RouterConfig


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
