"""Prices of a request on every worker, in seconds, and the choice among them.

Per row of the request (a request with n branches has n rows):

    queued    prefill tokens booked before it            x seconds per prefill token
    prefill   its own uncached prompt tokens             x seconds per prefill token x weight
    decode    steps x (base + step time of the load already there
                       + step time that the request adds x (rows there + own rows) / own rows)
    fetch     seconds until a lower tier's moves under way are over + blocks x seconds per block
    pull      latency + blocks that another worker lends x seconds per block
    displaced blocks that give way to its text x seconds to compute one again x displaced weight

A decode step takes base + row x rows + block x unique active blocks (attention reads a shared block
once). Its last part is the delay that the new request adds to every row there, its own included: with
overlap alone, all children of a popular prefix pile up on one worker. `base` is the same everywhere
and never decides. The weight is there because computing a token costs twice: the request waits for
it, and so do later requests. Without it, waiting for a prefix that is being computed and
computing it again elsewhere would cost the same, and siblings that arrive cold would each do so.
On the home of the request's prompt cache key the weight is 1 (`placement.affinity`).

Memory has a price: what a text displaces is asked for again, probably. It displaces what it brings to a
worker, now and in its next turns (`load.prompts`), beyond the blocks that are free there and not spoken for,
by prompts that are being computed or by the next turns of texts that are there. At the home of its key it
pays for what it displaces now. Where a tier below holds what gives way, the price is that of fetching. A
beginning that other texts share is computed once more for all of them: of a copy a text pays the share
1 / (1 + uses so far / workers). So new texts spread while memory is free somewhere, stay where they began,
and take copies of what they share along where that pays.

Blocks below a device count as overlap as far as their worker will fetch them: it computes them where
that is cheaper by its own figures. Seconds of fetches and pulls are those that a worker measured and tells
with its load; the config's for one that tells none.

Workers that lend (`Lease.serves_kv`) pull the blocks that others of them have of the prompt, as far as these
take less time than computing: a request waits for a worker that has its prefix, goes to another that pulls it
(*move*), or to one that computes it (*recompute*), whichever is the cheapest. From whom: `placement.pulls`.

`router.placement.kernels.score` does the sums, for all workers in one pass. Fan-outs are split by the
same terms (`queued`, `overlap` and `fetch` of that pass) and the same weight: `fanout_pricing`.
"""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.router.config import Policy, RouterConfig
from mallee.router.index.kernels.layout import Counts
from mallee.router.load import layout
from mallee.router.load.kernels import Loads
from mallee.router.load.prompts import Seen
from mallee.router.placement.kernels import score
from mallee.router.placement.kernels.score import Floats

POLICIES: Final[dict[Policy, int]] = {
    "cost": score.COST,
    "dynamo": score.DYNAMO,
    "round_robin": score.ROUND_ROBIN,
    "random": score.RANDOM,
    "least_loaded": score.LEAST_LOADED,
    "prefix_only": score.PREFIX_ONLY,
}

WARM_UP_PRICE_S: Final = 0.5  # a new worker is preferred if it is dearer by no more than this


class Cost(NamedTuple):
    """The terms of one worker's price, in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float
    fetch_s: float = 0.0
    displaced_s: float = 0.0
    pull_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)


class Demand(Struct, frozen=True, gc=False):
    """The needs of a request, in the order in which the kernel reads them."""

    prompt_tokens: int
    num_blocks: int  # full blocks of the prompt
    own_blocks: int  # blocks that no other request shares
    needed_blocks: int  # a worker must have at least so many
    rows: int
    steps: int
    fixed_prefill: int = -1  # tokens to compute wherever it goes; -1: those beyond the overlap
    only: int = -1  # slot of the one worker that is allowed; -1: any
    may_wait: float = 0.0  # 1: busy workers are out
    home: int = -1  # slot of the worker of its prompt cache key; -1: none
    growth: float = (
        1.0  # blocks that its text brings with the later ones, for each that it brings now
    )
    shared_blocks: int = 0  # leading ones that other texts begin with, too
    copy_share: float = 1.0  # of computing these again that it pays for: later texts use the copy


class Offers(Struct, frozen=True):
    """One prompt as every worker has it, in leading blocks. Its placer's next match overwrites it."""

    waypoints: Hashes  # of the prompt's path: `router.load.paths`
    held: Counts  # [num_tiers, max_workers], cumulative over tiers, with predictions
    active: Counts  # [max_workers] in use by running requests
    seen: Seen = Seen(0, 0, False)
    matched: Counts | None = None
    """[max_workers] in device memory, where not all can be gone on from."""


