"""Chooses among workers: gathers what each offers a request and lets the kernel price it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.router.cost import POLICIES, Cost
from mallee.router.kernels import score
from mallee.router.kernels.layout import Counts
from mallee.router.kernels.match import look
from mallee.router.kernels.score import Floats, choose
from mallee.router.paths import STRIDE, room_for_marks
from mallee.router.records import RouterConfig
from mallee.router.slots import Loads

WARM_UP_EVERY = 8  # one decision in so many may go to a new worker
WARM_UP_PRICE_S = 0.5  # if it is dearer by no more than this


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


class Choice(NamedTuple):
    """The chosen slot, and how it compares."""

    slot: int
    overlap_blocks: int
    best_overlap_blocks: int
    cost: Cost
    is_new: bool  # it was chosen because it is new


class Selection:
    """One router's way of choosing. `draw` gives floats in [0, 1)."""

    def __init__(self, config: RouterConfig, loads: Loads, draw: Callable[[], float]) -> None:
        self._loads = loads
        self._draw = draw
        width = loads.shape[1]
        self.indexed: Counts = np.zeros((3, width), dtype=np.int32)
        self.active: Counts = np.zeros(width, dtype=np.int32)
        self._spare: Floats = np.zeros((score.NUM_TERMS, width), dtype=np.float32)
        self._params = np.zeros(score.NUM_PARAMS, dtype=np.float64)
        self._needs_draw = False
        cost, params = config.cost, self._params
        for at, value in {
            score.POLICY: POLICIES[config.policy],
            score.BLOCK_SIZE: config.block_size,
            score.TOKEN_S: cost.prefill_token_s,
            score.PREFILL_WEIGHT: cost.prefill_weight,
            score.BASE_S: cost.step_base_s,
            score.ROW_S: cost.step_row_s,
            score.BLOCK_S: cost.step_block_s,
            score.BUSY_RATIO: config.busy_ratio,
            score.TEMPERATURE: config.temperature,
            score.HOST_BLOCK_S: cost.host_block_s,
            score.DISK_BLOCK_S: cost.disk_block_s,
        }.items():
            params[at] = value
        self.choose(Ask(1, 0, 1, 1, 1, 1), self._spare, now=0.0, width=0)  # compiles
        for hashes in (NO_HASHES, np.frombuffer(b"", dtype=np.uint64)):
            self.look(0, 0, hashes, room_for_marks(0), 0)
        self._needs_draw = config.temperature > 0.0 or config.policy == "random"

    def look(self, held: int, used: int, hashes: Hashes, marks: Hashes, tiers: int) -> None:
        """Fill `indexed`, for so many tiers, and `active` from the indexes at these addresses.

        And `marks` with those of the path.
        """
        keys, mark_keys = hashes.view(np.int64), marks.view(np.int64)
        look(held, used, keys, mark_keys, STRIDE, tiers, self.indexed, self.active)

    def choose(
        self,
        ask: Ask,
        terms: Floats,
        *,
        now: float,
        width: int,
        num_tiers: int = 1,
        prefers_new: bool = False,
    ) -> Choice | None:
        """The worker for `ask`, by `indexed` and `active`, with its prices in `terms`; None: nobody.

        `prefers_new`: a worker that joined lately is taken if it isn't much dearer.
        """
        params = self._params
        draw = self._draw() if self._needs_draw else 0.0
        params[: score.NUM_ASKED] = (*ask, now, 0.0, draw, width, num_tiers)
        slot = choose(params, self._loads, self.indexed, self.active, terms)
        if slot < 0:
            return None
        best_overlap = int(params[score.BEST_OVERLAP])
        new_slot = self._new_one(slot, terms) if prefers_new else -1
        is_new = new_slot >= 0 and new_slot != slot
        if is_new:
            slot = new_slot
        overlap, queued, prefill, decode, fetch, _ = terms[:, slot].tolist()
        return Choice(
            slot, int(overlap), best_overlap, Cost(queued, prefill, decode, fetch), is_new
        )

    def queued_s(self, now: float, width: int) -> npt.NDArray[np.float64]:
        """Seconds of prefill that wait on each worker, as the kernel prices them: [width]."""
        loads, token_s = self._loads[:, :width], float(self._params[score.TOKEN_S])
        unconfirmed = loads[score.PREFILL] * token_s
        left = np.minimum(unconfirmed, loads[score.PREFILL_ENDS] - now)
        extra = loads[score.EXTRA_PREFILL] * token_s
        queued: npt.NDArray[np.float64] = np.maximum(left, unconfirmed * score.UNCONFIRMED) + extra
        return queued

    def num_fitting(self) -> int:
        """Workers that the last request fitted, busy or not."""
        return int(self._params[score.NUM_FITTING])

    def _new_one(self, slot: int, terms: Floats) -> int:
        """The best worker that joined lately, or -1 if there is none or it is much dearer."""
        self._params[score.NEW_ONLY] = 1.0
        found = choose(self._params, self._loads, self.indexed, self.active, self._spare)
        self._params[score.NEW_ONLY] = 0.0
        if found < 0:
            return -1
        dearer = float(terms[score.TOTAL, found] - terms[score.TOTAL, slot])
        return int(found) if dearer <= WARM_UP_PRICE_S else -1
