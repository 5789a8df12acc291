"""A picker as its settings describe it: the gRPC service over a `Front`."""

import time
from collections.abc import Callable
from typing import ClassVar

from mallee.actors.front.front import Front
from mallee.actors.front.picker.config import PickerConfig
from mallee.actors.front.picker.counts import PickerCounts
from mallee.actors.front.picker.server import Limits, PickerServer


class Picker(Front):
    """One picker. Belongs to one event loop; use as an asynchronous context manager."""

    kind: ClassVar = "picker"

    def __init__(
        self, config: PickerConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """As `Front`. Raises MalleeError."""
        counts = PickerCounts()
        super().__init__(
            config,
            counts,
            fallbacks=config.fallbacks,
            objectives=config.objectives,
            clock=clock,
        )
        self.config = config
        self.server = PickerServer(
            self.placement,
            self.read,
            counts,
            Limits(config.max_body_mb << 20, config.max_streams, config.decide_s),
            new_id=self.new_id,
            is_ready=lambda: self.is_ready,
        )

    async def _open(self) -> None:
        config = self.config
        await self.server.start_up(config.listen, config.tls_paths, config.health_listen)

    async def _shut(self, drain_s: float) -> None:
        await self.server.close(drain_s)
