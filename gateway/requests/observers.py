"""Observers of a request: each sees it pass, and counts, traces or records it."""

from collections.abc import Sequence

from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import BranchLife
from mallee.protocol.errors import MalleeError
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import CapsuleId
from mallee.router.dispatch.shards import Shard
from mallee.router.dispatch.verdicts import Verdict
from mallee.router.placement.placer import Placement


class Observer:
    """Sees one request. Does nothing with what it doesn't override.

    Times are seconds since the request began; a `BranchLife` has what is given beside it already.
    """

    __slots__ = ()

    def placed(self, shard: Shard, placement: Placement, at_s: float) -> None:
        """Branches are on a worker, for the first time or once more."""

    def judged(self, verdict: Verdict) -> None:
        """The way its prompt is served is known."""

    def delivered(self, branch: BranchLife, delta: Delta) -> None:
        """A branch has drawn tokens, or has ended."""

    def gave_up(self, branch: BranchLife) -> None:
        """The client wants no more of a branch that ran, or waited."""

    def cut(self, branch: BranchLife, at: int, residue: Tokens) -> None:
        """The client saw the first `at` tokens of a running branch and `residue`: so it ended there."""

    def shortened(
        self, branch: BranchLife, at: int, residue: Tokens, capsule: CapsuleId | None
    ) -> None:
        """As `cut`, of a branch that had ended by itself, and left `capsule`."""

    def captured(self, branch: int, capsule: CapsuleId, boundary: int) -> None:
        """A capsule was taken of a running branch."""

    def ended(self, branches: Sequence[BranchLife], error: MalleeError | None) -> None:
        """All branches have ended; with an `error`, nothing of the request was sent to a worker."""
