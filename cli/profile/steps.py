"""`mallee profile --trace`: the steps of a real engine, phase by phase, as a trace that browsers show.

Source of the form: "Trace Event Format" (Chromium); ui.perfetto.dev and chrome://tracing open it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.protocol.ids import Incarnation, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import (
    Fork,
    Generate,
    Limits,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import DeviceForward, Forward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.plan import Plan
from mallee.worker.sched.policy import SchedulerConfig

PHASES: Final = ("plan", "launch", "collect", "emit")
_GATEWAY: Final = "profile"
_FEWEST: Final = 64  # tokens of a window in which the work below still is work


class StepTimes(NamedTuple):
    """One step: its begin and the ends of its PHASES in seconds, and the work that was planned."""

    times: tuple[float, ...]
    decodes: int
    chunks: int
    chunk_tokens: int
    draws: int  # of kept logits, without a pass
    copies: int  # of blocks, on write

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def tokens(self) -> int:
        """Those computed."""
        return self.decodes + self.chunk_tokens


class StepRecorder:
    """A `StepWatch` that keeps the times of all steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: list[float] = []
        self._plan: Plan | None = None
        self.steps: list[StepTimes] = []

    def begun(self) -> None:
        self._times = [self._clock()]

    def planned(self, plan: Plan) -> None:
        self._plan = plan
        self._times.append(self._clock())

    def launched(self) -> None:
        self._times.append(self._clock())

    def collected(self) -> None:
        self._times.append(self._clock())

    def ended(self) -> None:
        self._times.append(self._clock())
        plan = self._plan
        assert plan is not None, "planned before"
        self.steps.append(
            StepTimes(
                tuple(self._times),
                len(plan.decodes),
                len(plan.chunks),
                sum(len(chunk.tokens) for chunk in plan.chunks),
                len(plan.ready),
                len(plan.copies),
            )
        )


def record_steps(
    forward: Forward,
    *,
    device: DeviceForward | None = None,
    clock: Callable[[], float],
    max_context: int,
    max_rows: int,
    max_step_tokens: int,
    seed: int = 0,
) -> list[StepTimes]:
    """The steps of one engine that takes in a prompt, forks it, and meanwhile gets a second prompt.

    So there are steps that only compute chunks, that only decode, and that do both. `device` is `forward`
    again, if it computes beside the host. Raises ConfigError.
    """
    room = (forward.num_blocks - 2) * forward.block_size // 4
    window = min(max_context, forward.spec.max_model_len, room)
    if window < _FEWEST:
        raise ConfigError(f"{window} tokens have room here: give at least {4 * _FEWEST} KV tokens")
    drawn = window // 4
    prompt, rows = window - drawn, min(max_rows, 8)
    numbers = np.random.default_rng(seed)

    def text() -> bytes:
        return pack_tokens(numbers.integers(1, forward.spec.vocab_size, prompt, np.uint32))

    recorder = StepRecorder(clock)
    engine = Engine(
        forward,
        device=device,
        config=EngineConfig(SchedulerConfig(max_step_tokens=max_step_tokens)),
        clock=clock,
        worker=WorkerId("profile"),
        incarnation=Incarnation(1),
        watch=recorder,
    )
    limits, sampling = Limits(drawn, ignore_eos=True), Sampling(0.8, seed=seed)
    try:
        _run(engine, Prefill("prefix", text()))
        capsule = capsule_id(RequestId("prefix"), 0)
        suffixes = tuple(b"" for _ in range(rows))
        _run(engine, Fork("fork", capsule, suffixes, limits, sampling), num_steps=drawn // 4)
        _run(engine, Generate("second", text(), limits, sampling))
    finally:
        engine.close()
    return recorder.steps


def _run(engine: Engine, command: Prefill | Fork | Generate, num_steps: int = 1 << 30) -> None:
    """Take so many steps, or as many as there are to take."""
    refusal = engine.submit(command, _GATEWAY)
    assert refusal is None, refusal
    while num_steps and engine.has_work:
        engine.step()
        num_steps -= 1


def chrome_trace(steps: Sequence[StepTimes], conditions: dict[str, Any]) -> dict[str, Any]:
    """The trace: an event a step, inside of it one a phase, and counters of rows and tokens."""
    return {
        "displayTimeUnit": "ms",
        "otherData": conditions,
        "traceEvents": [*_heads(str(conditions.get("model", "engine"))), *_events(steps)],
    }


def _heads(name: str) -> Iterator[dict[str, Any]]:
    for kind, value in (("process_name", f"mallee engine, {name}"), ("thread_name", "steps")):
        yield {"name": kind, "ph": "M", "pid": 1, "tid": 1, "args": {"name": value}}


def _events(steps: Sequence[StepTimes]) -> Iterator[dict[str, Any]]:
    zero = steps[0].times[0] if steps else 0.0

    def span(name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        at = {"ts": round((begin - zero) * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
        return {"name": name, "cat": "engine", "ph": "X", "pid": 1, "tid": 1, **at, "args": args}

    for number, step in enumerate(steps):
        begin, end = step.times[0], step.times[-1]
        work = {
            "step": number,
            "rows": step.rows,
            "tokens": step.tokens,
            "decodes": step.decodes,
            "chunks": step.chunks,
            "chunk_tokens": step.chunk_tokens,
            "draws_only": step.draws,
            "copies": step.copies,
        }
        yield span("step", begin, end, work)
        for phase, (a, b) in zip(
            PHASES, zip(step.times, step.times[1:], strict=False), strict=True
        ):
            yield span(phase, a, b, {"step": number})
        counts = {"rows": step.rows, "tokens": step.tokens}
        for name, value in counts.items():
            at = round((begin - zero) * 1e6, 3)
            yield {"name": name, "ph": "C", "pid": 1, "ts": at, "args": {name: value}}


def save_trace(path: Path, steps: Sequence[StepTimes], conditions: dict[str, Any]) -> None:
    path.write_text(json.dumps(chrome_trace(steps, conditions)), encoding="utf-8")


def summary(steps: Sequence[StepTimes]) -> list[str]:
    """A line a phase: its time in all, and its share."""
    total = sum(step.times[-1] - step.times[0] for step in steps)
    lines = []
    for i, phase in enumerate(PHASES):
        seconds = sum(step.times[i + 1] - step.times[i] for step in steps)
        lines.append(f"{phase:8} {seconds * 1e3:9.1f} ms  {seconds / total:6.1%}")
    return lines
