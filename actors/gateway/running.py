"""What a gateway remembers of a request, or of a part of one, while a worker answers it."""

from dataclasses import dataclass, field

from mallee.actors.gateway.answers import RunningAnswer
from mallee.actors.gateway.service import Delta, ForkJob, Job, PrefillJob
from mallee.actors.gateway.shards import Recompute, part_command
from mallee.actors.gateway.token_memory import Path, Recording, TokenMemory
from mallee.actors.telemetry.metrics import GatewayMetrics
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Cancel, Command, Release


@dataclass(slots=True)
class Running:
    """One booking's answer. `job` is the part's own: with its rows alone."""

    answer: RunningAnswer
    worker: WorkerId
    hashes: Hashes
    job: Job
    started: float  # monotonic seconds
    first_branch: int  # where its rows begin in the whole job
    recompute: Recompute | None = None  # what must be computed before `job` is sent
    recomputed: tuple[int, int] | None = None  # tokens cached and computed by that
    recording: Recording | None = None
    seen: bool = False  # whether the worker has said anything of it
    touched: float = 0.0  # when its booking was last said to be alive, monotonic seconds
    last_token: dict[int, float] = field(default_factory=dict)  # by branch, monotonic seconds

    def given_up(self, branch: int | None) -> list[Command]:
        """What the worker is told when the reader gave up `branch`, or all that was left."""
        request = self.answer.request
        if self.recompute is not None:
            return _abandon(self.recompute.request) if self.answer.is_over else []
        if isinstance(self.job, PrefillJob):
            return _abandon(request)
        return [Cancel(request, branch)]

    def fork_of(self, recompute: Recompute) -> list[Command]:
        """What the worker is told once it has the capsule that `recompute` asked for."""
        request = self.answer.request
        rows = set(range(len(recompute.job.suffixes)))
        return [
            part_command(request, recompute.job, self.first_branch),
            *(Cancel(request, branch) for branch in sorted(rows - self.answer.open_branches)),
            Release(recompute.job.capsule),
        ]

    def measure(self, delta: Delta, now: float, metrics: GatewayMetrics) -> None:
        """Count the delta; one token's latency is measured from the branch's token before it."""
        last = self.last_token.get(delta.branch)
        if delta.tokens:
            self.last_token[delta.branch] = now
            if last is None:
                metrics.first_token(now - self.started)
            else:
                metrics.next_token(now - last)
        metrics.output_tokens(len(delta.tokens))
        if delta.finish is not None:
            metrics.branch_ended(
                delta.finish,
                cached_tokens=delta.cached_tokens,
                prefill_tokens=delta.prefill_tokens,
                seconds=now - self.started,
            )


def _abandon(prefill: RequestId) -> list[Command]:
    """The capsule may be made before the cancel arrives, and nobody would know of it."""
    return [Cancel(prefill), Release(capsule_id(prefill))]


def recording(memory: TokenMemory, job: Job, path: Path | None) -> Recording | None:
    """What will know the tokens of capsules that `job` leaves. `path`: of the capsule it forks."""
    if not memory.max_nbytes:
        return None
    if isinstance(job, ForkJob):
        return None if path is None else Recording(memory, path, job.suffixes)
    return Recording(memory, Path(None, job.tokens, job.salt))
