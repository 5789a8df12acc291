"""Fan-outs: rows that continue one prefix, placed as a group and split where that pays."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mallee.protocol.errors import Saturated
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.config import CostModel, RouterConfig, SpillModel
from mallee.router.index.capsules import CapsuleEntry
from mallee.router.load import layout
from mallee.router.load.paths import room_for_marks
from mallee.router.placement.decisions import Spill
from mallee.router.placement.kernels.spill import split
from mallee.router.placement.placer import Choice, Placement, Placing, Selection
from mallee.router.placement.pricing import (
    Ask,
    Fanout,
    How,
    Prices,
    Share,
    Workers,
    _Problem,
)
from mallee.router.sync.fleet import Fleet


class Split(NamedTuple):
    """What `SpillPlanner.plan` chose. The owner's share, if it has one, comes first."""

    shares: tuple[Share, ...]
    finish_s: float  # of the slowest row, predicted
    work_s: float  # seconds of GPUs and links that staying would not take
    stay_s: float  # finish of the slowest row if all had stayed

    @property
    def is_spilled(self) -> bool:
        return any(share.how != "stay" for share in self.shares)


class Part(NamedTuple):
    """Rows of a fan-out, booked on one worker."""

    placement: Placement
    rows: range  # indices within the fan-out
    how: How
    prices: Prices


class FanOut(NamedTuple):
    """What is to be placed. The prefix is `prompt_tokens` long; row i adds suffix_tokens[i]."""

    hashes: Hashes
    prompt_tokens: int
    max_tokens: int
    suffix_tokens: Sequence[int]
    entry: CapsuleEntry | None
    may_wait: bool


