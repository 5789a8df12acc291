"""A critic beside the reading of a stream: it scores branches while they are written, and ends the poor ones.

It looks at one branch at a time, at its newest text, first at the one that has waited longest: a slow critic
looks less often, and neither reading nor decoding waits for it.
"""

import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from mallee.client.results import BranchEvent
from mallee.protocol.errors import InvalidParameter, NotFound

Score: TypeAlias = Callable[[Any], float | None]
"""The value of a branch so far; None: not known yet."""
AsyncScore: TypeAlias = Callable[[Any], float | Awaitable[float | None] | None]
"""As `Score`, or a coroutine function; a plain one runs in a thread."""


async def result_of(function: Callable[[Any], Any], given: Any) -> Any:
    """The result of `function(given)`. A plain function runs in a thread, and is left there by a cancel."""
    from anyio.to_thread import run_sync

    if inspect.iscoroutinefunction(function):
        return await function(given)
    found = await run_sync(function, given, abandon_on_cancel=True)
    # An object whose call is a coroutine function gives one.
    return await found if inspect.isawaitable(found) else found


class _Unseen:
    """Indexes of running branches whose text has grown since they were scored, in the order of their wait."""

    def __init__(
        self, branches: Mapping[int, Any], score: Callable[[Any], Any], below: float
    ) -> None:
        if not callable(score):
            raise InvalidParameter("score", score, "give a function of a branch")
        self._branches = branches
        self._score = score
        self._below = below
        self._indexes: dict[int, None] = {}

    def _see(self, event: BranchEvent) -> None:
        if event.finish_reason is None:
            self._indexes.setdefault(event.index)
        else:
            self._indexes.pop(event.index, None)

    def _next(self) -> Any:
        index = next(iter(self._indexes))
        del self._indexes[index]
        return self._branches[index]

    def _is_poor(self, branch: Any, value: float | None) -> bool:
        """Note the branch's value, and tell whether it is to end."""
        branch.score = value
        return value is not None and value < self._below and branch.finish_reason is None


class Critic(_Unseen):
    """Scores in a thread of its own, inside its block. What `score` raises, `see` or the block's end does."""

    def __init__(self, branches: Mapping[int, Any], score: Score, below: float) -> None:
        super().__init__(branches, score, below)
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="critic", daemon=True)

    def see(self, event: BranchEvent) -> None:
        """Take an event that its branch has taken."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._see(event)
            self._changed.notify()

    def __enter__(self) -> "Critic":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (branch := self._waited()) is not None:
                if self._is_poor(branch, self._score(branch)):
                    with suppress(NotFound):  # it ended meanwhile
                        branch.prune()
        except BaseException as error:
            self._error = error  # the reader raises it

    def _waited(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._indexes or self._is_over)
            return None if self._is_over else self._next()


class AsyncCritic(_Unseen):
    """Scores in a task of its own, inside its block; see `Critic`."""

    def __init__(self, branches: Mapping[int, Any], score: AsyncScore, below: float) -> None:
        import anyio

        super().__init__(branches, score, below)
        self._group = anyio.create_task_group()
        self._grown = anyio.Event()
        self._error: Exception | None = None

    def see(self, event: BranchEvent) -> None:
        """Take an event that its branch has taken."""
        if self._error is not None:
            raise self._error
        self._see(event)
        self._grown.set()

    async def __aenter__(self) -> "AsyncCritic":
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)  # with the block's error it would wrap that
        if kind is None and self._error is not None:
            raise self._error

    async def _run(self) -> None:
        import anyio

        try:
            while True:
                await self._grown.wait()
                self._grown = anyio.Event()
                while self._indexes:
                    branch = self._next()
                    if self._is_poor(branch, await result_of(self._score, branch)):
                        with suppress(NotFound):
                            await branch.prune()
        except Exception as error:
            self._error = error  # the reader raises it
