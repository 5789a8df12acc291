"""Changes of weights: read beside those that serve, then another life of the worker begins with them.

They are written over the old ones between two lives, so no room is needed for both.

A life of a worker has one version of its weights from its first step to its last. So commands, frames, events
and leases, which all name the life, can't mix two versions, and what the old weights computed ends with it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple, Protocol, TypeAlias

from mallee.actors.hosting.worker import Worker
from mallee.protocol.errors import MalleeError
from mallee.protocol.events import AskWeights
from mallee.protocol.ids import WorkerId
from mallee.protocol.model import WeightChange, WeightVersion
from mallee.runtime.tasks import Tasks

log = logging.getLogger(__name__)

MAX_END_S: Final = 300.0  # of a life: a step, or a capsule that is written to a slow disk
MAX_MAKE_S: Final = 900.0  # of the next one, which writes its weights, and looks through its disk

MakeLife: TypeAlias = Callable[[], Worker]


class WeightSource(Protocol):
    """Loads weights for one worker."""

    def load(self, weights: WeightVersion) -> MakeLife:
        """Read and check them beside those that serve, in a thread. Raises MalleeError: nothing has changed.

        The result makes the worker's next life, in a thread, too: it writes them over the old ones, and may
        read a disk. It is called once, after the last life has ended, which had the same memory and the same
        disk. If it raises, no life can begin in this process.
        """
        ...


class _Loaded(NamedTuple):
    asked: AskWeights
    make: MakeLife


class Lives(Protocol):
    """Begins and ends the lives of workers: their host."""

    def publish_lease(self, worker: Worker) -> None:
        """Publish a lease, which has the worker's `change`."""
        ...

    async def end_life(self, worker: Worker, within_s: float) -> bool | None:
        """End a life: True once all of it is over, False if not in time, None if the worker leaves."""
        ...

    def add(self, worker: Worker) -> None:
        """Begin the next life."""
        ...


class WeightChanges:
    """The changes under way among the workers of a host. Belongs to its event loop."""

    def __init__(self, tasks: Tasks, lives: Lives) -> None:
        self._tasks = tasks
        self._lives = lives
        self._asked: dict[WorkerId, AskWeights] = {}  # the newest, while one is under way
        self.num_replacing = 0

    def ask(self, worker: Worker, asked: AskWeights, source: WeightSource | None) -> None:
        """Begin a change, unless `worker` has or will have these weights, or newer ones."""
        newest = self._asked.get(worker.worker)
        if worker.model.weights.covers(asked.weights) or worker.is_draining:
            return
        if newest is not None and newest.weights.covers(asked.weights):
            return
        if source is None:
            self._report(worker, asked, "failed", "this worker can't change its weights")
            return
        self._asked[worker.worker] = asked
        if newest is None:
            self._tasks.spawn(self._change(worker, source))

    async def _change(self, worker: Worker, source: WeightSource) -> None:
        name = worker.worker
        loaded = await self._load(worker, source)
        if loaded is None:
            return
        self._report(worker, loaded.asked, "finishing")
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

    async def _replace(self, worker: Worker, make: MakeLife) -> Worker | None:
        """The next life of `worker`, which runs; None if its last one leaves.

        Raises RuntimeError if the last life doesn't end, or the next isn't made in time, and what making it
        raises, as weights that could be written in part only: the host is not healthy then, and its process
        is replaced.
        """
        is_over = await self._lives.end_life(worker, MAX_END_S)
        if is_over is None:
            return None
        if not is_over:
            raise RuntimeError(
                f"the last life of {worker.worker} has not ended after {MAX_END_S:g} s: its next one would"
                " share memory and disk with it"
            )
        try:
            async with asyncio.timeout(MAX_MAKE_S):
                next_life = await asyncio.to_thread(make)
        except TimeoutError:
            late = f"the next life of {worker.worker} was not made within {MAX_MAKE_S:g} s"
            raise RuntimeError(late) from None
        self._lives.add(next_life)
        return next_life

    async def _load(self, worker: Worker, source: WeightSource) -> _Loaded | None:
        """The newest weights that were asked for; None if they can't be loaded: the worker serves on."""
        while True:
            asked = self._asked[worker.worker]
            self._report(worker, asked, "loading")
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
                    self._report(worker, asked, "failed", f"{type(error).__name__}: {error}")
                    return None
                continue
            if self._asked[worker.worker] is asked:
                return _Loaded(asked, make)

    def _report(self, worker: Worker, asked: AskWeights, state: str, reason: str = "") -> None:
        worker.change = WeightChange(asked.weights, state, reason)
        self._lives.publish_lease(worker)
