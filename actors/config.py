"""What a deployment can set: the `args` of serve.yaml, `serve run` and `mallee serve`."""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from mallee.worker.model.config import check_kv_dtype

DEFAULT_KV_BUDGET_MB = 1024

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


class AppConfig(BaseModel):
    """One model on a fleet of equal workers. Unknown keys are refused.

    `num_blocks` wins over `kv_budget_mb`. `nats_url` None: a broker of our own on loopback, so the
    whole app has to run on one node.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str = Field(min_length=1)
    served_model_name: str | None = None
    workers: int = Field(default=1, ge=1)
    gateways: int = Field(default=1, ge=1)
    fleet: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]+$")
    nats_url: str | None = None
    # Routing; see `router.records.RouterConfig` and `router.cost.CostModel`
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
