"""Fan-outs: rows that continue one prefix, placed as a group and split where that pays."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mallee.protocol.errors import Saturated
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.capsules import CapsuleEntry
from mallee.router.decisions import Spill
from mallee.router.fleet import Fleet
from mallee.router.kernels import score
from mallee.router.paths import room_for_marks
from mallee.router.placing import Placing
from mallee.router.records import Part, RouterConfig
from mallee.router.selection import Ask, Choice, Selection
from mallee.router.spill import Fanout, Share, SpillPlanner, Split, Workers


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
        room = np.where(loads[score.ROOM] >= max(1, whole.needed_blocks), loads[score.ROOM], 0)
        held = self._held_tokens(fan_out, owner, width)
        max_rows = np.where(loads[score.MAX_ROWS] > 0, loads[score.MAX_ROWS], 1 << 20)
        workers = Workers(
            queued_s=self._selection.queued_s(now, width),
            rows=(loads[score.ROWS] + loads[score.EXTRA_ROWS]).astype(np.int64),
            active_blocks=(loads[score.BLOCKS] + loads[score.EXTRA_BLOCKS]).astype(np.int64),
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
