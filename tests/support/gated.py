"""A forward pass that a test lets through, one by one, and a log of what each pass computed."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from mallee.worker.forward import ForwardBatch
from support.waiting import until


class Part(NamedTuple):
    """A row's share of one pass: the tokens from `start` up to `end` of its text."""

    start: int
    end: int


class Gate:
    """Passes of all engines made through it wait for `let`, once it is `shut`."""

    def __init__(self) -> None:
        self.passes: list[list[Part]] = []
        self.num_waiting = 0
        self._permits = threading.Semaphore(0)
        self._is_shut = False
        self._dead: Any = None  # a forward that computes nothing more
        self._end = threading.Event()
        self._lock = threading.Lock()

    def around(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, whose forwards go through this gate."""

        def made(*args: Any, **options: Any) -> Any:
            forward = make(*args, **options)
            kind = type(forward)

            def gated(self_: Any, batch: ForwardBatch) -> Any:
                self._enter(self_, batch)
                return kind.forward(self_, batch)

            # Instances of some kinds take no attributes.
            body = {"__slots__": (), "forward": gated}
            forward.__class__ = type(f"Gated{kind.__name__}", (kind,), body)
            return forward

        return made

    def _enter(self, forward: Any, batch: ForwardBatch) -> None:
        if self._is_shut:
            with self._lock:
                self.num_waiting += 1
            self._permits.acquire()
            with self._lock:
                self.num_waiting -= 1
        if forward is self._dead:
            self._permits.release()
            self._end.wait()
        rows = [Part(row.start, row.start + len(row.tokens)) for row in batch.rows]
        self.passes.append(rows)

    def shut(self) -> None:
        self._is_shut = True

    def kill(self, forward: Any) -> None:
        """Let nothing of `forward` through until the end, as if its process were dead."""
        self._dead = forward

    def close(self) -> None:
        """End all waits."""
        self.open()
        self._end.set()

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_shut = False
        self._permits.release(1000)

    async def let(self) -> None:
        """Let the pass that waits through, once one does."""
        await until(lambda: self.num_waiting > 0)
        num = len(self.passes)
        self._permits.release()
        await until(lambda: len(self.passes) > num)

    def first(self, end: int) -> int:
        """The number of the first pass in which a row's text reached `end` tokens."""
        return next(n for n, rows in enumerate(self.passes) if any(row.end == end for row in rows))
