"""Changes of weights: loaded beside those that serve, then another life of the worker begins with them.

A life of a worker has one version of its weights from its first step to its last. So commands, frames, events
and leases, which all name the life, can't mix two versions, and what the old weights computed ends with it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeAlias

from mallee.actors.hosting.worker import Worker
from mallee.actors.tasks import Tasks
from mallee.protocol.errors import MalleeError
from mallee.protocol.ids import WorkerId
from mallee.protocol.model import WeightChange, WeightsAsk, WeightVersion

log = logging.getLogger(__name__)

MakeLife: TypeAlias = Callable[[], Worker]


class WeightSource(Protocol):
    """Loads weights for one worker."""

    def load(self, weights: WeightVersion) -> MakeLife:
        """Load them beside those that serve, in a thread. Raises MalleeError.

        The result makes the worker's next life; it is called once, after the last one has ended.
        """
        ...


class _Loaded(NamedTuple):
    asked: WeightsAsk
    make: MakeLife


class WeightChanges:
    """The changes under way among the workers of a host. Belongs to its event loop.

    `publish(worker)` tells of a worker's `change`; `replace(worker, make)` ends a life and begins the next.
    """

    def __init__(
        self,
        tasks: Tasks,
        *,
        publish: Callable[[Worker], None],
        replace: Callable[[Worker, MakeLife], Awaitable[Worker | None]],
    ) -> None:
        self._tasks = tasks
        self._publish = publish
        self._replace = replace
        self._asked: dict[WorkerId, WeightsAsk] = {}  # the newest, while one is under way
        self.num_replacing = 0

    def ask(self, worker: Worker, asked: WeightsAsk, source: WeightSource | None) -> None:
        """Begin a change, unless `worker` has or will have these weights, or newer ones."""
        newest = self._asked.get(worker.worker)
        if worker.model.weights.covers(asked.weights) or worker.is_draining:
            return
        if newest is not None and newest.weights.covers(asked.weights):
            return
        if source is None:
            self._tell(worker, asked, "failed", "this worker can't change its weights")
            return
        self._asked[worker.worker] = asked
        if newest is None:
            self._tasks.spawn(self._change(worker, source))

    async def _change(self, worker: Worker, source: WeightSource) -> None:
        name = worker.worker
        loaded = await self._load(worker, source)
        if loaded is None:
            return
        self._tell(worker, loaded.asked, "finishing")
        with suppress(TimeoutError):
            async with asyncio.timeout(loaded.asked.drain_s):
                await worker.wait_idle()
        self.num_replacing += 1
        try:
            next_life = await self._replace(worker, loaded.make)
        finally:
            self.num_replacing -= 1
        newest = self._asked.pop(name)
        if next_life is not None:
            self.ask(next_life, newest, source)

    async def _load(self, worker: Worker, source: WeightSource) -> _Loaded | None:
        """The newest weights that were asked for; None if they can't be loaded: the worker serves on."""
        while True:
            asked = self._asked[worker.worker]
            self._tell(worker, asked, "loading")
            try:
                make = await asyncio.to_thread(source.load, asked.weights)
            except (
                MalleeError,
                OSError,
                RuntimeError,
                ValueError,
            ) as error:  # torch's, safetensors'
                if self._asked[worker.worker] is asked:
                    del self._asked[worker.worker]
                    log.error("%s keeps its weights: %s", worker.worker, error)
                    self._tell(worker, asked, "failed", f"{type(error).__name__}: {error}")
                    return None
                continue
            if self._asked[worker.worker] is asked:
                return _Loaded(asked, make)

    def _tell(self, worker: Worker, asked: WeightsAsk, state: str, reason: str = "") -> None:
        worker.change = WeightChange(asked.weights, state, reason)
        self._publish(worker)
