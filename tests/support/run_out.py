"""Runs an engine whose moves go on beside it until it has nothing left to do."""

from threading import Event
from typing import NamedTuple

from mallee.protocol.messages import CapsuleReply, Command
from mallee.worker.engine import Engine


class Ran(NamedTuple):
    """Tokens that were drawn, by request, and all replies."""

    tokens: dict[str, list[int]]
    replies: list[CapsuleReply]


def run_out(engine: Engine, *commands: Command) -> Ran:
    """Step until nothing runs and nothing moves; no request may fail."""
    ran = Ran({}, [])
    moved = Event()
    engine.notify(moved.set)
    for command in commands:
        engine.submit(command, "g")
    while engine.has_work or (engine._lower is not None and engine._lower.under_way):
        assert engine.has_work or moved.wait(30.0)
        moved.clear()
        for frame in engine.step().frames.values():
            ran.replies.extend(frame.replies)
            for update in frame.updates:
                assert update.error is None, update.error
                ran.tokens.setdefault(update.request, []).extend(update.tokens)
    engine.check()
    return ran
