"""Settings of `mallee picker`: a YAML file, and the command's options."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from mallee.actors.front.config import FrontConfig
from mallee.runtime.config import AtLeastOne, Positive


class PickerConfig(FrontConfig):
    """One picker of a pool. Unknown keys are refused."""

    addresses: ClassVar = (*FrontConfig.addresses, "health_listen")

    listen: str = "127.0.0.1:9002"
    """Address of the gRPC service; `0.0.0.0:9002` in a pod, behind a NetworkPolicy."""
    tls_cert: str | None = None
    """PEM certificate for it; by default there is no TLS."""
    tls_key: str | None = None
    """Its key."""
    health_listen: str | None = None
    """Address of the gRPC health checks alone, without TLS, as Kubernetes' probes need them;
    `listen` answers them too."""
    fallbacks: int = Field(default=2, ge=0, le=15)
    """Further endpoints given to the proxy, for its retries."""
    objectives: dict[str, int] = Field(default={})
    """Priorities of InferenceObjectives by name. Requests of one below 0 are refused with 429
    while all pods are busy; others are sent."""
    max_streams: AtLeastOne = 4096
    """Requests that the proxy may have open here at once."""
    decide_s: Positive = Field(default=2.0, le=60)
    """Longest time for a decision; then the proxy goes on its own."""
    fleet: str = "picker"
    """Name of the pool in the broker's subjects."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give tls_cert and tls_key, or neither")
        return self

    @property
    def tls_paths(self) -> tuple[Path, Path] | None:
        """Certificate and key."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Path(self.tls_cert).expanduser(), Path(self.tls_key).expanduser()
