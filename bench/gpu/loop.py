"""Decode steps of a whole engine: what it plans, launches, draws and reports, as it serves."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

import torch

from bench.engine.ours import GREEDY, Ours, Run
from bench.gpu.shapes import Scale
from bench.gpu.steps import device_of, synchronize
from bench.gpu.trees import engine_over, prompt
from mallee.worker.model.runner import TorchForward

_WARM_UP = 4
"""Steps at the beginning: prompts, first draws, the first pass that is launched ahead."""
_TEXT = 17


class Event(Protocol):
    """A moment of the device's."""

    def elapsed_time(self, later: Any) -> float: ...


class Loop(NamedTuple):
    """A step of steady decodes, and the share of it in which the device has nothing to do.

    None: the device can't tell. A device that waits between the launches of one pass counts as busy.
    """

    step_s: float
    host_gap: float | None


class Marked:
    """A `TorchForward` whose launches are between pairs of the device's events, if it has any."""

    def __init__(self, inner: TorchForward) -> None:
        self._inner = inner
        self._has_events = torch.device(device_of(inner)).type == "cuda"
        self.spans: list[tuple[Event, Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *given: Any) -> Any:
        return self._between(self._inner.forward, *given)

    def forward_drawn(self, *given: Any) -> Any:
        return self._between(self._inner.forward_drawn, *given)

    def launch_draws(self, *given: Any) -> Any:
        return self._between(self._inner.launch_draws, *given)

    def _between(self, call: Callable[..., Any], *given: Any) -> Any:
        if not self._has_events:
            return call(*given)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*given)
        end.record()
        self.spans.append((begin, end))
        return result


def alone(forward: TorchForward, scale: Scale) -> Loop:
    """Steps of one short text."""
    text = prompt(scale, _TEXT, 5)
    return _steps(forward, scale, lambda ours, num: ours.generate([text], num, GREEDY), 1)


def beside(forward: TorchForward, scale: Scale) -> Loop:
    """Steps of as many short texts as there are branches, which share nothing."""
    texts = [prompt(scale, _TEXT, 50 + i) for i in range(scale.branches)]
    return _steps(
        forward, scale, lambda ours, num: ours.generate(texts, num, GREEDY), scale.branches
    )


def forked(forward: TorchForward, scale: Scale, num_shared: int) -> Loop:
    """Steps of the branches of one capsule, of so many tokens."""
    text, suffixes = prompt(scale, num_shared, 6), [()] * scale.branches

    def run(ours: Ours, num: int) -> Run:
        capsule = ours.prefill(text)
        found = ours.fork(capsule, suffixes, num)
        ours.release(capsule)
        return found

    return _steps(forward, scale, run, scale.branches)


def _steps(
    forward: TorchForward, scale: Scale, run: Callable[[Ours, int], Run], num_rows: int
) -> Loop:
    marked = Marked(forward)
    ours = engine_over(cast(TorchForward, marked), scale)
    found = run(ours, 3 * scale.repeats + _WARM_UP + 1)
    ours.engine.close()
    synchronize(device_of(forward))()  # events tell no time before they have come
    steady = [seconds for seconds, num in found.steps if num == num_rows][_WARM_UP:]
    return Loop(statistics.median(steady), idle_share(marked.spans[-4 * scale.repeats :]))


def idle_share(spans: Sequence[tuple[Event, Event]]) -> float | None:
    """The share of the time of `spans` in which none of them is under way; None if there are none."""
    if not spans:
        return None
    whole = spans[0][0].elapsed_time(spans[-1][1])
    return sum(end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(spans)) / whole
