"""KV that the workers of a replay lend each other: questions on their way, and counts of what moved."""

from collections.abc import Callable
from typing import NamedTuple

from mallee.mocker.links import LinkConfig, Told
from mallee.mocker.replay.clock import Clock
from mallee.protocol.messages import Holder
from mallee.worker.transfer.values import Ask


class Question(NamedTuple):
    """A question that has come to its lender."""

    ask: Ask
    told: Told


class FleetPeers:
    """The `Peers` of every worker of one replay. `num_broken` counts pulls whose lender was lost meanwhile.

    `put` has a question answered; `left_at` is the end of the holder's life.
    """

    def __init__(
        self,
        clock: Clock,
        link: LinkConfig,
        *,
        put: Callable[[Question], None],
        left_at: Callable[[Holder], float],
    ) -> None:
        self.link = link
        self._clock = clock
        self._put = put
        self.left_at = left_at
        self.num_moves = self.num_blocks = self.num_broken = 0

    def ask(self, ask: Ask, told: Told) -> None:
        """It reaches the lender after the link's latency."""
        self._clock.at(self._clock.now + self.link.latency_s, self._put, Question(ask, told))

    def pulled(self, num_blocks: int, *, is_first: bool, is_broken: bool) -> None:
        self.num_moves += is_first
        self.num_blocks += num_blocks
        self.num_broken += is_broken
