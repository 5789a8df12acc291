"""What a request would cost on each worker, as one number in seconds.

Per row of the request (a request with n branches has n rows):

    queued    prefill tokens booked before it            x seconds per prefill token
    prefill   its own uncached prompt tokens             x seconds per prefill token x weight
    decode    steps x (base + step time of the load already there
                       + step time that the request adds x (rows there + own rows) / own rows)
    fetch     blocks to bring back from host memory or disk x seconds per block

A decode step takes base + row x rows + block x unique active blocks (attention reads a shared block
once). Its last part is what the newcomer makes everybody on that worker wait, itself included: with
overlap alone, all children of a popular prefix pile up on one worker. `base` is the same everywhere
and never decides. The weight is there because computing a token costs twice: the request waits for
it, and so does whatever comes next. Without it, waiting for a prefix that is being computed and
computing it again elsewhere would cost the same, and siblings that arrive cold would each do so.

The sums are done by `router.placement.kernels.score`, for all workers in one pass.
"""

import math
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.router.config import CostModel, Policy, SpillModel
from mallee.router.placement.kernels import score
from mallee.router.placement.kernels.spill import Places, Wave, span

POLICIES: Final[dict[Policy, int]] = {
    "cost": score.COST,
    "dynamo": score.DYNAMO,
    "round_robin": score.ROUND_ROBIN,
    "random": score.RANDOM,
    "least_loaded": score.LEAST_LOADED,
    "prefix_only": score.PREFIX_ONLY,
}


class Cost(NamedTuple):
    """The terms of one worker's price, in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float
    fetch_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class Ask(NamedTuple):
    """What a request wants of a worker."""

    prompt_tokens: int
    num_blocks: int  # full blocks of the prompt
    own_blocks: int  # that nobody shares
    needed_blocks: int  # that a worker must have, at least
    rows: int
    steps: int
    fixed_prefill: int = -1  # tokens to compute wherever it goes; -1: what the overlap leaves
    only: int = -1  # slot
    may_wait: float = 0.0  # 1: not on busy workers
    allowed_by: float = 0.0  # number of an allow list; 0: anybody


How: TypeAlias = Literal["stay", "migrate", "recompute"]


Amounts: TypeAlias = npt.NDArray[np.int64]


Seconds: TypeAlias = npt.NDArray[np.float64]


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
