"""Jobs that run as several parts on several workers, and their one answer.

Part k of a job is a request of its own (`part_requests`), with its own booking and its own worker. Its
branches draw what they would draw in the undivided job: they are numbered from `rows.start` on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import msgspec

from mallee.actors.commands import command, share
from mallee.actors.service import BranchStream, Delta, ForkJob, GenerateJob, Job, PrefillJob
from mallee.actors.streams import RunningAnswer
from mallee.actors.token_memory import Known
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Command, Fork, Generate, Prefill, Update, pack_tokens
from mallee.router.records import Part
from mallee.router.router import Router
from mallee.router.spill import Prices

MAX_PARTS: Final = 64
RECOMPUTED_TTL_S: Final = 60.0  # of a capsule that is computed to be forked once
CancelBranch: TypeAlias = Callable[[RequestId, int | None, int], None]

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


class SplitAnswer:
    """One job's branches on several workers; a `BranchStream`. Belongs to one event loop.

    The parts belong to workers of their own and end on their own; a branch has here the number that
    it has in the job.
    """

    def __init__(self, request: RequestId, worker: WorkerId) -> None:
        self._request = request
        self._worker = worker
        self._parts: list[tuple[range, RunningAnswer]] = []
        self._num_running = 0
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()

    def add(
        self,
        rows: range,
        request: RequestId,
        worker: WorkerId,
        cancel_branch: CancelBranch,
    ) -> RunningAnswer:
        """The part that answers `rows`, to be fed with what `worker` says of `request`.

        All parts are added before the first is fed.
        """

        def take(delta: Delta | None) -> None:
            if delta is not None:
                branch = rows.start + delta.branch
                self._deltas.put_nowait(delta._replace(branch=branch, worker=worker))
                return
            self._num_running -= 1
            if not self._num_running:
                self._deltas.put_nowait(None)

        self._num_running += 1
        part = RunningAnswer(request, worker, len(rows), cancel_branch=cancel_branch, sink=take)
        self._parts.append((rows, part))
        return part

    @property
    def request(self) -> RequestId:
        return self._request

    @property
    def worker(self) -> WorkerId:
        """The worker of the first part."""
        return self._worker

    def cancel(self, branch: int) -> None:
        """End one branch early; no further delta of it is delivered."""
        for rows, part in self._parts:
            if branch in rows:
                part.cancel(branch - rows.start)

    async def aclose(self) -> None:
        """Cancel every branch still running. Idempotent."""
        for _, part in self._parts:
            await part.aclose()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (delta := await self._deltas.get()) is not None:
            yield delta


class Share(NamedTuple):
    """A part, the job that it is alone, and its own answer."""

    part: Part
    job: Job
    answer: RunningAnswer


def answer_of(
    request: RequestId,
    job: Job,
    parts: Sequence[tuple[RequestId, Part]],
    cancel_branch: CancelBranch,
) -> tuple[BranchStream, list[Share]]:
    """The job's one answer, and what each part of it is to be fed to."""
    (_, first), *others = parts
    home = first.placement.worker
    if not others:
        answer = RunningAnswer(request, home, len(first.rows), cancel_branch=cancel_branch)
        return answer, [Share(first, job, answer)]
    whole = SplitAnswer(request, home)
    return whole, [
        Share(
            part,
            part_of(job, part.rows),
            whole.add(part.rows, name, part.placement.worker, cancel_branch),
        )
        for name, part in parts
    ]
