"""A program beside Ray's head: deploys the application as often as `mallee up` asks, and ends it.

    python -m mallee.testing.nodes.deploy

Takes orders as JSON lines from stdin and answers each with a line on stdout. `deploy` of settings that
differ rolls: Ray Serve replaces the replicas one after the other.
"""

import logging
import os
import sys
import time
from typing import TextIO

import msgspec

from mallee.actors.local import APP_NAME, cause, drain_and_delete, start_serve
from mallee.protocol.errors import ConfigError, MalleeError
from mallee.runtime.config import AppConfig

_NODES_S = 180.0


class Deploy(msgspec.Struct, frozen=True, tag=True):
    """Settings to serve with, once so many nodes are there."""

    address: str
    num_nodes: int
    host: str
    port: int
    on_every_node: bool
    settings: str = ""
    """An `AppConfig` as JSON."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no more requests, wait for those that run, and end the application."""

    drain_s: float


class Answer(msgspec.Struct, frozen=True):
    error: str | None = None


Order = Deploy | Drain


def main() -> None:
    # Ray prints: the answers keep the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        _follow(msgspec.json.decode(line, type=Order), answers)


def _follow(order: Order, answers: TextIO) -> None:
    import ray  # heavy, and needs a cluster that runs
    from ray.serve.exceptions import RayServeException

    try:
        match order:
            case Deploy():
                if not ray.is_initialized():
                    _join(order)
                _deploy(AppConfig.model_validate_json(order.settings))
            case Drain(drain_s=drain_s):
                drain_and_delete(drain_s)
        answer = Answer()
    except (MalleeError, RayServeException, RuntimeError, OSError) as error:
        logging.getLogger(__name__).exception("%s failed", type(order).__name__)
        answer = Answer(str(error).strip().splitlines()[-1])
    answers.write(msgspec.json.encode(answer).decode() + "\n")


def _join(order: Deploy) -> None:
    """Raises ConfigError if nodes are missing for too long."""
    import ray

    ray.init(address=order.address, log_to_driver=False, logging_level=logging.ERROR)
    deadline = time.monotonic() + _NODES_S
    while (found := _alive_nodes()) < order.num_nodes:
        if time.monotonic() > deadline:
            raise ConfigError(f"{found} of {order.num_nodes} Ray nodes joined in {_NODES_S:.0f} s")
        time.sleep(0.2)
    location = "EveryNode" if order.on_every_node else "HeadOnly"
    start_serve(order.host, order.port, proxy_location=location)


def _alive_nodes() -> int:
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return sum(bool(node["Alive"]) for node in nodes)


def _deploy(config: AppConfig) -> None:
    """Raises RuntimeError or MalleeError with one sentence if it does not serve."""
    from ray import serve

    from mallee.actors.app import app

    try:
        serve.run(app(config), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise RuntimeError(cause(error)) from error


if __name__ == "__main__":
    main()
