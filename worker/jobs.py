"""Requests as the engine sees them: a job and its live branches."""

from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import ALL_BRANCHES, Fork, Generate, Limits, Prefill, Sampling
from mallee.worker.sched.sequence import Sequence

WHOLE = ALL_BRANCHES
"""Index of the one branch that computes a prompt for all n branches of a job."""


class Job:
    """A request on this worker: its command and its live branches by index."""

    __slots__ = ("branches", "cancelled", "command", "gateway")

    def __init__(self, command: Prefill | Generate | Fork, gateway: str) -> None:
        self.command = command
        self.gateway = gateway
        self.branches: dict[int, Branch] = {}
        self.cancelled: set[int] = set()  # cancelled while the prompt was still computed for all

    @property
    def limits(self) -> Limits:
        assert not isinstance(self.command, Prefill), "a prefill draws nothing"
        return self.command.limits

    @property
    def sampling(self) -> Sampling:
        assert not isinstance(self.command, Prefill), "a prefill draws nothing"
        return self.command.sampling

    @property
    def first_branch(self) -> int:
        """Where this job's branches begin in the request that it is a part of."""
        assert not isinstance(self.command, Prefill), "a prefill draws nothing"
        return self.command.first_branch


class Branch:
    """One branch of a job: what the engine must know beside what the scheduler sees."""

    __slots__ = ("cached_tokens", "index", "job", "num_output", "prompt_len", "sequence")

    def __init__(self, job: Job, index: int, sequence: Sequence, cached_tokens: int | None) -> None:
        self.job = job
        self.index = index
        self.sequence = sequence
        self.prompt_len = sequence.length
        self.cached_tokens = cached_tokens  # None until its first admission tells
        self.num_output = 0

    @property
    def seed(self) -> int:
        """The seed of this branch's stream of draws."""
        return branch_seed(self.job.sampling.seed, self.job.first_branch + self.index)
