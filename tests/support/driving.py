"""An engine run to idle, for tests that look at answers alone."""

from typing import Any

from mallee.worker.engine import Engine


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
