"""Cost of planning: a step of the scheduler, and of the whole engine, around a forward that does nothing.

    python -m bench.engine.scheduler [--steps 400]

Branches of one 1024-token capsule decode; each step every one of them draws a token. `scheduler_us` is
the time in `Scheduler.plan` a step (choosing, room for every row, what the last step left to do),
`engine_us` a whole `Engine.step`: plan, rows, commit, draws, news. `waiting` is the same at 256 rows with
1000 more branches waiting, `sessions` with the rows and those waiting spread over 64 sessions. Means of
CPU time, in microseconds: steps in which all rows need a new block are among them. The last line is one
JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.doubles.forward import MockForward
from bench.measure import machine
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Fork, Limits, Prefill, Share, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch, Logits
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig

PARENT_TOKENS = 1024
NUM_BLOCKS = 16384


class NullForward(MockForward):
    """Computes nothing; always draws the same token."""

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        return [0] * sum(row.num_logits for row in batch.rows)

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return [1] * len(draws)


class StepCost(NamedTuple):
    """Means of one step, in microseconds."""

    scheduler_us: float
    engine_us: float


def step_cost(rows: int, *, waiting: int = 0, sessions: int = 1, num_steps: int = 400) -> StepCost:
    """Of steps in which `rows` branches decode while `waiting` more wait for a row."""
    engine = Engine(
        NullForward(mock_spec(vocab_size=97), num_blocks=NUM_BLOCKS),
        config=EngineConfig(SchedulerConfig(max_rows=rows, ageing_steps=0)),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    engine.submit(Prefill("p", pack_tokens([i % 97 for i in range(PARENT_TOKENS)])), "g")
    while engine.has_work:
        engine.step()
    limits = Limits(num_steps + 100)
    for i in range(sessions):
        num = (rows + waiting) // sessions
        fork = Fork(f"f{i}", "p.0", (b"",) * num, limits, share=Share(session=f"s{i}"))
        engine.submit(fork, "g")
    plan, planned = engine._scheduler.plan, 0.0

    def timed_plan() -> object:
        nonlocal planned
        begin = time.thread_time()
        result = plan()
        planned = time.thread_time() - begin
        return result

    engine._scheduler.plan = timed_plan  # type: ignore[method-assign, assignment]
    for _ in range(20):
        engine.step()
    times = []
    for _ in range(num_steps):
        begin = time.thread_time()
        engine.step()
        times.append((planned, time.thread_time() - begin))
    return StepCost(*(round(1e6 * statistics.fmean(each), 1) for each in zip(*times, strict=True)))


def scheduler_us(num_steps: int = 400) -> dict[str, float]:
    """`Scheduler.plan` at 32 and at 256 decode rows."""
    return {f"r{rows}": step_cost(rows, num_steps=num_steps).scheduler_us for rows in (32, 256)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    num_steps = parser.parse_args().steps
    cases = {
        "r1": step_cost(1, num_steps=num_steps),
        "r32": step_cost(32, num_steps=num_steps),
        "r256": step_cost(256, num_steps=num_steps),
        "r256 waiting": step_cost(256, waiting=1000, num_steps=num_steps),
        "r256 sessions": step_cost(256, waiting=1024, sessions=64, num_steps=num_steps),
    }
    result = {
        "scheduler_us": {name: cost.scheduler_us for name, cost in cases.items()},
        "engine_us": {name: cost.engine_us for name, cost in cases.items()},
        "parent_tokens": PARENT_TOKENS,
        "steps": num_steps,
        **machine(),
    }
    for key, value in result.items():
        print(f"{key:>16}  {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
