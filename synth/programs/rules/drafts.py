"""Programs made by rules, without a source: drafts of their requests, and the workload they make."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.pace import service_s
from mallee.synth.core.streams import stream
from mallee.synth.programs.merge import merged
from mallee.traces.workload import NO_PARENT, Request, Runs, Workload

ID_TOKENS: Final = 16
PER_HOUR: Final = 240.0  # begins of programs


class Draft(NamedTuple):
    """A request of a program; others are named by their places in it, which are before its own."""

    tokens: int  # of its own: what a fork adds, or a root's prompt after what its role shares
    output_tokens: int
    cls: str
    parent: int = NO_PARENT
    waits: tuple[int, ...] = ()
    tool_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Texts:
    """Lengths in tokens. Answers are lognormal around their mean, with this standard deviation of the log."""

    shared: int = 2048  # instructions that all roots of a family begin with
    task: int = 256  # that a root adds
    step: int = 0  # that a fork adds
    output: float = 64.0
    output_sigma: float = 0.5

    def outputs(self, rng: np.random.Generator, count: int) -> list[int]:
        """Lengths of `count` answers, each at least 1."""
        mean = np.log(self.output) - self.output_sigma**2 / 2
        drawn = np.exp(mean + self.output_sigma * rng.standard_normal(count))
        return [max(1, round(x)) for x in drawn.tolist()]


class Rule(ABC):
    """A `Model` of programs that are made up, `PER_HOUR` of them, begun by chance."""

    kind = "session"
    name: str
    texts: Texts

    @abstractmethod
    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One program."""

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """`requests` of programs, the last perhaps cut. Raises ConfigError."""
        knobs.validate()
        if requests < 1:
            raise ConfigError(f"requests={requests}: give at least one")

        def read() -> Iterator[Request]:
            return merged(_programs(self, requests, seed, knobs))

        note = f"made up, seed {seed}"
        return Workload(self.name, ID_TOKENS, read, kind="programs", note=note, has_forks=True)


def _programs(rule: Rule, requests: int, seed: int, knobs: Knobs) -> Iterator["_Program"]:
    rng = stream(seed, "drafts")
    names = _Names(round(rule.texts.shared * knobs.prefix_len), knobs)
    begin_s, rank = 0.0, 0
    while requests:
        drafts = rule.draft(rng)[:requests]
        yield _Program(drafts, rank, begin_s / knobs.speedup, names, knobs)
        requests -= len(drafts)
        rank += 1
        begin_s += float(rng.exponential(3600.0 / PER_HOUR))


class _Names:
    """Ids: each family of programs has instructions of its own."""

    def __init__(self, shared_tokens: int, knobs: Knobs) -> None:
        self._shared = shared_tokens // ID_TOKENS
        self._families = knobs.prefix_root
        self._instructions: dict[int, int] = {}
        self._next = 0

    def root(self, rank: int, own_tokens: int) -> tuple[Runs, int]:
        """Ids of a root's whole blocks, and its tokens."""
        family = rank % self._families
        if family not in self._instructions:
            self._instructions[family] = self._take(self._shared)
        own = max(own_tokens, 0 if self._shared else 1)
        count = own // ID_TOKENS
        runs = [(self._instructions[family], self._shared), (self._take(count), count)]
        return Runs(runs), self._shared * ID_TOKENS + own

    def _take(self, count: int) -> int:
        first = self._next
        self._next += count
        return first


class _Program:
    """A program on its way: drafts become requests."""

    __slots__ = (
        "_arrivals",
        "_children",
        "_drafts",
        "_knobs",
        "_names",
        "_numbers",
        "_order",
        "rank",
    )

    def __init__(
        self, drafts: Sequence[Draft], rank: int, begin_s: float, names: _Names, knobs: Knobs
    ) -> None:
        self._drafts = drafts
        self._knobs = knobs
        self._names = names
        self.rank = rank
        since = _since(drafts, knobs)
        self._order = sorted(range(len(drafts)), key=lambda i: (since[i], i))
        self._arrivals = [begin_s + since[i] / knobs.speedup for i in self._order]
        self._children = [0] * len(drafts)
        for draft in drafts:
            if draft.parent != NO_PARENT:
                self._children[draft.parent] += 1
        self._numbers: dict[int, int] = {}

    @property
    def next_s(self) -> float:
        return self._arrivals[len(self._numbers)]

    @property
    def is_over(self) -> bool:
        return len(self._numbers) == len(self._drafts)

    def request(self, number: int) -> Request:
        """The next one, with its place in the workload."""
        arrival_s = self.next_s
        i = self._order[len(self._numbers)]
        draft = self._drafts[i]
        self._numbers[i] = number
        tokens = _own_tokens(draft, self._knobs)
        ids: Sequence[int] = ()
        if draft.parent == NO_PARENT:
            ids, tokens = self._names.root(self.rank, tokens)
        return Request(
            number=number,
            arrival_s=arrival_s,
            ids=ids,
            input_tokens=tokens,
            output_tokens=_output(draft, self._knobs),
            session=f"p{self.rank}",
            cls=draft.cls,
            wait_for=tuple(sorted(self._numbers[w] for w in draft.waits)),
            tool_wait_s=draft.tool_wait_s,
            parent=NO_PARENT if draft.parent == NO_PARENT else self._numbers[draft.parent],
            num_children=self._children[i],
        )


def _own_tokens(draft: Draft, knobs: Knobs) -> int:
    """Roots' own text is shared by what forks them."""
    return round(
        draft.tokens * (knobs.prefix_len if draft.parent == NO_PARENT else knobs.prompt_len)
    )


def _output(draft: Draft, knobs: Knobs) -> int:
    return max(min(1, draft.output_tokens), round(draft.output_tokens * knobs.osl))


def _since(drafts: Sequence[Draft], knobs: Knobs) -> list[float]:
    """Arrival of each without queues, in seconds since the first."""
    since: list[float] = []
    ends: list[float] = []
    for draft in drafts:
        before = [*draft.waits, *([draft.parent] if draft.parent != NO_PARENT else [])]
        begin = max((ends[i] for i in before), default=0.0)
        begin += draft.tool_wait_s if before else 0.0
        since.append(begin)
        ends.append(begin + service_s(_own_tokens(draft, knobs), _output(draft, knobs)))
    return since
