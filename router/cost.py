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

The sums are done by `router.kernels.score`, for all workers in one pass.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from mallee.router.kernels import score

Policy: TypeAlias = Literal[
    "cost", "dynamo", "round_robin", "random", "least_loaded", "prefix_only"
]
"""How a worker is chosen. cost: the seconds above. dynamo: the formula of NVIDIA Dynamo 1.6 with its
default weights, in blocks, to compare with. The others are baselines.
"""

POLICIES: Final[dict[Policy, int]] = {
    "cost": score.COST,
    "dynamo": score.DYNAMO,
    "round_robin": score.ROUND_ROBIN,
    "random": score.RANDOM,
    "least_loaded": score.LEAST_LOADED,
    "prefix_only": score.PREFIX_ONLY,
}

_FIGURES = (
    "prefill_token_s",
    "prefill_weight",
    "step_base_s",
    "step_row_s",
    "step_block_s",
    "host_block_s",
    "disk_block_s",
)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Timing of one worker; the defaults fit Llama 3.1 8B in bf16 under vLLM on one H200.

    Prefill and steps are a fit to AIConfigurator's static table (`bench/stub_fleet.py` has the points);
    for other models and devices run one and set them. Only ratios decide where a request goes.
    `expected_output_tokens` caps how many decode steps are priced, because `max_tokens` is often left at
    the rest of the context window. The block times are 2 MiB of KV over 25 and 4 GB/s. Raises
    ValueError for a negative or non-finite figure.
    """

    prefill_token_s: float = 2.2e-5
    prefill_weight: float = 2.0
    step_base_s: float = 4.8e-3
    step_row_s: float = 1.3e-5
    step_block_s: float = 4.6e-7
    host_block_s: float = 8e-5
    disk_block_s: float = 5e-4
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


class Cost(NamedTuple):
    """The terms of one worker's price, in seconds."""

    queued_s: float
    prefill_s: float
    decode_s: float
    fetch_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(self)
