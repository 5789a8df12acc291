"""Answers from whose midst capsules are taken, and the replies about capsules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mallee.protocol.errors import MalleeError, from_wire
from mallee.protocol.messages import CapsuleReply, CapsuleStatus, Command, Fork, Limits, Update
from mallee.worker.engine import Engine


@dataclass
class Course:
    """Tokens of each branch with the steps that drew them, last updates, and replies by request."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    steps: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    last: dict[tuple[str, int], Update] = field(default_factory=dict)
    replies: dict[str, CapsuleReply] = field(default_factory=dict)

    def status(self, request: str) -> CapsuleStatus:
        reply = self.replies[request]
        assert reply.error is None, reply.error
        assert reply.status is not None
        return reply.status

    def error(self, request: str) -> MalleeError:
        """Of a command about a capsule, or of a request that was refused."""
        reply = self.replies.get(request)
        wire = self.last[request, -1].error if reply is None else reply.error
        assert wire is not None, "it was not refused"
        return from_wire(wire)


def course(
    engine: Engine, *commands: Command, later: Mapping[int, Sequence[Command]] | None = None
) -> Course:
    """Run to idle, checking invariants; `later` has commands that come after so many steps."""
    found, num_steps = Course(), 0
    for command in commands:
        assert engine.submit(command, "g") is None
    waiting = dict(later or {})
    while engine.has_work or waiting:
        for command in waiting.pop(num_steps, ()):
            assert engine.submit(command, "g") is None
        result = engine.step()
        num_steps += 1
        for frame in result.frames.values():
            for update in frame.updates:
                key = update.request, update.branch
                found.tokens.setdefault(key, []).extend(update.tokens)
                found.steps.setdefault(key, []).extend([num_steps] * len(update.tokens))
                found.last[key] = update
            found.replies.update({reply.request: reply for reply in frame.replies})
        engine.check()
    return found


def resume(request: str, capsule: str, *, at: int | None = None, more: int = 0) -> Fork:
    """The command that goes on as the branch that `capsule` was taken from."""
    return Fork(request, capsule, (b"",), Limits(more), at=at, resumes=True)
