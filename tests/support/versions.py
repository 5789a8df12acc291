"""Mocked engines whose weights matter, and can be changed while they serve."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from bench.doubles.forward import MockForward
from mallee.actors.hosting.engine import make_worker
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity, Worker
from mallee.protocol.errors import WeightsMismatch
from mallee.protocol.ids import Incarnation
from mallee.protocol.model import WeightVersion
from mallee.worker.engine import MakeTiers
from mallee.worker.forward import ForwardBatch, Logits
from support.live_fleet import make_engine


class VersionedForward(MockForward):
    """KV and logits depend on the digest of the weights, too: other ones give other tokens."""

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        shift = sum(self.spec.weights.digest.encode())
        rows = [
            structs.replace(row, tokens=(row.tokens + np.uint32(shift)).astype("<u4"))
            for row in batch.rows
        ]
        return super().forward(batch._replace(rows=rows))

    def with_weights(self, weights: WeightVersion) -> "VersionedForward":
        """The next life's forward over the same memory, with all that the old weights left in it."""
        made = VersionedForward(
            structs.replace(self.spec, weights=weights),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
        )
        made.kv = self.kv
        return made


class Weights:
    """A `WeightSource`: the digest of a path is the path. Those with "missing" in it can't be loaded.

    `below` makes the tiers of each life.
    """

    def __init__(
        self, host: Host, forward: MockForward, capacity: Capacity, below: MakeTiers | None = None
    ) -> None:
        assert isinstance(forward, VersionedForward)
        self.host, self.forward, self.capacity = host, forward, capacity
        self.below = below
        self.life = 1_000
        self.may_load = threading.Event()
        self.may_load.set()
        self.fails_midway = False  # when they are written over the old ones

    def load(self, weights: WeightVersion) -> Callable[[], Worker]:
        assert self.may_load.wait(10)
        if "missing" in weights.path:
            raise WeightsMismatch(f"{weights.path} is not there", path=weights.path)
        return lambda: self._make(structs.replace(weights, digest=weights.path))

    def _make(self, weights: WeightVersion) -> Worker:
        if self.fails_midway:
            raise WeightsMismatch(f"{weights.path} can't be read any more", path=weights.path)
        self.life += 1
        self.forward = self.forward.with_weights(weights)
        name = self.host.name
        engine = make_engine(self.forward, name, Incarnation(self.life), below=self.below)
        return make_worker(self.host, engine, self.capacity)
