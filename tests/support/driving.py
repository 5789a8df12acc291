"""Engines of tests that look at answers alone: made, and run to idle."""

from typing import Any

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.worker.engine import Engine
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
