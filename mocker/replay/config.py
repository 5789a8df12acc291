"""The settings of a replay beside its workload."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from mallee.mocker.device import DeviceConfig
from mallee.mocker.links import LinkConfig
from mallee.mocker.prices import cost_model
from mallee.mocker.replay.fleet.faults import Fault
from mallee.mocker.tiers import TierConfig
from mallee.mocker.timing import Timing, load_timing
from mallee.mocker.timing.profiles import DEFAULT_TIMING, gpus_of
from mallee.protocol.errors import ConfigError
from mallee.protocol.model import GroupSpec
from mallee.router.config import CostModel, Policy, RouterConfig
from mallee.router.dispatch.queue import AdmissionConfig
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.values import DISK, HOST

POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)

MAX_BLOCKS: Final = 1 << 30  # of all engines; each takes a byte at least
_UNLIMITED: Final = 1 << 40
_ENGINE: Final = EngineConfig(SchedulerConfig(max_waiting=_UNLIMITED))
_ADMISSION: Final = AdmissionConfig(_UNLIMITED, _UNLIMITED, max_wait_s=1e12)

RULES: Final = ("mallee", "vllm")
_OF_OURS: Final = ("prefill_engines", "can_migrate", "tiers", "state_nbytes", "retain_s")
_AT_LEAST_1 = ("engines", "kv_tokens", "max_rows", "max_step_tokens", "gateways")
_AT_LEAST_0 = (
    *("block_size", "concurrency", "max_requests", "max_output_tokens", "prefill_engines", "seed"),
    *("event_lag_s", "booking_lag_s", "detect_s", "answer_capsules", "retain_s"),
    "state_nbytes",
)
_ABOVE_0 = ("speedup", "slo_ttft_s", "slo_itl_s")


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The fleet and how requests arrive. Values; may be sent to another process.

    `rules`: whose the engines follow, Mallee's or vLLM's (`mocker.vllm`). `kv_tokens` of each
    engine; only whole blocks count.
    `block_size` 0: as many tokens as an id of the workload stands for. `speedup`: arrivals come so much
    faster than recorded. `concurrency`: so many requests are under way at most, and arrival times
    don't count (0: open loop, by arrival times). `max_requests`, `max_output_tokens`: 0 for no limit.
    The lags are seconds until a worker's events reach a router, and bookings another gateway;
    `detect_s` until a gateway notices that a worker died.

    `engine`, `routing` and `admission` are a live fleet's, but for what has a field of its own here. Routers
    price by `timing`, or by `prices` if that is given, and by what `cost` says otherwise. `timed` replaces
    fields of the timing.
    """

    engines: int = 4
    rules: str = "mallee"
    policy: str = "cost"
    kv_tokens: int = 1_048_576
    block_size: int = 0
    timing: str | Timing = DEFAULT_TIMING
    speedup: float = 1.0
    concurrency: int = 0
    keeps_order: bool = True  # requests that wait for others start when those have ended
    gateways: int = 1
    event_lag_s: float = 0.0
    booking_lag_s: float = 0.0
    detect_s: float = 0.0
    max_rows: int = 256
    max_step_tokens: int = 8192
    max_requests: int = 0
    max_output_tokens: int = 0
    answer_capsules: int = 256  # that an engine keeps for forks to come, where the workload has any
    retain_s: float = 0.0  # that requests of sessions want their text retained after its last use
    prefill_engines: int = 0  # of the engines, so many only compute prompts
    shared_reads: bool = (
        True  # rows read the blocks that they share once, also if the timing has it otherwise
    )
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.05
    faults: tuple[Fault, ...] = ()
    tiers: TierConfig | None = None
    link: LinkConfig = field(default_factory=LinkConfig)  # over which KV moves between workers
    device: DeviceConfig = field(default_factory=DeviceConfig)  # that engines share
    state_nbytes: int = 0  # of recurrent layers, after a token; 0: the model has none
    can_migrate: bool = False  # workers lend each other KV, where that is cheaper than computing
    engine: EngineConfig = _ENGINE
    routing: RouterConfig = field(default_factory=RouterConfig)
    admission: AdmissionConfig = _ADMISSION
    prices: str | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    timed: Mapping[str, float] = field(default_factory=dict)
    syncs_bookings: bool = True
    max_model_len: int = 1 << 24
    seed: int = 0

    def validate(self) -> "ReplayConfig":
        """Itself. Raises ConfigError naming what is out of range and what may be given."""
        for names, least in ((_AT_LEAST_1, 1), (_AT_LEAST_0, 0)):
            for name in names:
                if not least <= getattr(self, name) < float("inf"):
                    raise ConfigError(f"{name}={getattr(self, name)}: give at least {least}")
        for name in _ABOVE_0:
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)}: give more than 0")
        self.engine.validate()
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r}: give one of {', '.join(POLICIES)}")
        if self.prefill_engines >= self.engines:
            raise ConfigError(
                f"prefill_engines={self.prefill_engines} of engines={self.engines}: leave at least"
                " one to decode"
            )
        if self.rules not in RULES:
            raise ConfigError(f"rules={self.rules!r}: give one of {', '.join(RULES)}")
        if self.rules == "vllm":
            for name in _OF_OURS:
                if value := getattr(self, name):
                    raise ConfigError(
                        f"{name}={value} with the rules of vLLM: only Mallee's engine has that; leave it out"
                    )
        self.link.validate()
        self.device.validate()
        if self.prefill_engines and self.gateways > 1:
            raise ConfigError(
                f"prefill_engines={self.prefill_engines} with gateways={self.gateways}: gateways tell"
                " each other of one kind of workers only; set gateways to 1"
            )
        if self.tiers is not None:
            self.tiers.validate()
        return self

    @property
    def gpus(self) -> int:
        """GPUs of the fleet, as many for each device as the timing's model is spread over."""
        ranks = gpus_of(self.timing) if isinstance(self.timing, str) else 1
        return -(-self.engines // self.device.engines) * ranks

    @property
    def are_synced(self) -> bool:
        """Whether gateways tell each other of their bookings."""
        return self.gateways > 1 and self.syncs_bookings

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Layers that keep other things than the KV of all tokens, after those; () if none do."""
        if not self.state_nbytes:
            return ()
        return (
            GroupSpec(kind="full", layers=(0,), nbytes=self.link.token_nbytes),
            GroupSpec(kind="state", layers=(1,), nbytes=self.state_nbytes),
        )

    def block_tokens(self, id_tokens: int) -> int:
        """Tokens of an engine's block. Raises ConfigError if ids and blocks don't fit together."""
        size = self.block_size or id_tokens
        if size % id_tokens and id_tokens % size:
            raise ConfigError(
                f"block_size={size}: the trace names {id_tokens} tokens at a time; give a divisor or a"
                f" multiple of {id_tokens}"
            )
        return size

    def num_blocks(self, block_size: int) -> int:
        """Blocks of an engine. Raises ConfigError for less than one, or too many of all engines."""
        if self.kv_tokens < block_size:
            raise ConfigError(
                f"kv_tokens={self.kv_tokens}: give at least a block of {block_size} tokens"
            )
        num = self.kv_tokens // block_size
        if self.engines * num > MAX_BLOCKS:
            raise ConfigError(
                f"engines={self.engines} with kv_tokens={self.kv_tokens} each: the books of more than"
                f" {MAX_BLOCKS:,} blocks don't fit into memory; give fewer, or larger ones"
            )
        return num

    def load_timing(self) -> Timing:
        """Raises ConfigError if there is none of that name."""
        timing = self.timing
        if not isinstance(timing, Timing):
            timing = load_timing(timing, kv_tokens=self.kv_tokens)
        timed: dict[str, Any] = dict(self.timed)
        return replace(timing, shares_reads=self.shared_reads, **timed)

    def cost_model(self, block_size: int) -> CostModel:
        """Prices of the routers. Raises ConfigError, also if `prices` is no timing."""
        priced = (
            self.load_timing()
            if self.prices is None
            else load_timing(self.prices, kv_tokens=self.kv_tokens)
        )
        figures: dict[str, Any] = dict(self.cost)
        if self.tiers is not None:
            lower = {"host_block_s": HOST, "disk_block_s": DISK}
            figures = {n: self.tiers.block_s(t, block_size) for n, t in lower.items()} | figures
        return replace(cost_model(priced, block_size), **figures)
