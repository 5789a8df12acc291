"""How many rows of a fan-out stay with the worker that holds their prefix, and how many go where.

Every row of a fan-out waits for the slowest of its siblings, and one worker runs only `max_rows` of
them at a time. So rows may leave it (*spill*) for workers that first get the prefix: they *migrate* it
(pull its bytes) or *recompute* it. All in seconds, with the figures of `router.cost`:

    wait       queued prefill there + suffixes of the part + waves of decode steps
    recompute  the same elsewhere, after the prefix tokens that are missing there
    migrate    the same elsewhere, after latency + bytes (pulls don't slow one another: a link each)

Chosen is the split with the least

    finish of the slowest row + work_weight x seconds of GPUs and links that staying would not take:
                                copies of the prefix, decode steps of workers that would be idle

among those that keep within each deadline of a geometric scale, on which each worker's rows are known
in closed form and the fewest workers that together take all rows are found by sorting. A scale of 4 %
steps, then a search within the best step: within 4 % of the best split under this model. A split must
beat staying by a margin, because staying has a value beyond this request: the next turn of the tree
finds everything in one place.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.router.cost import CostModel
from mallee.router.kernels.spill import Places, Wave, span, split

How: TypeAlias = Literal["stay", "migrate", "recompute"]
Amounts: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]

_RATES: Final = ("migrate_latency_s", "migrate_byte_s", "work_weight")


@dataclass(frozen=True, slots=True)
class SpillModel:
    """What spilling costs and when it is worth it.

    The defaults: an 8B model with 8 KV heads in bf16 (2 MiB a block of 16 tokens), 25 GB/s a pull.
    `min_gain`: share of the staying time that a split must save; `min_gain_fitting`: where the whole
    fan-out could run at once beside what runs there. Raises ValueError for a figure out of range.
    """

    migrate_latency_s: float = 2e-3
    migrate_byte_s: float = 4e-11
    kv_block_nbytes: int = 2 << 20
    work_weight: float = 0.05
    min_gain: float = 1 / 3
    min_gain_fitting: float = 2 / 3
    max_parts: int = 64
    shortlist: int = 64

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be finite and at least 0")
        for name in ("min_gain", "min_gain_fitting"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}={value}: must be at least 0 and below 1")
        for name in ("kv_block_nbytes", "max_parts", "shortlist"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")


class Fanout(NamedTuple):
    """Rows that continue one prefix."""

    rows: int  # >= 1
    prefix_tokens: int
    suffix_tokens: int  # of all rows together
    steps: int  # decode steps expected of each row


class Workers(NamedTuple):
    """What is known of each worker, [num_workers]; the index is its table slot."""

    queued_s: Seconds  # prefill booked there, in seconds
    rows: Amounts
    active_blocks: Amounts
    max_rows: Amounts
    num_blocks: Amounts  # 0: gets no rows
    held_tokens: Amounts  # leading tokens of the prefix that are there

    def only(self, slot: int) -> "Workers":
        """One of them, as worker 0 of one."""
        one = slice(slot, slot + 1)
        return Workers(
            self.queued_s[one],
            self.rows[one],
            self.active_blocks[one],
            self.max_rows[one],
            self.num_blocks[one],
            self.held_tokens[one],
        )


class Prices(NamedTuple):
    """When the last row of a part would be done, each way, from now on; allowed or not."""

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
    """What `SpillPlanner.plan` chose. The owner's share, if it has one, comes first."""

    shares: tuple[Share, ...]
    finish_s: float  # of the slowest row, predicted
    work_s: float  # seconds of GPUs and links that staying would not take
    stay_s: float  # finish of the slowest row if all had stayed

    @property
    def is_spilled(self) -> bool:
        return any(share.how != "stay" for share in self.shares)


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


class _Options(NamedTuple):
    """The owner, then the shortlisted workers, the soonest first."""

    slots: list[int]
    hows: list[How]
    places: Places


