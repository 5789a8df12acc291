"""`mallee profile`: what passes of a real engine take on this machine, as a grid for the mocker.

Steps are timed as a worker runs them, planning, drawing and events included, so nothing is to be added:
the file's `overhead_s` is 0. Prefill points are forks of a capsule of `prefix` tokens with a suffix of
`new`; decode points are so many texts of equal length that share nothing. Tokens are drawn at random.
Chunks in real life have any size, and a size that comes for the first time may cost more (kernels are
compiled and kept by shape): no size near a point is measured twice.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from mallee.mocker.timing.files import GridData, TimingFile
from mallee.mocker.timing.grid import Decodes, Prefills
from mallee.protocol.errors import ConfigError, from_wire
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import DeviceForward, Forward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

_SIGMA_OF_MAD = 1.4826  # of a normal distribution
_GATEWAY = "profile"
_PROC_STAT = Path("/proc/stat")


class Spreads:
    """Times of points: the median of each, and how far the others are from it."""

    def __init__(self, report: Callable[[str], None] = lambda line: None) -> None:
        self._report = report
        self._spreads: list[float] = []

    def middle(self, what: str, times: Sequence[float]) -> float:
        """The median of `times`, which is reported."""
        middle = statistics.median(times)
        self._spreads += [abs(math.log(seconds / middle)) for seconds in times]
        self._report(f"{what}: {1000 * middle:.1f} ms")
        return middle

    @property
    def jitter(self) -> float:
        """Sigma of a lognormal factor."""
        return round(_SIGMA_OF_MAD * statistics.median(self._spreads), 4)

    @property
    def noise(self) -> float:
        """The share by which one time in ten is further from its median."""
        return round(float(np.expm1(np.quantile(self._spreads, 0.9))), 3)


def busy_cores(seconds: float = 0.5, read: Callable[[], str] = _PROC_STAT.read_text) -> float:
    """Cores in use while this process sleeps for so long. Linux; elsewhere 0: only spreads tell."""
    if not _PROC_STAT.exists():
        return 0.0
    before = _busy_s(read())
    time.sleep(seconds)
    return round((_busy_s(read()) - before) / seconds, 2)


def _busy_s(stat: str) -> float:
    """Processor seconds of all cores that something ran; idle and waiting ones are left out."""
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points to measure, in tokens and rows, and how often. `quick` is a coarse one.

    `steps` are the decode steps timed at each point; of all times of a point the median counts.
    """

    new: tuple[int, ...] = (16, 64, 128, 256, 512)
    prefix: tuple[int, ...] = (0, 256, 1024)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    context: tuple[int, ...] = (32, 128, 512, 1024)
    repeats: int = 3
    steps: int = 5

    @classmethod
    def quick(cls) -> "Sweep":
        return cls((16, 128, 512), (0, 512), (1, 4, 16), (64, 512), repeats=2, steps=3)

    @classmethod
    def up_to(cls, max_rows: int, max_context: int, max_new: int) -> "Sweep":
        """Points that double or more, up to those."""
        return cls(
            _doubling(16, max_new),
            (0, *(p for p in _doubling(256, max_context, by=4) if p <= max_context)),
            _doubling(1, max_rows),
            _doubling(32, max_context, by=4),
        )

    def fitted_to(self, max_model_len: int, num_blocks: int, block_size: int) -> "Sweep":
        """Without what a model's window or the KV memory can't hold.

        Raises ConfigError naming a list of which nothing, or only one point, is left.
        """
        window, room = max_model_len - self._tail, num_blocks * block_size
        least = self.context[:2][-1]  # two contexts at least, for any rows
        rows = [n for n in self.rows if n * (least + self._tail) <= room]
        most = rows[-1] if rows else 1
        new = tuple(n for n in self.new if n <= window)
        longest = new[-1] if new else 0  # it is measured behind every prefix
        found = Sweep(
            new,
            tuple(p for p in self.prefix if not p or p + longest <= min(window, room)),
            tuple(rows),
            tuple(c for c in self.context if c <= window and most * (c + self._tail) <= room),
            self.repeats,
            self.steps,
        )
        for name in ("new", "rows", "context"):
            if len(getattr(found, name)) < 2:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: fewer than two fit {max_model_len} positions and"
                    f" {room} tokens of KV memory; give smaller ones or more blocks"
                )
        return found

    @property
    def _tail(self) -> int:
        """Tokens that decodes add while they are timed, and a block of slack."""
        return (self.steps + 1) * (len(self.rows) + 1) + 16


