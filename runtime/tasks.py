"""Background tasks under supervision: one that raises is logged, and its service knows of it."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

log = logging.getLogger(__name__)

_LOOPS = ("asyncio.", "uvloop.")


class Tasks:
    """The background tasks of one service. Belongs to one event loop.

    `failure` is the first exception that ended one, or says that one was cancelled from
    elsewhere: such a service is not healthy.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts: list[Tasks] = []
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure or next((p.failure for p in self._parts if p.failure), None)

    def include(self, part: "Tasks") -> None:
        """A failure of `part` is one of this service, too. Its owner closes it."""
        self._parts.append(part)

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str | None = None
    ) -> asyncio.Task[None]:
        """Run `work`; the log calls it `name`, by default as its function is called."""
        task = asyncio.create_task(work, name=name or getattr(work, "__qualname__", None))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def watch_callbacks(self) -> None:
        """From now on an exception in a timer or callback of ours is a failure of this service.

        It would be logged and forgotten else, and a timer that sets itself again would be over.
        """
        asyncio.get_running_loop().set_exception_handler(self._on_exception)

    def cancel(self, task: asyncio.Task[None]) -> None:
        """End a task that is not wanted any more."""
        self._tasks.discard(task)
        task.cancel()

    async def close(self) -> None:
        """Cancel every task. Idempotent."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await self.finish()

    async def finish(self) -> None:
        """Return when every task has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        is_wanted = task in self._tasks and not self._is_closing
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
        else:
            error = RuntimeError(f"{task.get_name()} was cancelled") if is_wanted else None
        if error is not None:
            self._failure = self._failure or error
            log.error("a task of %s failed: %s", self._service, task.get_name(), exc_info=error)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "handle" in context and _is_ours(error.__traceback__):
            self._failure = self._failure or error
            log.error("a callback of %s failed", self._service, exc_info=error)
        else:
            loop.default_exception_handler(context)


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether the first function beyond the event loop's own is one of this package."""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if not module.startswith(_LOOPS):
            return module.startswith("mallee.")
        trace = trace.tb_next
    return False
