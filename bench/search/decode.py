"""Cost of capsules while branches decode: host time of a step, with captures and without.

The forward computes nothing, so that only the engine's own work is timed, on this CPU; the share is of a
step on the timing model's device. Nothing is taken to overlap with the device.
"""

import statistics
import time
from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

from bench.engine.scheduler import NullForward
from mallee.mocker.passes import mock_spec
from mallee.mocker.timing import Timing
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Capture, Generate, Limits, Release, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

PROMPT: Final = 2048
EVERY: Final = 64  # tokens of a branch between two captures


class DecodeCost(NamedTuple):
    """Microseconds of host time a step, and the milliseconds of a step."""

    plain_us: float
    capsules_us: float
    step_ms: float

    @property
    def slowdown(self) -> float:
        """Time of a step with capsules, of one without."""
        return (1000 * self.step_ms + self.capsules_us) / (1000 * self.step_ms + self.plain_us)


def decode_cost(timing: Timing, rows: int, *, num_steps: int = 256, rounds: int = 3) -> DecodeCost:
    """Medians over rounds that take turns."""
    plain, captured = [], []
    for _ in range(rounds):
        plain.append(_host_us(rows, num_steps, captures=False))
        captured.append(_host_us(rows, num_steps, captures=True))
    step_s = timing.step_s((), rows, rows * (PROMPT + num_steps / 2))
    return DecodeCost(statistics.median(plain), statistics.median(captured), 1000 * step_s)


def _host_us(rows: int, num_steps: int, *, captures: bool) -> float:
    """CPU microseconds of a step of `rows` branches; one of them is captured at a time, each in turn."""
    blocks = (rows + 2) * -(-(PROMPT + num_steps + 32) // 16)
    engine = Engine(
        NullForward(mock_spec(vocab_size=97), num_blocks=blocks),
        config=EngineConfig(SchedulerConfig(max_step_tokens=8192)),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    names: Iterator[int] = count()
    for row in range(rows):
        tokens = pack_tokens([(row + i) % 97 for i in range(PROMPT)])
        engine.submit(Generate(f"r{row}", tokens, Limits(num_steps + 64, ignore_eos=True)), "g")
    while engine.load().prefill_tokens or engine.load().waiting:
        engine.step()
    engine.step()
    begin = time.thread_time()
    for step in range(num_steps):
        if captures and step % max(1, EVERY // rows) == 0:
            number = next(names)
            engine.submit(Capture(f"c{number}", f"r{number % rows}", 0), "g")
            if number >= rows:  # a branch has one capsule, the last
                engine.submit(Release(f"c{number - rows}.0"), "g")
        engine.step()
    return 1e6 * (time.thread_time() - begin) / num_steps
