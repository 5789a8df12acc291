"""Engines of tests that look at answers alone: made, and run to idle; a forward that is looked at."""

from collections.abc import Sequence
from typing import Any

from bench.doubles.forward import MockForward
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw
from mallee.worker.records import EngineConfig


def engine_over(forward: Any, *, config: EngineConfig | None = None, **more: Any) -> Engine:
    """An engine whose clock stands still, in its first life."""
    fixed = {"clock": lambda: 0.0, "worker": WorkerId("w0"), "incarnation": Incarnation(1)}
    return Engine(forward, config=config or EngineConfig(), **{**fixed, **more})


def drive(engine: Engine) -> dict[tuple[str, int], tuple[list[int], Any]]:
    """Run to idle, checking invariants; tokens and last update by branch."""
    found: dict[tuple[str, int], tuple[list[int], Any]] = {}
    while engine.has_work:
        for frame in engine.step().frames.values():
            for update in frame.updates:
                tokens, _ = found.get((update.request, update.branch), ([], None))
                found[update.request, update.branch] = (tokens + list(update.tokens), update)
        engine.check()
    return found


class HistoryForward(MockForward):
    """Remembers the histories that it was given, by seed and position: prompts, and counts of tokens."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(mock_spec(), num_blocks=num_blocks, block_size=4)
        self.seen: dict[tuple[int, int], tuple[list[int], dict[int, int]]] = {}

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        for draw in draws:
            assert draw.history is not None
            draw.history.check()
            counts = zip(draw.history.drawn.tolist(), draw.history.counts.tolist(), strict=True)
            self.seen[draw.seed, draw.position] = (draw.history.prompt.tolist(), dict(counts))
        return super().sample(draws)
