"""Capsules on a disk whose worker is gone for good: another worker there adopts them.

Each worker has a part of the disk, by its name. After an update, or with fewer workers, no worker has some of
the names. The worker that adopts such a part holds its name meanwhile, which no other takes then, and its
lock.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Final, TypeAlias

from mallee.actors.hosting.engine import EngineThread
from mallee.actors.hosting.host import Host
from mallee.protocol.errors import MalleeError, StorageError, WorkerLost
from mallee.protocol.ids import WorkerId
from mallee.worker.storage.files import Directory, has_slots
from mallee.worker.storage.volume import Volume

log = logging.getLogger(__name__)

# In which a worker tries one part; others try others. Each try asks Ray; rarer ones would leave capsules of a
# rolling update's last worker unknown for longer.
PERIOD_S: Final = 1.0
_NAME: Final = re.compile(r"w\d+")

HoldName: TypeAlias = Callable[[str], AbstractContextManager[bool]]
"""Holds the name of a worker that is gone, for the block; False: it is not gone."""


class Orphans:
    """The parts in `folder` that `worker` may adopt. Its calls block, but for `watch`."""

    def __init__(self, folder: Path, worker: WorkerId, hold: HoldName) -> None:
        self._folder = folder
        self._worker = worker
        self._hold = hold
        self._volume: Volume | None = None
        self._left: set[str] = set()  # parts of which something stays; the next life tries again

    def adopt_into(self, volume: Volume) -> None:
        """Have `volume`, the worker's own, which is not used yet, take all that is there."""
        self._volume = volume
        for name in self._names():
            with ExitStack() as held:
                if (other := self._open(name, held)) is not None:
                    with closing(other):
                        self._log(name, volume.adopt(other))

    async def watch(self, host: Host) -> None:
        """Have the worker's engine on `host` adopt what comes later, unless it drains."""
        for turn in count(int(self._worker.removeprefix("w"))):
            await asyncio.sleep(PERIOD_S)
            names = await asyncio.to_thread(self._names)
            found = host.workers.get(self._worker)
            if not names or found is None or found.is_draining or not found.is_serving:
                continue
            engine = found.runner
            assert isinstance(engine, EngineThread), "mocked engines have no disk"
            name, held = names[turn % len(names)], ExitStack()
            try:
                other = await asyncio.to_thread(self._open, name, held)
                if other is not None:
                    self._log(name, await engine.adopt(other))
            except WorkerLost:  # it has ended, and what it moved is whole
                continue
            finally:
                await asyncio.to_thread(held.close)

    def _names(self) -> list[str]:
        """The other parts in which something is stored; none if the disk can't be read."""
        known = {self._worker, *self._left}
        try:
            names = {path.name for path in self._folder.glob("w*") if _NAME.fullmatch(path.name)}
            return sorted(name for name in names - known if has_slots(self._folder / name))
        except OSError as error:
            log.warning("%s can't look for capsules of others: %s", self._worker, error)
            return []

    def _open(self, name: str, held: ExitStack) -> Volume | None:
        """The part `name`, if its worker is gone; its name stays in `held`."""
        if self._volume is None or not held.enter_context(self._hold(name)):
            return None
        try:
            return self._volume.beside(Directory(self._folder / name))
        except StorageError as error:  # a process that ends still has it, or it can't be read
            log.warning("%s can't adopt the capsules of %s yet: %s", self._worker, name, error)
            return None

    def _log(self, name: str, left: Sequence[MalleeError]) -> None:
        if left:
            self._left.add(name)
            text = "%s adopted capsules of %s, which is gone; of %d it can't, the first because: %s"
            log.error(text, self._worker, name, len(left), left[0])
        else:
            log.info("%s adopted the capsules of %s, which is gone", self._worker, name)
