"""Prices and split of a fan-out: how many rows stay with their prefix, and how many go to which worker.

Every row of a fan-out waits for the slowest of its siblings, and one worker runs only `max_rows` of
them at a time. So rows may leave the owner of their prefix (*spill*) for workers that first get the
prefix: they *migrate* it (pull its bytes) or *recompute* it. All in seconds, with the terms and figures
of `router.placement.pricing`:

wait       queued prefill there + suffixes of the part + waves of decode steps
recompute  the same elsewhere, after the prefix blocks that are missing there are computed or fetched
migrate    the same elsewhere, after latency + bytes that are missing there (pulls don't slow one another: a
           link each)

The split with the least price per row is chosen:

finish of the slowest row + (prefill weight - 1) / rows x seconds of GPUs and links that staying would
not take: copies of the prefix, what they displace, decode steps of workers that would be idle

The second term is what `pricing` adds to a prompt's own computation: such a second is taken from
later requests, and the rows share it. Only splits that keep within a deadline of a geometric scale
are compared: there each worker's rows are known in closed form, and sorting finds the fewest workers that
together take all rows. The scale has steps of 4 %, then comes a search within the best step: the result
is within 4 % of the best split under this model. A split must beat staying by a margin, because staying
has a value beyond this request: the next turn of the tree finds everything in one place.
"""

import math
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.router.config import CostModel, SpillModel
from mallee.router.placement.kernels.spill import Places, Wave, span, split

How: TypeAlias = Literal["stay", "migrate", "recompute"]
Amounts: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

SHORTLIST: Final = 64  # workers beside the owner that are considered


class RowGroup(NamedTuple):
    """Rows that continue one prefix, in numbers."""

    rows: int  # >= 1
    prefix_tokens: int
    suffix_tokens: int  # of all rows together
    steps: int  # decode steps expected of each row


class Workers(NamedTuple):
    """The state of each worker, [num_workers]; the index is its table slot."""

    queued_s: Seconds  # prefill booked there
    prefix_s: Seconds  # to compute or fetch what is missing of the prefix there
    rows: Amounts
    active_blocks: Amounts
    max_rows: Amounts
    num_blocks: Amounts  # 0: gets no rows
    pull_s: Seconds  # to get what is missing of the prefix from the owner, whether or not it may
    may_pull: Flags
    displaced_s: Seconds  # to compute again what a copy of the prefix displaces, if expected

    def only(self, slot: int) -> "Workers":
        """One of them, as worker 0 of one."""
        return Workers._make(each[slot : slot + 1] for each in self)


class Prices(NamedTuple):
    """Seconds from now to the end of the last row of a part, each way, allowed or not."""

    wait_s: float  # if the whole fan-out stayed with its owner
    migrate_s: float
    recompute_s: float


class Share(NamedTuple):
    """Rows for one worker."""

    slot: int
    rows: int
    how: How
    prices: Prices


class Split(NamedTuple):
    """The chosen shares. The owner's, if it has one, comes first."""

    shares: tuple[Share, ...]
    finish_s: float  # of the slowest row, predicted
    work_s: float  # seconds of GPUs and links that staying would not take
    stay_s: float  # finish of the slowest row if all had stayed
    fits: bool = True  # all rows at once at the owner

    @property
    def is_spilled(self) -> bool:
        return any(share.how != "stay" for share in self.shares)


class SplitPlanner:
    """Splits fan-outs under fixed figures. Stateless; its kernels are compiled when it is built."""

    def __init__(self, cost: CostModel, spill: SpillModel, *, block_size: int) -> None:
        self._cost = cost
        self._spill = spill
        self._block_size = block_size
        ones = np.ones(2, dtype=np.int64)
        zeros, may_pull = np.zeros(2), np.ones(2, dtype=np.bool_)
        workers = Workers(
            queued_s=zeros,
            prefix_s=zeros,
            rows=ones,
            active_blocks=ones,
            max_rows=ones,
            num_blocks=ones * 1024,
            pull_s=zeros,
            may_pull=may_pull,
            displaced_s=zeros,
        )
        group = RowGroup(64, 64, 0, 64)
        self.plan(group, workers, 0, max_parts=2, can_recompute=True)

    def plan(
        self,
        group: RowGroup,
        workers: Workers,
        owner: int,
        *,
        max_parts: int,
        can_recompute: bool,
    ) -> Split:
        """The split of `group`, whose prefix is with `owner` (or will be: what it misses is priced).

        Deterministic: equal workers are taken by slot. All rows stay if nothing else may take them,
        whether or not they fit.
        """
        alone = _Problem(self._cost, group, workers.only(owner), self._block_size)
        stays = alone.options(0, can_recompute=False)
        stay_s = float(stays.places.starts_s[0]) + alone.span_s(stays, 0, group.rows)
        whole = Share(owner, group.rows, "stay", Prices(stay_s, stay_s, stay_s))
        stay = Split((whole,), stay_s, 0.0, stay_s)
        fits = group.rows <= stays.places.first[0]
        gain = self._spill.min_gain_fitting if fits else self._spill.min_gain
        bar_s = stay_s * (1.0 - gain)
        if alone.wave.fresh_s + alone.wave.each_s >= bar_s:
            return stay  # no worker could do even one row in time
        problem = _Problem(self._cost, group, workers, self._block_size)
        options = problem.options(owner, can_recompute=can_recompute)
        if len(options.slots) == 1:
            return stay
        places = options.places
        taken = np.zeros(len(options.slots), dtype=np.int64)
        work_weight = problem.work_weight
        split(group.rows, stay_s, bar_s, work_weight, max_parts, places, problem.wave, taken)
        if not taken.any():
            return stay
        shares = problem.shares(options, taken, stay_s)
        finish_s = max(
            float(places.starts_s[i]) + problem.span_s(options, i, int(taken[i]))
            for i in np.flatnonzero(taken).tolist()
        )
        work_s = float(places.works_s[taken > 0].sum())
        return Split(shares, finish_s, work_s, stay_s, bool(fits))


