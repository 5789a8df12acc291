"""Live fleets of workers whose engines stand in for vLLM's, and the answers of the rule that they draw by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from mallee.actors.foreign.build import add_foreign
from mallee.actors.foreign.runner import ForeignRunner
from mallee.actors.foreign.texts import TextLimits
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.router.config import RouterConfig
from support.fake_vllm_engine import FakeEngine
from support.live_fleet import LiveFleet

BLOCK = 4
FIRST, NUM = 97, 26  # tokens that are drawn: letters


def rule(text: Sequence[int], params: Any) -> int:
    """The next token of `text`: with a temperature by the seed, too, as if it drew a new stream each time."""
    key = [*text] if not params.temperature else [*text, params.seed, len(text)]
    return FIRST + xxhash.xxh3_64_intdigest(np.array(key, dtype=np.uint64).tobytes()) % NUM


def plain(prompt: Sequence[int], num: int) -> list[int]:
    """The greedy answer to `prompt`, of `num` tokens."""
    whole = list(prompt)
    while len(whole) < len(prompt) + num:
        whole.append(FIRST + _digest(whole) % NUM)
    return whole[len(prompt) :]


def _digest(text: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(text, dtype=np.uint64).tobytes())


@dataclass(eq=False)
class ForeignFleet(LiveFleet):
    """Its `engines` are the runners, `forwards` the stand-ins; these take `step_s` for a token."""

    step_s: float = 0.001
    limits: TextLimits = field(default_factory=TextLimits)
    refuses: Sequence[str] = ()

    async def add_worker(self, name: str) -> Host:
        life, block_size, clock = next(self.lives), self.routing.block_size, self.clock_of(name)
        host = Host(
            name,
            await self.bus("worker"),
            address=f"{name}#{life}",
            fleet="test",
            clock=clock,
            lease_period_s=0.05,
            max_step_s=5.0,
            heartbeat_s=0.2,
        )
        engine = FakeEngine(
            rule,
            block_size=block_size,
            num_blocks=self.num_blocks,
            step_s=self.step_s,
            refuses=self.refuses,
        )
        runner = add_foreign(
            host,
            engine,
            self.model,
            Capacity(block_size, self.num_blocks, self.rows),
            worker=WorkerId(name),
            incarnation=Incarnation(life),
            limits=self.limits,
        )
        wire(engine, runner)
        self.hosts[host.address] = host
        self.engines[name] = runner  # type: ignore[assignment]
        self.forwards[name] = engine
        await host.start()
        return host


def wire(engine: FakeEngine, runner: ForeignRunner) -> None:
    """Have the runner hear of the engine's steps and cache events."""
    engine.progressed = runner.progressed
    order = runner.contents.follow(0, can_replay=True)
    engine.published = lambda seq, payload: runner.take_events(order.on_live(seq, payload))


def foreign_fleet(**options: Any) -> ForeignFleet:
    """Blocks of 4 tokens, 128 of them in the vocabulary."""
    spec = mock_spec(vocab_size=128, max_model_len=512)
    return ForeignFleet(spec, RouterConfig(block_size=BLOCK), **options)
