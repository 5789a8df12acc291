"""Runs an engine whose moves go on beside it until it has nothing left to do."""

from threading import Event

from mallee.worker.engine import Engine


def run_out(engine: Engine, within_s: float) -> list[int]:
    """Step until nothing runs and nothing moves; the tokens that were drawn. A move may take so long."""
    tokens: list[int] = []
    moved = Event()
    engine.notify(moved.set)
    while True:
        moved.clear()
        while engine.has_work:
            for frame in engine.step().frames.values():
                tokens += [token for update in frame.updates for token in update.tokens]
        assert engine._lower is not None
        if not engine._lower.num_moving:
            return tokens
        assert engine.has_work or moved.wait(within_s)