class _Problem:
    """One fan-out in seconds, over all workers."""

    def __init__(
        self, cost: CostModel, spill: SpillModel, fanout: Fanout, workers: Workers, block_size: int
    ) -> None:
        self._spill = spill
        self._workers = workers
        suffix = fanout.suffix_tokens / fanout.rows
        shared = fanout.prefix_tokens // block_size
        tail = fanout.prefix_tokens % block_size + math.ceil(suffix) + fanout.steps
        own = max(1, -(-tail // block_size))
        steps = fanout.steps
        row_s = steps * (cost.step_row_s + cost.step_block_s * own)
        step_s = steps * cost.step_base_s
        fresh_s = step_s + steps * cost.step_block_s * shared
        self.wave = Wave(step_s, fresh_s, row_s + suffix * cost.prefill_token_s)
        missing = np.maximum(fanout.prefix_tokens - workers.held_tokens, 0)
        self._recompute_s: Seconds = missing * cost.prefill_token_s
        self._pull_s = (
            spill.migrate_latency_s + shared * spill.kv_block_nbytes * spill.migrate_byte_s
        )
        self._busy_s: Seconds = steps * (
            cost.step_row_s * workers.rows + cost.step_block_s * workers.active_blocks
        )
        blocks = workers.num_blocks - shared
        free = (blocks - workers.active_blocks) // own
        self._first: Amounts = np.maximum(np.minimum(workers.max_rows - workers.rows, free), 0)
        self._later: Amounts = np.minimum(workers.max_rows, blocks // own)

    def span_s(self, options: _Options, at: int, rows: int) -> float:
        places = options.places
        busy_s, first, later = (
            float(places.busy_s[at]),
            int(places.first[at]),
            int(places.later[at]),
        )
        return span(rows, busy_s, first, later, self.wave)

    def shares(self, options: _Options, taken: Amounts, stay_s: float) -> tuple[Share, ...]:
        """The rows in `taken`, each part with its prices."""
        shares = []
        for i in np.flatnonzero(taken).tolist():
            slot, rows, how = options.slots[i], int(taken[i]), options.hows[i]
            span_s = self.span_s(options, i, rows)
            queued_s = float(self._workers.queued_s[slot])
            migrate_s = max(queued_s, self._pull_s) + span_s
            recompute_s = queued_s + float(self._recompute_s[slot]) + span_s
            prices = Prices(stay_s, migrate_s, recompute_s)
            if how == "stay":
                prices = Prices(stay_s, stay_s, stay_s)
            shares.append(Share(slot, rows, how, prices))
        return tuple(shares)

    def options(self, owner: int, *, can_recompute: bool, can_migrate: bool) -> _Options:
        """Who may take rows, when, and how the prefix gets there."""
        workers, weight = self._workers, self._spill.work_weight
        starts = workers.queued_s + self._recompute_s
        idle_s = np.where(workers.rows > 0, 0.0, self.wave.step_s)
        works = self._recompute_s + idle_s
        pulled = np.zeros(starts.size, dtype=np.bool_)
        if can_migrate:
            pull_starts = np.maximum(workers.queued_s, self._pull_s)
            pulled = pull_starts + weight * self._pull_s < starts + weight * self._recompute_s
            if not can_recompute:
                pulled[:] = True
            pulled[owner] = False
            starts = np.where(pulled, pull_starts, starts)
            works = np.where(pulled, self._pull_s + idle_s, works)
        usable = (workers.num_blocks > 0) & (self._later > 0)
        usable[owner] = False
        if not (can_recompute or can_migrate):
            usable[:] = False
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
        most = self._spill.shortlist
        first_wave = np.where(self._first > 0, 0.0, self.wave.step_s)
        rank = (starts + self._busy_s + first_wave)[slots]
        if slots.size > most:
            near = np.flatnonzero(rank <= np.partition(rank, most - 1)[most - 1])
            slots, rank = slots[near], rank[near]
        return slots[np.argsort(rank, kind="stable")[:most]]
