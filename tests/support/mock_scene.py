"""Mocked fleets for tests: a model's folder without weights, and a fleet on an in-memory bus."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.doubles.bus import LocalBus, LocalHub
from mallee.actors.build import admission_config
from mallee.actors.mock.fleet import MockFleet, MockPlan
from mallee.gateway.access.access import Access
from mallee.gateway.metrics import GatewayMetrics
from mallee.gateway.sessions.copies import SessionLimits
from mallee.router.config import RouterConfig
from mallee.router.router import Router
from mallee.runtime.config import AppConfig, put
from support.live_fleet import make_gateway
from support.local_transport import LocalTransport
from support.tokenizers_made import byte_level
from support.waiting import until

TEXT = "a mallee is a tree of many trunks from one root, which re-sprouts after fire and rain"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 340,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "hidden_act": "silu",
}


def make_folder(folder: Path) -> Path:
    """Tokenizer and config.json: all that a mocked engine needs of a model."""
    byte_level([TEXT] * 4, 340, ["<end>"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def mock_config(folder: Path, **settings: Any) -> AppConfig:
    """Fast engines that take no time, unless told: `mock__speedup=1.0` sets `mock.speedup`."""
    values: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": "tiny",
        "engine": {"kind": "mock", "kv_tokens": 4096},
        "mock": {"engines_per_worker": 4, "speedup": 0.0},
        "lease_period_s": 0.05,
        "fleet": "test",
    }
    for key, value in settings.items():
        put(values, key.replace("__", "."), value)
    return AppConfig.model_validate(values)


class MockScene:
    """A fleet of mocked engines, a gateway, and the bus between them."""

    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self.hub = LocalHub()
        self.plan = MockPlan.of(config)
        self.bus, self.gateway_bus = LocalBus(self.hub), LocalBus(self.hub)
        self.fleet = MockFleet("m0", self.plan, self.bus, address="here")
        self.hosts = {"here": self.fleet.host}
        self.router = Router(
            RouterConfig(
                block_size=config.engine.block_size,
                policy=config.routing.policy,
                lease_s=max(3.0, 3 * config.lease_interval_s),
            ),
            clock=time.monotonic,
        )
        self.metrics = GatewayMetrics()
        self.gateway = make_gateway(
            "g0",
            self.gateway_bus,
            LocalTransport("g0", self.hosts),
            self.router,
            self.plan.served,
            fleet=config.fleet,
            metrics=self.metrics,
            admission=admission_config(config, Access(None, {})),
            sessions=SessionLimits(config.sessions.max_nodes, config.sessions.ttl_s),
        )

    async def admin(self, verb: str, worker: str = "") -> dict[str, Any]:
        asked = json.dumps({"verb": verb, "worker": worker}).encode()
        answer = await self.gateway_bus.request(f"mallee.{self.config.fleet}.host.m0", asked, 5.0)
        found: dict[str, Any] = {} if answer == worker.encode() else json.loads(answer)
        return found

    def names(self) -> set[str]:
        return {str(view.worker) for view in self.router.workers()}


@asynccontextmanager
async def mocked(config: AppConfig) -> AsyncIterator[MockScene]:
    """All engines are registered."""
    scene = MockScene(config)
    await scene.bus.connect()
    await scene.gateway_bus.connect()
    try:
        await scene.gateway.start_up()
        names = [f"w{i}" for i in range(config.mock.engines_per_worker)]
        await scene.fleet.start(names)
        await until(lambda: scene.names() == {*names})
        yield scene
    finally:
        await scene.gateway.close()
        await scene.fleet.close()
        await scene.bus.close()
        await scene.gateway_bus.close()
