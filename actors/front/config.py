"""Settings that all of Mallee's routers in front of others' engines share."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from mallee.runtime.config import (
    AppConfig,
    AtLeastOne,
    EngineSettings,
    Port,
    Positive,
    RoutingSettings,
    Settings,
)


class FrontConfig(Settings):
    """One router in front of a pool. Unknown keys are refused."""

    addresses: ClassVar[tuple[str, ...]] = ("listen", "metrics_listen")
    """Settings that are host:port."""

    listen: str
    """Address to listen at."""
    fleet: str
    """Name of the pool in the broker's subjects."""
    endpoints: tuple[str, ...] = ()
    """Pods, each as ip:port or host:port; names are resolved again and again."""
    endpoints_file: str | None = None
    """File with such a list, read again whenever it changes."""
    pool: str | None = None
    """InferencePool whose pods are followed, in a Kubernetes cluster."""
    namespace: str | None = None
    """Its namespace; by default the pod's."""
    kubernetes_url: str | None = None
    """Kubernetes' API without an account, as `kubectl proxy` serves it; by default that of the
    pod."""
    model: str | None = None
    """Folder or hub id with the pods' tokenizer and chat template. Without, a prompt counts a
    token for each 4 bytes of its text, and caches are predicted."""
    block_size: AtLeastOne = 16
    """Tokens of a KV block in the pods."""
    events_port: Port | None = None
    """Port on which pods publish KV events over ZeroMQ, where they do not tell it at
    `/kv_event_sources` (vLLM before 0.32)."""
    replay_port: Port | None = None
    """Port on which they repeat those that were missed."""
    events_topic: str = ""
    """Topic of the events."""
    scrape_s: Positive = Field(default=1.0, le=60)
    """Seconds between two looks at a pod's metrics."""
    kv_tokens: AtLeastOne = 262_144
    """KV memory of a pod whose metrics do not tell it."""
    max_rows: AtLeastOne = 256
    """Requests that a pod runs at once (vLLM's max_num_seqs)."""
    max_body_mb: int = Field(default=16, ge=1, le=1024)
    """Largest body of a request."""
    metrics_listen: str | None = None
    """Address of `/metrics` for Prometheus; by default there is none."""
    nats_url: str | None = None
    """NATS broker by which several share bookings; without, each counts its own."""
    nats_credentials: str | None = None
    """As of `mallee serve`."""
    nats_ca: str | None = None
    """As of `mallee serve`."""
    routing: RoutingSettings = RoutingSettings()

    @property
    def app(self) -> AppConfig:
        """The settings that router and bus are made from. Raises ValidationError."""
        return AppConfig(
            model=self.model or "none",
            fleet=self.fleet,
            nats_url=self.nats_url,
            nats_credentials=self.nats_credentials,
            nats_ca=self.nats_ca,
            lease_period_s=self.scrape_s,
            routing=self.routing,
            engine=EngineSettings(block_size=self.block_size),
        )

    @model_validator(mode="after")
    def _check_front(self) -> Self:
        sources = [self.endpoints or None, self.endpoints_file, self.pool]
        if sum(each is not None for each in sources) != 1:
            raise ValueError(
                "give one of endpoints, endpoints_file and pool (options: --backends or --endpoint,"
                " --backends-file, --pool)"
            )
        if self.events_port is not None and self.model is None:
            raise ValueError("events_port needs model: KV events name blocks by their tokens")
        if self.replay_port is not None and self.events_port is None:
            raise ValueError("replay_port needs events_port")
        for name in self.addresses:
            value = getattr(self, name)
            host, _, port = (value or "").rpartition(":")
            if value is not None and not (host and port.isdigit()):
                raise ValueError(f"{name}={value!r}: give host:port")
        _ = self.app  # its own checks
        return self

    @property
    def endpoints_path(self) -> Path | None:
        return None if self.endpoints_file is None else Path(self.endpoints_file).expanduser()
