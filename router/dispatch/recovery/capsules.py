"""Capsules that jobs continue: the workers that hold them, and the texts of those that are gone."""

from collections.abc import Container

from mallee.protocol.errors import (
    CapsuleLost,
    CapsuleStale,
    LookupIncomplete,
    MalleeError,
    UnknownCapsule,
)
from mallee.protocol.ids import CapsuleId, WorkerId
from mallee.router.dispatch.jobs import ForkJob, Job
from mallee.router.dispatch.texts import CapsuleText, Texts
from mallee.router.router import Router


class Capsules:
    """Finds capsules for one gateway. Those on workers that are `leaving` are as good as gone."""

    __slots__ = ("_leaving", "_router", "_texts")

    def __init__(self, router: Router, texts: Texts, leaving: Container[WorkerId]) -> None:
        self._router = router
        self._texts = texts
        self._leaving = leaving

    def worker_of(self, capsule: CapsuleId) -> WorkerId | None:
        """The worker that holds `capsule` and stays. Raises CapsuleStale."""
        entry = self._router.check_fresh(capsule, self._texts.weights(capsule))
        return None if entry is None or entry.worker in self._leaving else entry.worker

    def is_durable(self, capsule: CapsuleId) -> bool:
        """Whether a worker has `capsule` on disk, as far as is known."""
        entry = self._router.find_capsule(capsule)
        return entry is not None and entry.is_durable

    def check_fresh(self, capsule: CapsuleId) -> None:
        """Raises CapsuleStale if `capsule` was made by other weights than those that serve."""
        self._router.check_fresh(capsule, self._texts.weights(capsule))

    def is_fresh(self, capsule: CapsuleId) -> bool:
        """Whether `check_fresh` would pass."""
        try:
            self.check_fresh(capsule)
        except CapsuleStale:
            return False
        return True

    def text(self, capsule: CapsuleId, at: int | None = None) -> CapsuleText | None:
        """The text of a capsule that is gone; None if it is unknown, or its time was over."""
        text = self._texts.capsule_text(capsule, at)
        if text is not None and text.ttl_s and not self._went_with_worker(capsule):
            return None
        return text

    def text_for(self, job: ForkJob) -> CapsuleText:
        """The text of the capsule of `job`, which is gone.

        Raises UnknownCapsule, CapsuleLost; LookupIncomplete: it will be back, from disk.
        """
        text = self.text(job.capsule, job.at)
        if text is None:
            raise self._lost(job.capsule)
        if job.resumes:
            if text.continuation is None:
                raise CapsuleLost(job.capsule, "the branch that left it is not known any more")
        elif job.is_inheriting and text.grammar is None:
            raise CapsuleLost(job.capsule, "the grammar of its text is not known any more")
        return text

    def num_tokens(self, capsule: CapsuleId) -> int:
        """The length of a capsule that is gone, and whose text is known.

        Raises UnknownCapsule, CapsuleLost, CapsuleStale, LookupIncomplete.
        """
        text = self.text(capsule)
        if text is None:
            self.check_fresh(capsule)
            raise self._lost(capsule)
        return len(text.tokens)

    def can_compute(self, job: Job) -> bool:
        """Whether a worker that holds nothing of the prompt of `job` could compute it."""
        if not isinstance(job, ForkJob):
            return True
        if job.is_inheriting:
            text = self._texts.capsule_text(job.capsule, job.at)
            if job.resumes:
                return text is not None and text.continuation is not None
            return text is not None and text.grammar is not None
        return self._texts.knows(job.capsule)

    def _went_with_worker(self, capsule: CapsuleId) -> bool:
        """Whether `capsule` is gone, or as good as gone, by the end of its worker and not by its own."""
        if self._router.was_lost(capsule):
            return True
        entry = self._router.find_capsule(capsule)
        return entry is not None and entry.worker in self._leaving

    def _lost(self, capsule: CapsuleId) -> MalleeError:
        if self.is_durable(capsule) or self._router.is_taken_over(capsule):
            return LookupIncomplete("its worker ends, and another takes its disk over")
        if self._went_with_worker(capsule):
            return CapsuleLost(capsule, "its worker is gone, and its text is not known any more")
        return UnknownCapsule(capsule)
