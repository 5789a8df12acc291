"""The holders of KV that a placed request pulls instead of computing it, and the prices of that.

Whether a worker pulls blocks of a prompt is priced with all else (`placement.pricing`); here the workers are
found that it is to ask for them: those that lend and have the most of it. A capsule that is made again
is asked of its worker first, by name: so its state comes too. The command has the whole text besides:
what does not arrive, or is dearer than the worker reckons, is computed.
"""

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Holder
from mallee.router.config import RouterConfig
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.load import layout
from mallee.router.placement.fanout_pricing import Prices
from mallee.router.placement.kernels import score
from mallee.router.placement.pricing import Choice, Offers
from mallee.router.sync.fleet import Fleet

PullReason: TypeAlias = Literal["prefix", "spill", "drain", "rebuild"]
"""prefix: another worker has more of the prompt. spill: a fan-out left the worker of its capsule.
drain: a capsule leaves a worker that drains. rebuild: a capsule that is gone is made again.
"""
PULL_REASONS: Final[tuple[PullReason, ...]] = get_args(PullReason)


class Pull(NamedTuple):
    """KV that a placed request gets from other workers, as far as they have it."""

    reason: PullReason
    holders: tuple[Holder, ...]  # in the order in which they are asked
    num_blocks: int  # predicted
    nbytes: int
    prices: Prices  # wait: at the first holder, infinite if it may not go there


class PullFinder:
    """Finds the workers of one fleet that others pull from."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        nothing = np.zeros((1, config.max_workers), np.int32)
        score.lenders(fleet.slots.loads, nothing, 0, 0, 0, 0)  # compiles, as no request should

    def lends(self, entry: CapsuleEntry) -> bool:
        """Whether the worker of a capsule lends it."""
        member = self._fleet.members.get(entry.worker)
        is_there = member is not None and not entry.is_computing
        return member is not None and is_there and bool(self._lent(member.slot))

    def find(
        self, offers: Offers, choice: Choice, source: CapsuleEntry | None, reason: PullReason
    ) -> Pull | None:
        """The pull of a request whose worker is chosen; None: it has all itself, or computes it.

        `source`: a capsule of exactly its text.
        """
        slot, size, loads = choice.slot, self._config.block_size, self._fleet.slots.loads
        found: list[int] = []
        holders: list[Holder] = []
        num_blocks = choice.pulled_blocks
        if source is not None and self._lent(slot) and self.lends(source):
            member = self._fleet.members.get(source.worker)
            assert member is not None, "it lends"
            if member.slot != slot:
                found.append(member.slot)
                holders.append(self._holder(member.slot, source.boundary, source.capsule))
                missing = source.boundary // size - choice.overlap_blocks
                num_blocks = max(num_blocks, missing)
        if choice.pulled_blocks:
            # Two beside one of the capsule: the second, if the first fails. Disks are not lent.
            held, tier, least = offers.held, min(1, len(offers.held) - 1), choice.overlap_blocks
            for each in score.lenders(loads, held, tier, slot, least, self._fleet.width):
                if each >= 0 and each not in found:
                    found.append(each)
                    holders.append(self._holder(each, int(held[tier, each]) * size))
        if not holders:
            return None
        nbytes = self._nbytes(slot, num_blocks)
        prices = self._prices(choice, found[0], num_blocks)
        return Pull(reason, tuple(holders), num_blocks, nbytes, prices)

    def _lent(self, slot: int) -> float:
        return float(self._fleet.slots.loads[layout.LOAD_LENDS, slot])

    def _holder(self, slot: int, num_tokens: int, capsule: CapsuleId | None = None) -> Holder:
        member = self._fleet.by_slot[slot]
        assert member is not None, f"slot {slot} is empty and lends"
        lease = member.lease
        return Holder(lease.worker, lease.incarnation, lease.address, num_tokens, capsule or "")

    def _nbytes(self, slot: int, num_blocks: int) -> int:
        """Bytes of so many blocks and what comes beside them, as the worker told, if it did."""
        member = self._fleet.by_slot[slot]
        load = None if member is None else member.lease.load
        if load is None or not load.block_nbytes:
            return num_blocks * self._config.spill.kv_block_nbytes
        return (num_blocks + load.side_blocks) * load.block_nbytes

    def _pull_s(self, slot: int, num_blocks: int) -> float:
        """Seconds to pull so many blocks, as the worker measured if it did."""
        loads, spill = self._fleet.slots.loads, self._config.spill
        block_s = float(loads[layout.LOAD_PEER_BLOCK_S, slot])
        if not block_s:
            return spill.migrate_latency_s + num_blocks * spill.block_s
        return float(loads[layout.LOAD_PEER_FIRST_S, slot]) + num_blocks * block_s

    def _prices(self, choice: Choice, holder: int, num_blocks: int) -> Prices:
        """The totals of the three ways: on the holder, as it is placed, and without the pull there."""
        cost, size = self._config.cost, self._config.block_size
        totals = choice.terms[score.TERM_TOTAL]
        total, wait_s = float(totals[choice.slot]), float(totals[holder])
        token_s = cost.prefill_token_s * cost.prefill_weight
        if choice.pulled_blocks:
            computed_s = choice.pulled_blocks * size * token_s
            return Prices(wait_s, total, total - choice.cost.pull_s + computed_s)
        pulled_s = total - num_blocks * size * token_s + self._pull_s(choice.slot, num_blocks)
        return Prices(wait_s, pulled_s, total)
