"""Settings of `mallee router`: a YAML file, and the command's options."""

from pathlib import Path

from pydantic import Field

from mallee.actors.front.config import FrontConfig
from mallee.runtime.config import AtLeastOne, Positive


class ProxyConfig(FrontConfig):
    """One router that forwards requests itself. Unknown keys are refused."""

    listen: str = "127.0.0.1:8080"
    """Address of the service. Beyond loopback it needs API keys."""
    keys_file: str | None = None
    """File of API keys, as of `mallee serve`; MALLEE_API_KEY in the environment is one more."""
    scrape_s: Positive = Field(default=0.5, le=60)
    """Seconds between two looks at a backend's metrics."""
    max_requests: AtLeastOne = 4096
    """Connections of clients, and so requests, open at once."""
    max_buffered_mb: AtLeastOne = 1024
    """Memory for the bodies of all open requests, and as much for what is kept of streams."""
    head_s: Positive = Field(default=10.0, le=600)
    """Longest time for the head of a request."""
    body_s: Positive = Field(default=60.0, le=3600)
    """Longest time for all of a request."""
    keep_alive_s: Positive = Field(default=75.0, le=3600)
    """A client's connection without a request is closed after so long."""
    silence_s: Positive = Field(default=600.0, le=86_400)
    """Longest time in which a backend sends nothing of an answer."""
    retries: int = Field(default=2, ge=0, le=15)
    """Other backends that are tried for a request: before the first byte of an answer, or for its rest."""
    fleet: str = "router"
    """Name of the pool in the broker's subjects."""

    @property
    def keys_path(self) -> Path | None:
        return None if self.keys_file is None else Path(self.keys_file).expanduser()
