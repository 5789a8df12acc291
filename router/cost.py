"""What a request would cost on each worker, as one number in seconds.

Per row of the request (a request with n branches has n rows):

    queued    prefill tokens booked before it            x seconds per prefill token
    prefill   its own uncached prompt tokens             x seconds per prefill token x weight
    decode    steps x (base + step time of the load already there
                       + step time that the request adds x (rows there + own rows) / own rows)

A decode step takes base + row x rows + block x unique active blocks (attention reads a shared block
once). The last term is what the newcomer makes everybody on that worker wait, itself included: with
overlap alone, all children of a popular prefix pile up on one worker. `base` is the same everywhere
and never decides. The weight is there because computing a token costs twice: the request waits for
it, and so does whatever comes next. Without it, waiting for a prefix that is being computed and
computing it again elsewhere would cost the same, and siblings that arrive cold would each do so.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.router.slots import Amounts, Loads

Seconds: TypeAlias = npt.NDArray[np.floating[Any]]


_FIGURES = ("prefill_token_s", "prefill_weight", "step_base_s", "step_row_s", "step_block_s")


@dataclass(frozen=True, slots=True)
class CostModel:
    """Timing of one worker; the defaults are the order of an 8B model in bf16 on a large GPU.

    Only ratios decide where a request goes. `expected_output_tokens` caps how many decode steps are
    priced, because `max_tokens` is often left at the rest of the context window. Raises ValueError
    for a negative or non-finite figure.
    """

    prefill_token_s: float = 5e-5
    prefill_weight: float = 2.0
    step_base_s: float = 5e-3
    step_row_s: float = 5e-5
    step_block_s: float = 1e-6
    expected_output_tokens: int = 256

    def __post_init__(self) -> None:
        for name in _FIGURES:
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be finite and at least 0")
        if self.expected_output_tokens < 0:
            raise ValueError(
                f"expected_output_tokens={self.expected_output_tokens}: must be at least 0"
            )

    def steps(self, max_tokens: int) -> int:
        """Decode steps that a request with this limit is priced at."""
        return min(max_tokens, self.expected_output_tokens)


class Demand(NamedTuple):
    """What a request would add to each worker."""

    prefill_tokens: Amounts  # [num_workers], uncached prompt tokens
    new_blocks: Amounts  # [num_workers], blocks not active there yet
    rows: int  # >= 1
    steps: int


class Cost(NamedTuple):
    """The terms of one worker's price, in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.queued_s + self.prefill_s + self.decode_s


class Costs(NamedTuple):
    """The terms for all workers, each float64[num_workers]."""

    queued_s: Seconds
    prefill_s: Seconds
    decode_s: Seconds

    @property
    def total_s(self) -> Seconds:
        return self.queued_s + self.prefill_s + self.decode_s

    def at(self, worker: int) -> Cost:
        return Cost(
            float(self.queued_s[worker]),
            float(self.prefill_s[worker]),
            float(self.decode_s[worker]),
        )


def price(model: CostModel, loads: Loads, demand: Demand) -> Costs:
    """The cost of `demand` on every worker under `loads` (which exclude it)."""
    rows = demand.rows
    there = model.step_row_s * loads.rows + model.step_block_s * loads.active_blocks
    added = model.step_row_s * rows + model.step_block_s * demand.new_blocks
    step = model.step_base_s + there + added * ((loads.rows + rows) / rows)
    return Costs(
        queued_s=model.prefill_token_s * loads.prefill_tokens,
        prefill_s=model.prefill_token_s * model.prefill_weight * demand.prefill_tokens,
        decode_s=demand.steps * step,
    )
