"""A device that computes beside the host, by any forward of this process: late, and in the order of calls."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import structs

from mallee.protocol.messages import TokenLogprobs
from mallee.worker.engine import Engine
from mallee.worker.forward import (
    Draw,
    Drawing,
    Forward,
    ForwardBatch,
    Logits,
    LogprobQuery,
    Row,
)
from mallee.worker.gaps import ClockMarks, WorkGaps
from mallee.worker.records import StepResult

Call: TypeAlias = Literal["forward", "ahead", "draw", "collect", "wait"]


class OnDevice:
    """A value that the device has, or will have. The host must not look at it."""

    __slots__ = ("__weakref__", "_made", "_value")

    def __init__(self) -> None:
        self._made = False
        self._value: Any = None

    @property
    def value(self) -> Any:
        """To be read by the device alone: by work that was enqueued after what makes it."""
        assert self._made, "read before it is made"
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self._made, self._value = True, value

    @property
    def is_made(self) -> bool:
        return self._made


class FakeDrawing:
    """A `Drawing` of a `FakeDevice`."""

    def __init__(self, device: "FakeDevice", number: int) -> None:
        self._device = device
        self.number = number
        self.tokens = OnDevice()
        self.reports = OnDevice()

    def collect(self) -> list[int]:
        self._device.tell("collect", self.number)
        self._device.run_until(self.tokens)
        return list(self.tokens.value)

    def logprobs(self) -> list[TokenLogprobs]:
        self._device.run_until(self.reports)
        return list(self.reports.value)


class FakeDevice:
    """A `DeviceForward` over `inner`. Does some of what is enqueued at each call, by lot, and the rest late.

    `told` is called with each call of the engine's, numbered by kind, which is a piece of work for `gaps`.
    What is handed over is copied at once, as a transfer would.
    """

    def __init__(
        self,
        inner: Forward,
        *,
        seed: int = 0,
        eagerness: float = 0.5,
        told: Callable[[Call, int], None] = lambda call, number: None,
        gaps: WorkGaps | None = None,
    ) -> None:
        self._inner = inner
        self._rng = random.Random(seed)
        self._eagerness = eagerness
        self._told = told
        self._gaps = gaps or WorkGaps(ClockMarks(lambda: 0.0))
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = RLock()
        self._num: dict[Call, int] = {}
        self.memory = _Memory(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    # Enqueued

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        self._count("forward")
        rows = [_copied(row) for row in batch.rows]
        return self._launch(rows, lambda: ForwardBatch(tuple(batch.copies), rows))

    def forward_drawn(
        self, batch: ForwardBatch, drawing: Drawing, draws: Sequence[int]
    ) -> Sequence[Logits]:
        assert isinstance(drawing, FakeDrawing)
        assert all(len(row.tokens) == row.num_logits == 1 for row in batch.rows)
        self._count("ahead")
        own, places, copies = [_copied(row) for row in batch.rows], list(draws), [*batch.copies]

        def named() -> ForwardBatch:
            tokens = [drawing.tokens.value[place] for place in places]
            each = zip(own, tokens, strict=True)
            rows = [
                structs.replace(row, tokens=np.array([token], np.uint32)) for row, token in each
            ]
            return ForwardBatch(copies, rows)

        return self._launch(own, named)

    def launch_draws(self, draws: Sequence[Draw]) -> Drawing:
        assert draws
        drawing = FakeDrawing(self, self._count("draw"))
        own = [_copied_draw(draw) for draw in draws]

        def work() -> None:
            known = [structs.replace(draw, logits=_value(draw.logits)) for draw in own]
            tokens = self._inner.sample(known)
            drawn = [(d, t) for d, t in zip(known, tokens, strict=True) if d.sampling.logprobs >= 0]
            drawing.reports.value = self._inner.logprobs(
                [LogprobQuery(d.logits, token, d.sampling.logprobs) for d, token in drawn]
            )
            drawing.tokens.value = tokens

        self._enqueue(work)
        return drawing

    def keep(self, logits: Logits) -> Logits:
        kept = OnDevice()

        def work() -> None:
            kept.value = self._inner.keep(_value(logits))

        self._enqueue(work)
        return kept

    # Waiting

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        raise AssertionError("draws of a device are launched")

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        raise AssertionError("reports of a device come with the draws")

    def dump(self, logits: Logits) -> bytes:
        self.wait()
        return self._inner.dump(_value(logits))

    def wait(self) -> None:
        """Until all is done."""
        with self._lock:
            while self._queue:
                self._queue.popleft()()

    def run_until(self, value: OnDevice) -> None:
        """Until `value` is made."""
        with self._lock:
            while not value.is_made:
                self._queue.popleft()()

    def run_some(self) -> None:
        """As much as a device may have done by now."""
        with self._lock:
            while self._queue and self._rng.random() < self._eagerness:
                self._queue.popleft()()

    def tell(self, call: Call, number: int) -> None:
        self._told(call, number)

    # Inside

    def _launch(self, rows: Sequence[Row], batch: Callable[[], ForwardBatch]) -> list[OnDevice]:
        made = [OnDevice() for row in rows for _ in range(row.num_logits)]

        def work() -> None:
            found = self._inner.forward(batch())
            for place, logits in zip(made, found, strict=True):
                place.value = self._inner.keep(logits)

        self._enqueue(work)
        return made

    def _enqueue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)
        self.run_some()

    def _count(self, call: Call) -> int:
        number = self._num[call] = self._num.get(call, -1) + 1
        self._gaps.begin()
        self._told(call, number)
        self._gaps.end()
        return number


class _Memory:
    """The device's `KVMemory`: its transfers take their turn."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._device._inner.memory, name)
        if not callable(found):
            return found

        def in_turn(*args: Any, **more: Any) -> Any:
            self._device.wait()
            return found(*args, **more)

        return in_turn


def _value(logits: Logits) -> Any:
    return logits.value if isinstance(logits, OnDevice) else logits


def _copied(row: Row) -> Row:
    sides = tuple(table.copy() for table in row.sides)
    return structs.replace(row, tokens=row.tokens.copy(), table=row.table.copy(), sides=sides)


def _copied_draw(draw: Draw) -> Draw:
    return structs.replace(
        draw,
        history=None if draw.history is None else draw.history.after(()),
        allowed=None if draw.allowed is None else draw.allowed.copy(),
    )


class Twin:
    """Two engines under the same commands; the first launches ahead. All that they tell is the same."""

    def __init__(self, ahead: Engine, plain: Engine) -> None:
        self.ahead = ahead
        self.plain = plain

    def submit(self, command: Any, gateway: str) -> Any:
        found, expected = (each.submit(command, gateway) for each in (self.ahead, self.plain))
        assert repr(found) == repr(expected)
        return found

    @property
    def has_work(self) -> bool:
        assert self.ahead.has_work == self.plain.has_work
        return self.ahead.has_work

    def step(self) -> StepResult:
        found, expected = self.ahead.step(), self.plain.step()
        assert found == expected
        return found

    def drop_gateway(self, gateway: str) -> None:
        self.ahead.drop_gateway(gateway)
        self.plain.drop_gateway(gateway)

    def check(self) -> None:
        """Their books are in order, and alike."""
        self.ahead.check()
        self.plain.check()
        found, expected = self.ahead.stats(), self.plain.stats()
        assert found.pool.free == expected.pool.free
        assert found.tree.cached_blocks == expected.tree.cached_blocks
        assert found.sched == expected.sched
        assert found.capsules == expected.capsules

    def stats(self) -> Any:
        return self.ahead.stats()