class FanOuts:
    """Places fan-outs for one router."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, placing: Placing, selection: Selection
    ) -> None:
        self._block_size = config.block_size
        self._cost = config.cost
        self._fleet = fleet
        self._placing = placing
        self._selection = selection
        self._planner = SpillPlanner(config.cost, config.spill, block_size=config.block_size)
        self.spilled: Counter[str] = Counter()  # parts that left the owner, by how

    def place(
        self,
        requests: Sequence[RequestId],
        fan_out: FanOut,
        now: float,
        *,
        can_recompute: bool,
        can_migrate: bool,
    ) -> tuple[Part, ...]:
        """As `Router.route_fanout`."""
        placing, entry = self._placing, fan_out.entry
        marks = room_for_marks(len(fan_out.hashes))  # filled by `look`
        whole = self._ask(fan_out, range(len(fan_out.suffix_tokens)), placing.only(entry, None))
        placing.look(fan_out.hashes, marks, entry)
        choice, has_room = self._owner(whole, now, may_split=can_recompute or can_migrate)
        owner = choice.slot
        split = self._split(
            fan_out, whole, owner, now, can_recompute=can_recompute, can_migrate=can_migrate
        )
        if not split.is_spilled:
            if not has_room:
                choice = placing.choose(whole, now)  # raises Saturated: it waits as any other
            (share,) = split.shares
            return (self._part(requests[0], share, range(share.rows), choice, whole, marks, now),)
        parts: list[Part] = []
        start = 0
        for request, share in zip(requests, _limited(split, len(requests)), strict=False):
            rows = range(start, start + share.rows)
            start = rows.stop
            parts.append(self._place_share(request, fan_out, share, rows, marks, now))
        return tuple(parts)

    def _owner(self, whole: Ask, now: float, *, may_split: bool) -> tuple[Choice, bool]:
        """Where the prefix is cheapest, and whether that worker has room for all rows."""
        try:
            return self._placing.choose(whole, now), True
        except Saturated:
            if not may_split:
                raise
        # Where a group may be split no worker has to take it whole.
        return self._placing.choose(whole._replace(rows=1), now), False

    def _ask(self, fan_out: FanOut, rows: range, only: int, how: str = "stay") -> Ask:
        suffixes = [fan_out.suffix_tokens[i] for i in rows]
        tokens = sum(suffixes)
        ask = self._placing.ask(
            len(fan_out.hashes),
            fan_out.prompt_tokens + max(suffixes),
            fan_out.max_tokens,
            len(rows),
            fan_out.entry if how == "stay" else None,
            tokens if how == "stay" else None,
            only,
            fan_out.may_wait,
        )
        if how == "migrate":
            return ask._replace(fixed_prefill=tokens)
        if fan_out.entry is not None and how == "stay":
            return ask
        return ask._replace(prompt_tokens=fan_out.prompt_tokens + tokens)

    def _split(
        self,
        fan_out: FanOut,
        whole: Ask,
        owner: int,
        now: float,
        *,
        can_recompute: bool,
        can_migrate: bool,
    ) -> Split:
        fleet, width = self._fleet, self._fleet.width
        loads = fleet.slots.loads[:, :width]
        room = np.where(loads[layout.ROOM] >= max(1, whole.needed_blocks), loads[layout.ROOM], 0)
        held = self._held_tokens(fan_out, owner, width)
        max_rows = np.where(loads[layout.MAX_ROWS] > 0, loads[layout.MAX_ROWS], 1 << 20)
        workers = Workers(
            queued_s=self._selection.queued_s(now, width),
            rows=(loads[layout.ROWS] + loads[layout.EXTRA_ROWS]).astype(np.int64),
            active_blocks=(loads[layout.BLOCKS] + loads[layout.EXTRA_BLOCKS]).astype(np.int64),
            max_rows=max_rows.astype(np.int64),
            num_blocks=room.astype(np.int64),
            held_tokens=held,
        )
        fan = Fanout(
            rows=len(fan_out.suffix_tokens),
            prefix_tokens=fan_out.prompt_tokens,
            suffix_tokens=sum(fan_out.suffix_tokens),
            steps=self._cost.steps(fan_out.max_tokens),
        )
        return self._planner.plan(
            fan, workers, owner, can_recompute=can_recompute, can_migrate=can_migrate
        )

    def _held_tokens(self, fan_out: FanOut, owner: int, width: int) -> np.ndarray:
        """Leading tokens of the prefix on each worker: int64[width]."""
        held = np.zeros(width, dtype=np.int64)
        if len(fan_out.hashes):
            overlap = self._fleet.index.match(fan_out.hashes)[:width]
            active = self._selection.active[:width]
            held[:] = np.maximum(overlap, active) * self._block_size
        if fan_out.entry is not None:
            held[owner] = fan_out.prompt_tokens
        return np.minimum(held, fan_out.prompt_tokens)

    def _place_share(
        self,
        request: RequestId,
        fan_out: FanOut,
        share: Share,
        rows: range,
        marks: Hashes,
        now: float,
    ) -> Part:
        placing = self._placing
        ask = self._ask(fan_out, rows, share.slot, share.how)._replace(may_wait=0.0)
        placing.look(fan_out.hashes, marks, fan_out.entry if share.how == "stay" else None)
        choice = placing.choose(ask, now)
        if share.how != "stay":
            self.spilled[share.how] += 1
        return self._part(request, share, rows, choice, ask, marks, now)

    def _part(
        self,
        request: RequestId,
        share: Share,
        rows: range,
        choice: Choice,
        ask: Ask,
        marks: Hashes,
        now: float,
    ) -> Part:
        """`share` is booked where `choice` says."""
        spill = Spill(share.how, share.prices)
        placement = self._placing.place(request, choice, ask, marks, "fan_out", now, spill)
        return Part(placement, rows, share.how, share.prices)


def _limited(split: Split, most: int) -> list[Share]:
    """At most `most` shares; the rows of those left out are added to the last one kept."""
    shares = list(split.shares[:most])
    rest = sum(share.rows for share in split.shares[most:])
    if rest:
        shares[-1] = shares[-1]._replace(rows=shares[-1].rows + rest)
    return shares


# How many rows of a fan-out stay with the worker that holds their prefix, and how many go where.
#
# Every row of a fan-out waits for the slowest of its siblings, and one worker runs only `max_rows` of
# them at a time. So rows may leave it (*spill*) for workers that first get the prefix: they *migrate* it
# (pull its bytes) or *recompute* it. All in seconds, with the figures of `router.placement.pricing`:
#
# wait       queued prefill there + suffixes of the part + waves of decode steps
# recompute  the same elsewhere, after the prefix tokens that are missing there
# migrate    the same elsewhere, after latency + bytes (pulls don't slow one another: a link each)
#
# Chosen is the split with the least
#
# finish of the slowest row + work_weight x seconds of GPUs and links that staying would not take:
# copies of the prefix, decode steps of workers that would be idle
#
# among those that keep within each deadline of a geometric scale, on which each worker's rows are known
# in closed form and the fewest workers that together take all rows are found by sorting. A scale of 4 %
# steps, then a search within the best step: within 4 % of the best split under this model. A split must
# beat staying by a margin, because staying has a value beyond this request: the next turn of the tree
# finds everything in one place.


class SpillPlanner:
    """Splits fan-outs under fixed figures. Stateless; its kernels are compiled when it is built."""

    def __init__(self, cost: CostModel, spill: SpillModel, *, block_size: int) -> None:
        self._cost = cost
        self._spill = spill
        self._block_size = block_size
        ones = np.ones(2, dtype=np.int64)
        workers = Workers(np.zeros(2), ones, ones, ones, ones * 1024, ones * 0)
        self.plan(Fanout(64, 64, 0, 64), workers, 0, can_recompute=True, can_migrate=True)

    def plan(
        self,
        fanout: Fanout,
        workers: Workers,
        owner: int,
        *,
        can_recompute: bool,
        can_migrate: bool,
    ) -> Split:
        """The split of `fanout`, whose prefix is with `owner` (or will be: what it misses is priced).

        Deterministic: equal workers are taken by slot. All rows stay if nothing else may take them,
        whether or not they fit.
        """
        alone = _Problem(self._cost, self._spill, fanout, workers.only(owner), self._block_size)
        stays = alone.options(0, can_recompute=False, can_migrate=False)
        stay_s = float(stays.places.starts_s[0]) + alone.span_s(stays, 0, fanout.rows)
        whole = Share(owner, fanout.rows, "stay", Prices(stay_s, stay_s, stay_s))
        stay = Split((whole,), stay_s, 0.0, stay_s)
        fits = fanout.rows <= stays.places.first[0]
        gain = self._spill.min_gain_fitting if fits else self._spill.min_gain
        bar_s = stay_s * (1.0 - gain)
        if alone.wave.fresh_s + alone.wave.each_s >= bar_s:
            return stay  # no worker could do even one row in time
        problem = _Problem(self._cost, self._spill, fanout, workers, self._block_size)
        options = problem.options(owner, can_recompute=can_recompute, can_migrate=can_migrate)
        if len(options.slots) == 1:
            return stay
        places = options.places
        taken = np.zeros(len(options.slots), dtype=np.int64)
        weight, most = self._spill.work_weight, self._spill.max_parts - 1
        split(fanout.rows, stay_s, bar_s, weight, most, places, problem.wave, taken)
        if not taken.any():
            return stay
        shares = problem.shares(options, taken, stay_s)
        finish_s = max(
            float(places.starts_s[i]) + problem.span_s(options, i, int(taken[i]))
            for i in np.flatnonzero(taken).tolist()
        )
        return Split(shares, finish_s, float(places.works_s[taken > 0].sum()), stay_s)