class Profiler:
    """Times the steps of one engine over `forward`. `report(line)` is called for each measured point."""

    def __init__(
        self,
        forward: Forward,
        sweep: Sweep,
        *,
        device: DeviceForward | None = None,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[str], None] = lambda line: None,
        seed: int = 0,
    ) -> None:
        """`device` is `forward` again, if it computes beside the host, and `wait` waits until it is done.

        Prefills are timed from one wait to the next, decodes as they come: there a step's planning is
        hidden behind the pass before it.
        """
        self.forward = forward
        self.sweep = sweep
        self._clock = clock
        self._wait = wait
        self.spreads = Spreads(report)
        self._drawn = np.random.default_rng(seed)
        self._count = 0
        self._nearby = {new: count() for new in sweep.new}
        self._engine = Engine(
            forward,
            device=device,
            config=EngineConfig(
                SchedulerConfig(max_step_tokens=2 * max(sweep.new) + max(sweep.rows)),
                max_answer_capsules=0,
            ),
            clock=time.monotonic,
            worker=WorkerId("profile"),
            incarnation=Incarnation(1),
        )

    def measure(self, conditions: dict[str, str | int | float]) -> TimingFile:
        """Measure every point of the sweep; a second call uses other sizes near the points."""
        warm_up(self.forward)
        self.chunk_s(self.sweep.new[-1], 0)
        sweep, begun = self.sweep, self._clock()
        prefills = [self._prefills(new) for new in sweep.new]
        columns = [self._decodes(context) for context in sweep.context]
        return TimingFile(
            conditions={
                **conditions,
                "profile_s": round(self._clock() - begun, 1),
                "noise": self.spreads.noise,
            },
            kv_bytes_per_token=self.forward.spec.kv_bytes_per_token,
            jitter=self.spreads.jitter,
            shares_reads=True,
            model=GridData(
                Prefills(sweep.new, sweep.prefix, tuple(map(tuple, prefills))),
                Decodes(sweep.rows, sweep.context, tuple(zip(*columns, strict=True))),
            ),
        )

    def _prefills(self, new: int) -> list[float]:
        """Seconds of a step over about `new` tokens behind each prefix."""
        nearby = self._nearby[new]
        found: list[float] = []
        for prefix in self.sweep.prefix:
            sizes = [new + around(next(nearby)) for _ in range(self.sweep.repeats)]
            times = [self.chunk_s(size, prefix) for size in sizes]
            found.append(self.spreads.middle(f"prefill of {new} behind {prefix}", times))
        return found

    def chunk_s(self, new: int, prefix: int) -> float:
        """Seconds of one step over `new` tokens behind `prefix`."""
        limits = Limits(1, ignore_eos=True)
        suffix = self._text(new)
        if not prefix:
            return self._run([Generate(self._name(), suffix, limits)])[-1]
        name = self._name()
        self._run([Prefill(name, self._text(prefix))])
        capsule = capsule_id(name, 0)
        seconds = self._run([Fork(self._name(), capsule, (suffix,), limits)])[-1]
        self._run([Release(capsule)])
        return seconds

    def _decodes(self, context: int) -> list[float]:
        """Seconds of a decode step for each number of rows: the most first, then some leave."""
        sweep = self.sweep
        length = max(1, context - (sweep.steps + 1) * len(sweep.rows) // 2)
        limits = Limits(self.forward.spec.max_model_len - length, ignore_eos=True)
        names = [self._name() for _ in range(sweep.rows[-1])]
        for name in names:
            self._submit(Generate(name, self._text(length), limits, Sampling(seed=len(name))))
        while self._engine.load().prefill_tokens or self._engine.load().waiting:
            self._step()
        found: list[float] = []
        for rows in reversed(sweep.rows):
            while len(names) > rows:
                self._submit(Cancel(names.pop()))
            self._step()  # the first one also ends those that leave
            times = [self._step() for _ in range(sweep.steps)]
            found.append(self.spreads.middle(f"decode of {rows} rows at {context}", times))
        self._run([Cancel(name) for name in names])
        return found[::-1]

    def _run(self, commands: Sequence[Command]) -> list[float]:
        """Seconds of each step until nothing is left to do."""
        for command in commands:
            self._submit(command)
        times = []
        while self._engine.has_work:
            self._wait()
            times.append(self._step(self._wait))
        return times

    def _submit(self, command: Command) -> None:
        self._engine.submit(command, _GATEWAY)

    def _step(self, wait: Callable[[], None] = lambda: None) -> float:
        begin = self._clock()
        frames = self._engine.step().frames
        wait()
        seconds = self._clock() - begin
        for frame in frames.values():
            for update in frame.updates:
                if update.error is not None:
                    raise from_wire(update.error)
        return seconds

    def _text(self, num_tokens: int) -> bytes:
        vocab_size = self.forward.spec.vocab_size
        return pack_tokens(self._drawn.integers(0, vocab_size, num_tokens, dtype=np.uint32))

    def _name(self) -> RequestId:
        self._count += 1
        return RequestId(f"p{self._count}")


def warm_up(forward: Forward) -> None:
    """Use all KV memory once: what is used for the first time costs the system time, hundreds of
    milliseconds now and then, that a worker which has been up for a while no longer pays.
    """
    forward.memory.fill(range(forward.num_blocks))


def around(number: int) -> int:
    """0, 1, -1, 2, -2, ..."""
    return (number + 1) // 2 * (1 if number % 2 else -1)


def _doubling(first: int, last: int, by: int = 2) -> tuple[int, ...]:
    """first, first * by, ... and last."""
    points = [first]
    while points[-1] * by < last:
        points.append(points[-1] * by)
    if last > points[-1]:
        points.append(last)
    return tuple(points)
