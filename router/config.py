"""Settings of a router: weights of its prices, of spills, and its limits."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from mallee.protocol.hashing import BLOCK_SIZE


def check_figures(
    owner: object, names: Iterable[str], is_good: Callable[[float], bool], rule: str
) -> None:
    """Raises ValueError naming the first of these fields of `owner` that breaks `rule`."""
    for name in names:
        value = getattr(owner, name)
        if not is_good(value):
            raise ValueError(f"{name}={value}: must be {rule}")


def _check_rates(owner: object, *names: str) -> None:
    check_figures(owner, names, lambda x: 0.0 <= x < math.inf, "finite and at least 0")


@dataclass(frozen=True, slots=True)
class SpillModel:
    """Price of moving a prefix, and the margins that a split must win by.

    The defaults: an 8B model with 8 KV heads in bf16 (2 MiB a block of 16 tokens), 25 GB/s a pull.
    `min_gain`: share of the staying time that a split must save; `min_gain_fitting`: where the whole
    fan-out could run at once beside what runs there. Raises ValueError for a figure out of range.
    """

    migrate_latency_s: float = 2e-3
    migrate_byte_s: float = 4e-11
    kv_block_nbytes: int = 2 << 20
    min_gain: float = 1 / 3
    min_gain_fitting: float = 2 / 3

    def __post_init__(self) -> None:
        _check_rates(self, "migrate_latency_s", "migrate_byte_s")
        gains = ("min_gain", "min_gain_fitting")
        check_figures(self, gains, lambda x: 0.0 <= x < 1.0, "at least 0 and below 1")
        check_figures(self, ("kv_block_nbytes",), lambda x: x >= 1, "at least 1")

    @property
    def block_s(self) -> float:
        """Seconds to pull a block, once the first byte is there."""
        return self.kv_block_nbytes * self.migrate_byte_s


Policy: TypeAlias = Literal[
    "cost", "dynamo", "round_robin", "random", "least_loaded", "prefix_only"
]
"""The rule of the choice. cost: the seconds above. dynamo: the formula of NVIDIA Dynamo 1.6 with its
default weights, in blocks, to compare with. The others are baselines.
"""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Timing of one worker; the defaults fit Llama 3.1 8B in bf16 under vLLM on one H200.

    Prefill and steps are a fit to AIConfigurator's static table;
    for other models and devices run one and set them. Only ratios decide where a request goes.
    `expected_output_tokens` caps how many decode steps are priced, because `max_tokens` is often left at
    the rest of the context window. `displaced_weight`: seconds for each second of computing again what a
    placement evicts, the chance that it is asked for again (0.7) x `prefill_weight`; 0: memory is free. The
    block times are 2 MiB of KV over 25 and 4 GB/s. Raises ValueError for a negative or non-finite figure.
    """

    prefill_token_s: float = 2.2e-5
    prefill_weight: float = 2.0
    displaced_weight: float = 1.4
    step_base_s: float = 4.8e-3
    step_row_s: float = 1.3e-5
    step_block_s: float = 4.6e-7
    host_block_s: float = 8e-5
    disk_block_s: float = 5e-4
    expected_output_tokens: int = 256

    def __post_init__(self) -> None:
        _check_rates(self, *(each.name for each in fields(self)))

    def steps(self, max_tokens: int) -> int:
        """Decode steps that a request with this limit is priced at."""
        return min(max_tokens, self.expected_output_tokens)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Raises ValueError for a size or time that is not positive, or an unknown policy.

    `policy` and `temperature`: how the cheapest is chosen (0: always it; ties go to the worker chosen
    longest ago). `busy_ratio`: rows booked on a worker, as a share of its batch, beyond which requests
    that may wait do. `max_index_nbytes`: beyond it the blocks used longest ago are forgotten.
    `booking_s`: after so long without a sign of its request a booking is dropped. `kv_events`,
    `active_blocks`: knowledge of workers' caches and of running requests can each be switched off.
    """

    block_size: int = BLOCK_SIZE
    max_workers: int = 1024
    lease_s: float = 3.0
    cost: CostModel = field(default_factory=CostModel)
    spill: SpillModel = field(default_factory=SpillModel)
    policy: Policy = "cost"
    temperature: float = 0.0
    busy_ratio: float = 1.0
    max_index_nbytes: int = 4 << 30
    booking_s: float = 600.0
    kv_events: bool = True
    active_blocks: bool = True

    def __post_init__(self) -> None:
        check_figures(self, ("block_size", "max_workers"), lambda x: x >= 1, "at least 1")
        check_figures(self, ("lease_s", "busy_ratio", "booking_s"), lambda x: x > 0.0, "above 0")
        _check_rates(self, "temperature")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r}: choose one of {', '.join(get_args(Policy))}")
