"""A whole Mallee on this machine, in one call: Ray, broker, gateway and workers, loopback only.

Everything it starts is a child of this process's Ray and ends with `close`.
"""

import logging
import os
import time
from types import TracebackType
from typing import Any

import httpx

from mallee.actors.config import AppConfig
from mallee.protocol.errors import ConfigError, NoWorker

APP_NAME = "mallee"
OBJECT_STORE_BYTES = 100 * 1024 * 1024  # nothing of ours lives there


def require_serve_extra() -> None:
    """Raises ConfigError that names the remedy if the packages of the service are missing."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed: run `pip install torch 'mallee[serve]'` to serve models"
        ) from error


class LocalStack:
    """A running service at `base_url`. Use as a context manager."""

    def __init__(self, config: AppConfig, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        self.config = config
        self.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._host = host
        self._port = port
        self._is_up = False

    def start(self, *, timeout_s: float = 180.0) -> None:
        """Returns when every worker is registered. Raises NoWorker if that takes too long."""
        require_serve_extra()
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray  # heavy, and needs the environment above
        from ray import serve

        from mallee.actors.app import app

        options: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "log_to_driver": False,
            "logging_level": "ERROR",
            "_node_ip_address": "127.0.0.1",
        }
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        ray.init(**options)
        self._is_up = True
        serve.start(
            http_options={"host": self._host, "port": self._port},
            logging_config={"log_level": "ERROR"},
        )
        serve.run(app(self.config), name=APP_NAME, route_prefix="/")
        self._wait(timeout_s)

    def close(self) -> None:
        """Stop everything that `start` started. Idempotent."""
        if not self._is_up:
            return
        import ray
        from ray import serve

        self._is_up = False
        # Not serve.shutdown: it kills the controller and Ray then prints that a task of it failed.
        serve.delete(APP_NAME)
        ray.shutdown()

    def __enter__(self) -> "LocalStack":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        seen = 0
        while time.monotonic() < deadline:
            try:
                body = httpx.get(f"{self.base_url}/health", timeout=5.0).json()
                seen = len(body.get("workers", ()))
            except (httpx.HTTPError, ValueError):
                seen = 0
            if seen >= self.config.workers:
                return
            time.sleep(0.1)
        raise NoWorker(f"{seen} of {self.config.workers} workers registered in {timeout_s:.0f} s")