class Choice(Struct, frozen=True):
    """The chosen slot, and how it compares."""

    slot: int
    overlap_blocks: int
    best_overlap_blocks: int
    cost: Cost
    is_new: bool  # it was chosen because it is new
    terms: Floats  # of every worker, as the kernel priced them
    pulled_blocks: int  # beyond the overlap, from other workers


class Pricer:
    """Prices demands by the loads of the workers. `draw` gives floats in [0, 1)."""

    def __init__(self, config: RouterConfig, loads: Loads, draw: Callable[[], float]) -> None:
        self._loads = loads
        self._draw = draw
        self._params = np.zeros(score.NUM_PARAMS, dtype=np.float64)
        # The same numbers: a single one is read in a fifth of the time.
        self._cells = cast("memoryview[float]", self._params.data)
        self._pack = struct.Struct(f"{score.NUM_ASKED}d").pack_into
        self._chosen = struct.Struct(f"{8 * score.P_CHOSEN}x{score.NUM_TERMS}d").unpack_from
        self._shape = (score.NUM_TERMS, loads.shape[1])
        self._needs_draw = False
        cost, params = config.cost, self._params
        for at, value in {
            score.P_POLICY: POLICIES[config.policy],
            score.P_BLOCK_SIZE: config.block_size,
            score.P_TOKEN_S: cost.prefill_token_s,
            score.P_PREFILL_WEIGHT: cost.prefill_weight,
            score.P_DISPLACED_WEIGHT: cost.displaced_weight,
            score.P_BASE_S: cost.step_base_s,
            score.P_ROW_S: cost.step_row_s,
            score.P_BLOCK_S: cost.step_block_s,
            score.P_BUSY_RATIO: config.busy_ratio,
            score.P_TEMPERATURE: config.temperature,
            score.P_HOST_BLOCK_S: cost.host_block_s,
            score.P_DISK_BLOCK_S: cost.disk_block_s,
            score.P_PULL_FIRST_S: config.spill.migrate_latency_s,
            score.P_PULL_BLOCK_S: config.spill.block_s,
        }.items():
            params[at] = value
        nothing = np.zeros((1, loads.shape[1]), dtype=np.int32)  # compiles, as no request should
        self.choose(
            Demand(1, 0, 1, 1, 1, 1), Offers(NO_HASHES, nothing, nothing[0]), now=0.0, width=0
        )
        score.cheapest_of(params, loads, nothing[0].astype(np.float32))
        self._needs_draw = config.temperature > 0.0 or config.policy == "random"

    def choose(
        self,
        demand: Demand,
        offers: Offers,
        *,
        now: float,
        width: int,
        prefers_new: bool = False,
    ) -> Choice | None:
        """The worker for `demand` among slots 0 .. width - 1; None if it may go to none now.

        `prefers_new`: a worker that joined lately is taken if it isn't much dearer.
        """
        params, held = self._params, offers.held
        draw = self._draw() if self._needs_draw else 0.0
        self._pack(self._cells, 0, *astuple(demand), now, draw, width, len(held))
        terms = np.empty(self._shape, np.float32)
        slot = score.choose(params, self._loads, held, offers.active, terms)
        if slot < 0:
            return None
        is_new = False
        if prefers_new:
            is_old = self._loads[layout.LOAD_WARM_AT] <= now
            totals = np.where(is_old, np.float32(np.inf), terms[score.TERM_TOTAL])
            new = score.cheapest_of(params, self._loads, totals)
            if new not in (-1, slot):
                is_new = (
                    float(terms[score.TERM_TOTAL, new] - terms[score.TERM_TOTAL, slot])
                    <= WARM_UP_PRICE_S
                )
                slot = new if is_new else slot
        chosen = terms[:, slot].tolist() if is_new else self._chosen(self._cells)
        overlap, pulled, *seconds, _ = chosen
        return Choice(
            slot=slot,
            overlap_blocks=int(overlap),
            best_overlap_blocks=int(self._cells[score.P_BEST_OVERLAP]),
            cost=Cost(*seconds),
            is_new=is_new,
            terms=terms,
            pulled_blocks=int(pulled),
        )
