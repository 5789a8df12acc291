"""What a deployment can set: the `args` of serve.yaml, `serve run` and `mallee serve`."""

from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from mallee.worker.model.config import check_kv_dtype

DEFAULT_KV_BUDGET_MB = 1024
DEFAULT_MOCK_BLOCKS = 16_384
LEASES_PER_S = 2500  # of a whole fleet: what a gateway takes in beside its requests
DEFAULT_MOCK_TIMING = "h200-llama-3.1-8b-fp8"

PolicyName: TypeAlias = Literal[
    "cost", "dynamo", "round_robin", "random", "least_loaded", "prefix_only"
]
CostFigure: TypeAlias = Literal[
    "prefill_token_s",
    "prefill_weight",
    "step_base_s",
    "step_row_s",
    "step_block_s",
    "host_block_s",
    "disk_block_s",
]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_OF_MODELS = ("dtype", "kv_dtype", "device", "kv_budget_mb", "threads", "worker_gpus", "kv_checks")
_OF_MOCKS = (
    *("engines_per_worker", "mock_timing", "mock_speedup", "mock_jitter", "mock_startup_s"),
    "mock_seed",
)


class AppConfig(BaseModel):
    """One model on a fleet of equal workers. Unknown keys are refused.

    `num_blocks` wins over `kv_budget_mb`. `nats_url` None: a broker of our own on loopback, so the
    whole app has to run on one node. With engine "mock" each worker replica has `engines_per_worker`
    engines that take time instead of computing: of the model only tokenizer and config.json are needed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str | None = None
    workers: int = Field(default=1, ge=1)
    gateways: int = Field(default=1, ge=1)
    fleet: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]+$")
    nats_url: str | None = None
    # Routing; see `router.views.RouterConfig` and `router.placement.pricing.CostModel`
    policy: PolicyName = "cost"
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    cost: dict[CostFigure, NonNegative] = Field(default_factory=dict)  # what differs from an H200
    expected_output_tokens: int = Field(default=256, ge=0)  # of an answer, at most, in its price
    max_workers: int = Field(default=1024, ge=1)  # that a gateway has room for
    max_index_mb: int = Field(default=4096, ge=1)
    token_memory_mb: int = Field(default=256, ge=0)  # of capsules, to compute their forks elsewhere
    kv_events: bool = True  # False: what workers hold is predicted
    sync_bookings: bool = True  # gateways tell each other what they book, so that they don't herd
    lease_period_s: float = Field(default=1.0, gt=0, le=60)

    # Mocked engines, each a worker of its own; see `mocker.timing.load_timing`
    engine: Literal["model", "mock"] = "model"
    engines_per_worker: int = Field(default=1, ge=1)
    mock_timing: str = Field(default=DEFAULT_MOCK_TIMING, min_length=1)  # a name, or a file
    mock_speedup: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # 0: nothing takes time
    mock_jitter: float | None = Field(default=None, ge=0, lt=5)  # None: the timing's own
    mock_startup_s: float | None = Field(default=None, ge=0, le=86_400)  # None: the timing's own
    mock_seed: int = Field(default=0, ge=0)

    # Engine
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_dtype: Annotated[str, AfterValidator(check_kv_dtype)] = "auto"
    device: str = "cpu"
    num_blocks: int | None = Field(default=None, ge=1)
    kv_budget_mb: int = Field(default=DEFAULT_KV_BUDGET_MB, ge=1)
    block_size: int = Field(default=16, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    max_rows: int = Field(default=256, ge=1)
    max_step_tokens: int = Field(default=512, ge=1)
    max_waiting: int = Field(default=4096, ge=1)
    scheduling: Literal["fair", "fcfs", "prefill_first", "decode_round_robin"] = "fair"
    victims: Literal["least_due", "youngest", "oldest_decode"] = "least_due"  # if blocks run out
    ageing_steps: int = Field(default=256, ge=0)  # whoever waits longer goes first; 0: nobody
    watermark: float = Field(default=0.02, ge=0, lt=1)  # share of blocks that admission leaves free
    gang: bool = True  # rows that share a prefix stand side by side
    chunked: bool = True  # False: prompts are computed whole, in one step
    max_answer_capsules: int = Field(default=256, ge=0)
    max_kept_share: float = Field(default=0.9, gt=0, le=1)  # of the pool, in capsules asked for
    prefix_cache: bool = True
    eviction: Literal["lru", "lineage"] = "lru"  # which cached blocks go first
    tree_attention: bool = True  # what rows share is read once
    overlap: bool = True  # grammar masks are computed while the model computes
    kv_checks: Literal["none", "digests", "canaries", "guards"] = "none"  # of the KV memory; slow
    kv_faults: Literal["log", "raise"] = "raise"
    debug_logs: frozenset[Literal["forks", "steps"]] = frozenset()
    threads: int | None = Field(default=None, ge=1)
    max_step_s: float = Field(default=120.0, gt=0)  # an engine that computes longer is replaced

    # Admission: what happens to requests when every worker is busy
    busy_rows_ratio: float = Field(default=1.0, gt=0)  # of max_rows: a worker is busy from there on
    max_queued: int = Field(default=4096, ge=0)  # per gateway; 0: refused at once
    max_queued_per_tenant: int = Field(default=1024, ge=0)
    max_queue_wait_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )

    # Ray: shares of a node per replica; fractions, for they only place the replicas
    worker_cpus: float = Field(default=0.1, ge=0)
    worker_gpus: float = Field(default=0.0, ge=0)

    # HTTP
    api_key: str | None = Field(default=None, min_length=1, repr=False)
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    max_branches: int = Field(default=128, ge=1)

    @property
    def num_workers(self) -> int:
        """Engines, each of which is a worker to the gateways."""
        return self.workers * self.engines_per_worker

    @model_validator(mode="before")
    @classmethod
    def _make_room(cls, values: Any) -> Any:
        """A fleet larger than gateways are made for by default makes them larger, and its leases rarer."""
        if not isinstance(values, dict):
            return values
        workers, engines = values.get("workers", 1), values.get("engines_per_worker", 1)
        if not (isinstance(workers, int) and isinstance(engines, int)):
            return values  # refused by their fields
        num_workers = workers * engines
        room = max(cls.model_fields["max_workers"].default, num_workers * 5 // 4)
        period_s = max(cls.model_fields["lease_period_s"].default, num_workers / LEASES_PER_S)
        return {"max_workers": room, "lease_period_s": min(period_s, 60.0), **values}

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        """What has no meaning for this kind of engine is refused, not ignored."""
        others = _OF_MOCKS if self.engine == "model" else _OF_MODELS
        for name in others:
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                wanted = "mock" if self.engine == "model" else "model"
                raise ValueError(f"{name}={value!r} needs engine={wanted!r}, not {self.engine!r}")
        if self.max_workers < self.num_workers:
            raise ValueError(
                f"max_workers={self.max_workers} < {self.num_workers} workers: give as many at least"
            )
        return self
