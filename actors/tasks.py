"""Background tasks under supervision: one that raises is logged, and its service knows of it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """The background tasks of one service. Belongs to one event loop.

    `failure` is the first exception that ended one: such a service is not healthy.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str | None = None
    ) -> asyncio.Task[None]:
        """Run `work`; the log calls it `name`, by default as its function is called."""
        task = asyncio.create_task(work, name=name or getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel every task. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Return when every task has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
            log.error("a task of %s failed: %s", self._service, task.get_name(), exc_info=error)
