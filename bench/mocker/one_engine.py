"""One mocked engine in virtual time: requests come at their times, what becomes of them is noted."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from mallee.mocker.engine import MockedEngine, Outcome
from mallee.protocol.messages import Command


@dataclass(slots=True)
class Life:
    """One branch: when it was asked for, and each of its tokens. Seconds."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    ended: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Between tokens, on average."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def itl_s(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]


class VirtualRun:
    """Call `send` for what is to come, then `run`. `now` is a clock."""

    def __init__(self, request_s: float = 0.0) -> None:
        """Commands reach the engine `request_s` after they are sent."""
        self.now = 0.0
        self.lives: dict[tuple[str, int], Life] = {}
        self._request_s = request_s
        self._coming: list[tuple[float, int, Command]] = []
        self._count = count()

    def clock(self) -> float:
        return self.now

    def send(self, at: float, command: Command, num_branches: int) -> None:
        """`command` is sent at `at`, not before `now`; its branches are watched."""
        for index in range(num_branches):
            self.lives[command_name(command), index] = Life(at)
        heapq.heappush(self._coming, (at + self._request_s, next(self._count), command))

    def run(
        self, engine: MockedEngine, ended: Callable[[str, int], None] = lambda name, i: None
    ) -> float:
        """Until nothing is left to do: when that is. `ended` hears of each watched branch's end."""
        coming = self._coming
        while True:
            while coming and coming[0][0] <= self.now:
                engine.submit(heapq.heappop(coming)[2])
            end = engine.start(self.now)
            if end is None:
                if not coming:
                    return self.now
                self.now = coming[0][0]
                continue
            if coming and coming[0][0] < end:
                end = engine.cut(coming[0][0])
            self.now = end
            for key in self._note(engine.finish()):
                ended(*key)

    def _note(self, outcome: Outcome) -> Iterable[tuple[str, int]]:
        """The tokens of a stride come at even distances. Branches that ended."""
        over = []
        for told in outcome.updates:
            if told.error is not None:
                raise RuntimeError(f"{told.request}: {told.error}")
            life = self.lives.get((told.request, told.branch))
            if life is None:
                continue
            each = (outcome.ended - outcome.begun) / outcome.num_steps
            first = outcome.num_steps - told.num_tokens + 1
            life.tokens += [outcome.begun + each * (first + i) for i in range(told.num_tokens)]
            if told.finish is not None:
                life.ended = outcome.ended
                over.append((told.request, told.branch))
        return over


def command_name(command: Command) -> str:
    """Of whatever it is about."""
    name: str = getattr(command, "request", "") or getattr(command, "capsule", "")
    return name
