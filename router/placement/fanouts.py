"""Fan-outs: rows that continue one prefix, placed as a group and split where that pays."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from mallee.protocol.errors import Saturated
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.config import RouterConfig
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.load import layout
from mallee.router.load.prompts import Seen
from mallee.router.placement.fanout_pricing import (
    Flags,
    How,
    Prices,
    RowGroup,
    Seconds,
    Share,
    Split,
    SplitPlanner,
    Workers,
)
from mallee.router.placement.kernels import score
from mallee.router.placement.placer import Placement, Placer
from mallee.router.placement.pricing import Choice, Demand, Offers
from mallee.router.placement.pulls import PullReason
from mallee.router.sync.fleet import Fleet

_UNLIMITED_ROWS = 1 << 20
SpillReason: TypeAlias = Literal["full", "sooner"]


class FanOut(NamedTuple):
    """Rows that continue one prefix: row i adds suffix_tokens[i] tokens to its `prefix_tokens`."""

    hashes: Hashes  # of the prefix
    prefix_tokens: int
    max_tokens: int
    suffix_tokens: Sequence[int]
    capsule: CapsuleEntry | None  # that holds the prefix
    may_wait: bool
    home: int = -1  # slot of the worker of its prompt cache key
    source: CapsuleEntry | None = None  # of exactly the prefix, on a worker that it can't go on on
    why: PullReason = "prefix"  # it pulls, if it does and isn't spilled


class Part(NamedTuple):
    """Rows of a fan-out, booked on one worker."""

    placement: Placement
    rows: range  # indices within the fan-out
    how: How
    prices: Prices


class FanOutPlacer:
    """Places fan-outs with the steps of one `Placer`; the prefix is matched once."""

    def __init__(self, config: RouterConfig, fleet: Fleet, placer: Placer) -> None:
        self._block_size = config.block_size
        self._cost, self._spill = config.cost, config.spill
        self._fleet = fleet
        self._placer = placer
        self._planner = SplitPlanner(config.cost, config.spill, block_size=config.block_size)
        # Parts that left the owner: how, and whether it was full or they end sooner elsewhere.
        self.spilled: Counter[tuple[How, SpillReason]] = Counter()
        self._displaced_s(np.zeros(0), -1)  # compiles, as no request should have to

    def place(
        self,
        requests: Sequence[RequestId],
        fan_out: FanOut,
        now: float,
        *,
        can_recompute: bool,
    ) -> tuple[Offers, tuple[Part, ...]]:
        """As `Router.route_fanout`, with the offers that it went by."""
        placer = self._placer
        offers, only = self._match(fan_out)
        seen = offers.seen
        whole = self._demand(fan_out, range(len(fan_out.suffix_tokens)), only, "stay", seen)
        choice, has_room = self._owner(whole, offers, now, may_split=can_recompute)
        split = self._planner.plan(
            RowGroup(
                rows=whole.rows,
                prefix_tokens=fan_out.prefix_tokens,
                suffix_tokens=sum(fan_out.suffix_tokens),
                steps=whole.steps,
            ),
            self._workers(
                fan_out,
                whole,
                choice,
                may_pull=self._may_pull(fan_out, can_recompute),
            ),
            choice.slot,
            max_parts=len(requests),
            can_recompute=can_recompute,
        )
        if split.is_spilled:
            return offers, self._place_shares(requests, fan_out, split, offers, now, seen)
        if not has_room:
            choice = placer.choose(whole, offers, now)  # raises Saturated: it waits as any other
        share = split.shares[0]
        return offers, (self._part(requests[0], fan_out, share, 0, whole, offers, choice, now),)

    def _match(self, fan_out: FanOut) -> tuple[Offers, int]:
        """The offers for the prefix, and the slot of its capsule's worker, or -1."""
        offers, capsule = self._placer.match(fan_out.hashes), fan_out.capsule
        if fan_out.source is not None:
            self._placer.offer(offers, fan_out.source)
        if capsule is None:
            return offers, -1
        slot = self._placer.slot_of(capsule.worker)
        self._placer.offer(offers, capsule)
        return offers, slot

    def _owner(
        self, whole: Demand, offers: Offers, now: float, *, may_split: bool
    ) -> tuple[Choice, bool]:
        """The worker where the prefix is cheapest, and whether it has room for all rows."""
        try:
            return self._placer.choose(whole, offers, now), True
        except Saturated:
            if not may_split:
                raise
        # Where a group may be split no worker has to take it whole.
        return self._placer.choose(replace(whole, rows=1), offers, now), False

    def _demand(self, fan_out: FanOut, rows: range, only: int, how: How, seen: Seen) -> Demand:
        """The needs of some of the rows on a worker that gets the prefix in this way."""
        suffixes = [fan_out.suffix_tokens[row] for row in rows]
        tokens, num_blocks = sum(suffixes), len(fan_out.hashes)
        forks = fan_out.capsule is not None and how == "stay"
        shared = max(num_blocks, fan_out.prefix_tokens // self._block_size) if forks else num_blocks
        longest = fan_out.prefix_tokens + max(suffixes)
        limit, may_wait = fan_out.max_tokens, fan_out.may_wait
        one = self._placer.demand(shared, longest, limit, may_wait, seen=seen)
        return replace(
            one,
            prompt_tokens=longest if forks else fan_out.prefix_tokens + tokens,
            num_blocks=num_blocks,
            own_blocks=one.own_blocks * len(rows),
            rows=len(rows),
            fixed_prefill=tokens if forks or how == "migrate" else -1,
            only=only,
            home=fan_out.home,
        )

    def _may_pull(self, fan_out: FanOut, can_recompute: bool) -> Flags:
        """The workers that may pull the prefix from its owner: they lend, as it does.

        A pull that fails is computed, so it must be possible. A prefix without a capsule may be pulled from
        any worker: that is in the price of computing it.
        """
        lends = self._fleet.slots.loads[layout.LOAD_LENDS, : self._fleet.width] > 0
        capsule = fan_out.capsule
        if not can_recompute or capsule is None or not self._placer.lends(capsule):
            lends[:] = False
        return lends

    def _workers(
        self, fan_out: FanOut, whole: Demand, choice: Choice, *, may_pull: Flags
    ) -> Workers:
        """The state of all workers as `choice` priced them."""
        width, size = self._fleet.width, self._block_size
        loads, terms = self._fleet.slots.loads[:, :width], choice.terms[:, :width].astype(float)
        num_blocks = loads[layout.LOAD_ROOM]
        max_rows = loads[layout.LOAD_MAX_ROWS]
        held, fetch_s = terms[score.TERM_OVERLAP], terms[score.TERM_FETCH]
        missing_blocks = np.maximum(fan_out.prefix_tokens // size - held, 0)
        is_measured = loads[layout.LOAD_PEER_BLOCK_S] > 0
        first_s = loads[layout.LOAD_PEER_FIRST_S], self._spill.migrate_latency_s
        block_s = loads[layout.LOAD_PEER_BLOCK_S], self._spill.block_s
        pull_s = fetch_s + np.where(is_measured, *first_s)
        pull_s += missing_blocks * np.where(is_measured, *block_s)
        if not may_pull.any():
            held, fetch_s = held + terms[score.TERM_PULLED], fetch_s + terms[score.TERM_PULL]
        missing = np.maximum(fan_out.prefix_tokens - held * size, 0)
        token_s = loads[layout.LOAD_TOKEN_S]
        prefix_s = missing * np.where(token_s > 0, token_s, self._cost.prefill_token_s) + fetch_s
        if fan_out.capsule is not None:
            prefix_s[choice.slot] = 0.0
        return Workers(
            queued_s=terms[score.TERM_QUEUED],
            prefix_s=prefix_s,
            rows=(loads[layout.LOAD_ROWS] + loads[layout.LOAD_EXTRA_ROWS]).astype(np.int64),
            active_blocks=(loads[layout.LOAD_BLOCKS] + loads[layout.LOAD_EXTRA_BLOCKS]).astype(
                np.int64
            ),
            max_rows=np.where(max_rows > 0, max_rows, _UNLIMITED_ROWS).astype(np.int64),
            num_blocks=np.where(num_blocks >= max(1, whole.needed_blocks), num_blocks, 0).astype(
                np.int64
            ),
            pull_s=pull_s,
            may_pull=may_pull,
            displaced_s=self._displaced_s(missing_blocks, fan_out.home),
        )

    def _displaced_s(self, copied_blocks: Seconds, home: int) -> Seconds:
        """Seconds to bring back what each worker evicts for so many blocks, x the chance that it is."""
        cost = self._cost
        seconds: Seconds = score.price_copies(
            self._fleet.slots.loads,
            copied_blocks,
            home,
            float(self._block_size),
            cost.prefill_token_s,
        )
        return cost.displaced_weight / max(cost.prefill_weight, 1.0) * seconds

    def _place_shares(
        self,
        requests: Sequence[RequestId],
        fan_out: FanOut,
        split: Split,
        offers: Offers,
        now: float,
        seen: Seen,
    ) -> tuple[Part, ...]:
        parts: list[Part] = []
        start = 0
        reason: SpillReason = "sooner" if split.fits else "full"
        for request, share in zip(requests, split.shares, strict=False):
            rows = range(start, start + share.rows)
            start = rows.stop
            demand = self._demand(fan_out, rows, share.slot, share.how, seen)
            demand = replace(demand, may_wait=0.0)
            choice = self._placer.choose(demand, offers, now)
            if share.how != "stay":
                self.spilled[share.how, reason] += 1
            parts.append(
                self._part(request, fan_out, share, rows.start, demand, offers, choice, now)
            )
        return tuple(parts)

    def _part(
        self,
        request: RequestId,
        fan_out: FanOut,
        share: Share,
        first_row: int,
        demand: Demand,
        offers: Offers,
        choice: Choice,
        now: float,
    ) -> Part:
        """Book `share` on the chosen worker."""
        is_spilled = share.how != "stay"
        source = fan_out.source
        if share.how == "migrate" or (is_spilled and choice.pulled_blocks):
            source = fan_out.capsule or source
        placement = self._placer.book(
            request,
            demand,
            offers,
            choice,
            reason="fan_out",
            now=now,
            share=share,
            source=source,
            why="spill" if is_spilled and fan_out.source is None else fan_out.why,
        )
        rows = range(first_row, first_row + share.rows)
        return Part(placement, rows, share.how, share.prices)