class _Options(NamedTuple):
    """The owner, then the shortlisted workers, the soonest first."""

    slots: list[int]
    hows: list[How]
    places: Places


class _Problem:
    """One fan-out in seconds, over all workers."""

    def __init__(self, cost: CostModel, group: RowGroup, workers: Workers, block_size: int) -> None:
        self._workers = workers
        self.work_weight = work_weight(cost, group.rows)
        suffix = group.suffix_tokens / group.rows
        shared = group.prefix_tokens // block_size
        tail = group.prefix_tokens % block_size + math.ceil(suffix) + group.steps
        own = max(1, -(-tail // block_size))
        steps = group.steps
        row_s = steps * (cost.step_row_s + cost.step_block_s * own)
        step_s = steps * cost.step_base_s
        fresh_s = step_s + steps * cost.step_block_s * shared
        self.wave = Wave(step_s, fresh_s, row_s + suffix * cost.prefill_token_s)
        self._busy_s: Seconds = steps * (
            cost.step_row_s * workers.rows + cost.step_block_s * workers.active_blocks
        )
        blocks = workers.num_blocks - shared
        free = (blocks - workers.active_blocks) // own
        self._first: Amounts = np.maximum(np.minimum(workers.max_rows - workers.rows, free), 0)
        self._later: Amounts = np.minimum(workers.max_rows, blocks // own)

    def span_s(self, options: _Options, at: int, rows: int) -> float:
        """Seconds from the start of `rows` rows at one of the options to the end of the last."""
        places = options.places
        busy_s = float(places.busy_s[at])
        return span(rows, busy_s, int(places.first[at]), int(places.later[at]), self.wave)

    def shares(self, options: _Options, taken: Amounts, stay_s: float) -> tuple[Share, ...]:
        """The rows in `taken`, each part with its prices."""
        shares = []
        for i in np.flatnonzero(taken).tolist():
            slot, rows, how = options.slots[i], int(taken[i]), options.hows[i]
            span_s = self.span_s(options, i, rows)
            queued_s = float(self._workers.queued_s[slot])
            migrate_s = max(queued_s, float(self._workers.pull_s[slot])) + span_s
            recompute_s = queued_s + float(self._workers.prefix_s[slot]) + span_s
            prices = Prices(stay_s, migrate_s, recompute_s)
            if how == "stay":
                prices = Prices(stay_s, stay_s, stay_s)
            shares.append(Share(slot, rows, how, prices))
        return tuple(shares)

    def options(self, owner: int, *, can_recompute: bool) -> _Options:
        """The workers that may take rows, when, and how the prefix gets there."""
        workers, weight = self._workers, self.work_weight
        starts = workers.queued_s + workers.prefix_s
        idle_s = np.where(workers.rows > 0, 0.0, self.wave.step_s)
        works = workers.prefix_s + workers.displaced_s + idle_s
        pulled = workers.may_pull.copy()
        pulled[owner] = False
        if pulled.any():
            pull_s = workers.pull_s
            pull_starts = np.maximum(workers.queued_s, pull_s)
            if can_recompute:
                pulled &= pull_starts + weight * pull_s < starts + weight * workers.prefix_s
            starts = np.where(pulled, pull_starts, starts)
            works = np.where(pulled, pull_s + workers.displaced_s + idle_s, works)
        usable = (workers.num_blocks > 0) & (self._later > 0)
        usable[owner] = False
        if not can_recompute:
            usable &= pulled
        slots = np.concatenate(([owner], self._nearest(np.flatnonzero(usable), starts)))
        listed = slots.tolist()
        hows: list[How] = ["migrate" if each else "recompute" for each in pulled[slots].tolist()]
        hows[0] = "stay"
        places = Places(
            starts[slots],
            works[slots],
            self._busy_s[slots],
            self._first[slots],
            np.maximum(self._later[slots], 1),
        )
        places.works_s[0] = 0.0
        return _Options(listed, hows, places)

    def _nearest(self, slots: Amounts, starts: Seconds) -> Amounts:
        """The shortlist: those of `slots` where one row would be done first; equal ones by slot."""
        first_wave = np.where(self._first > 0, 0.0, self.wave.step_s)
        rank = (starts + self._busy_s + first_wave)[slots]
        if slots.size > SHORTLIST:
            near = np.flatnonzero(rank <= np.partition(rank, SHORTLIST - 1)[SHORTLIST - 1])
            slots, rank = slots[near], rank[near]
        return slots[np.argsort(rank, kind="stable")[:SHORTLIST]]


def work_weight(cost: CostModel, rows: int) -> float:
    """The price per row of a second of work that staying would not take."""
    return max(0.0, cost.prefill_weight - 1.0) / rows
