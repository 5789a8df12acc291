"""Jobs as workers are told of them, and what they weigh."""

from mallee.actors.service import ForkJob, GenerateJob, Job, PrefillJob
from mallee.protocol.ids import RequestId
from mallee.protocol.messages import Command, Fork, Generate, Prefill, pack_tokens
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


def command(request: RequestId, job: Job) -> Command:
    """What a worker is told of the job."""
    match job:
        case PrefillJob():
            return Prefill(request, pack_tokens(job.tokens), job.salt, job.ttl_s)
        case GenerateJob():
            return Generate(
                request, pack_tokens(job.tokens), job.limits, job.sampling, job.n, job.salt
            )
        case ForkJob():
            suffixes = tuple(pack_tokens(suffix) for suffix in job.suffixes)
            return Fork(request, job.capsule, suffixes, job.limits, job.sampling)
