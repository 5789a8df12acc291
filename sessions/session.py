"""A recorded session put together: its requests in an order in which each can be asked again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mallee.protocol.errors import CodecError
from mallee.protocol.messages import (
    FinishReason,
    Fork,
    Generate,
    Prefill,
    TokenLogprobs,
    unpack_tokens,
)
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.sessions.record import (
    Asked,
    Captured,
    CutShort,
    Entry,
    GivenUp,
    Got,
    Manifest,
    Opened,
    Placed,
    Rewound,
    Stopped,
)

ALWAYS_SAME: Final = ("fingerprint", "vocab_size", "eos_token_ids")
"""Fields of a model that change tokens."""


@dataclass(slots=True)
class RecordedBranch:
    """The tokens that a client got of one branch, and how that ended for it."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of each token, as `RecordedRequest.at`
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    capsule: str | None = None
    boundary: int = 0
    is_given_up: bool = False
    cut: CutShort | None = None
    captured: list[Captured] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)  # one after the other
    num_moves: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it ended by itself: then a replay ends there, too."""
        return self.finish in ("stop", "length") and self.cut is None and not self.is_given_up

    @property
    def end(self) -> str:
        """Its end in one word: a finish reason, "cut", "given up" or, in a torn record, "open"."""
        if self.cut is not None:
            return "cut"
        if self.is_given_up:
            return "given up"
        return self.finish or "open"


@dataclass(slots=True)
class RecordedRequest:
    """One command and its branches. `at`: when it was asked, in seconds since the epoch."""

    command: Generate | Fork | Prefill
    at: float
    weights: WeightVersion
    branches: list[RecordedBranch]

    @property
    def name(self) -> str:
        return self.command.request

    @property
    def source(self) -> str | None:
        """The capsule that it continues."""
        return self.command.capsule if isinstance(self.command, Fork) else None

    def capsules(self) -> Iterator[str]:
        """The capsules that it left, as its client knew them."""
        for branch in self.branches:
            if branch.cut is not None and branch.cut.capsule is not None:
                yield branch.cut.capsule
            elif branch.capsule is not None:
                yield branch.capsule
            for taken in branch.captured:
                yield taken.capsule


class RecordedSession:
    """All parts of a session. `requests` are in the order in which they were asked, by the gateways' clocks.

    Raises CodecError if parts are of different models.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.parts: list[Opened] = []
        self.requests: list[RecordedRequest] = []
        self.manifests: dict[str, Manifest] = {}
        self.rewound: dict[str, Rewound] = {}
        self.stopped: list[str] = []  # reasons why parts end before the session
        self._open: dict[int, RecordedRequest] = {}  # of the part that is read
        for entry in entries:
            self._take(entry)
        self.requests.sort(key=lambda request: request.at)
        self.makers = {name: r for r in self.requests for name in r.capsules()}
        for part in self.parts:
            _check_same(self.model, part.model)

    @property
    def model(self) -> ModelSpec:
        return self.parts[0].model

    @property
    def num_tokens(self) -> int:
        """Tokens that were answered."""
        return sum(len(b.tokens) for request in self.requests for b in request.branches)

    def maker(self, capsule: str) -> RecordedRequest | None:
        """The request that left `capsule`, or what this was rewound from; None: it was there before."""
        while capsule not in self.makers and capsule in self.rewound:
            capsule = self.rewound[capsule].source
        return self.makers.get(capsule)

    def in_order(self) -> list[RecordedRequest]:
        """All requests, each after the one whose capsule it continues: clocks of gateways may differ."""
        found: dict[str, RecordedRequest] = {}
        for request in self.requests:
            chain: list[RecordedRequest] = []
            above: RecordedRequest | None = request
            while (
                above is not None
                and above.name not in found
                and all(above is not each for each in chain)
            ):
                chain.append(above)
                above = None if above.source is None else self.maker(above.source)
            found.update((each.name, each) for each in reversed(chain))
        return list(found.values())

    def _take(self, entry: Entry) -> None:
        match entry:
            case Opened():
                self.parts.append(entry)
                self._open = {}
            case Manifest():
                known = self.manifests.get(entry.capsule)
                if known is None or known.tokens is None:
                    self.manifests[entry.capsule] = entry
            case Asked():
                self._ask(entry)
            case Rewound():
                self.rewound[entry.capsule] = entry
            case Stopped():
                self.stopped.append(entry.reason)
            case _:
                self._take_of_branch(entry)

    def _ask(self, entry: Asked) -> None:
        command = entry.command
        num_branches = 1
        if isinstance(command, Generate):
            num_branches = command.n
        elif isinstance(command, Fork):
            num_branches = len(command.suffixes)
        branches = [RecordedBranch() for _ in range(num_branches)]
        at = self.parts[-1].began + entry.at_s
        request = RecordedRequest(command, at, entry.weights, branches)
        self._open[entry.number] = request
        self.requests.append(request)

    def _take_of_branch(self, entry: Placed | Got | GivenUp | CutShort | Captured) -> None:
        request = self._open.get(entry.number)
        first = entry.first if isinstance(entry, Placed) else entry.branch
        if request is None or not 0 <= first < len(request.branches):
            raise CodecError(f"an entry about branch {first} of no request: {entry!r:.200}")
        branch = request.branches[first]
        match entry:
            case Placed():
                for placed in request.branches[first : first + entry.count]:
                    placed.workers.append(entry.worker)
                    placed.num_moves += entry.is_moved
                if not any(placed.tokens for placed in request.branches):
                    request.weights = entry.weights
            case Got():
                tokens = unpack_tokens(entry.tokens).tolist()
                branch.tokens += tokens
                branch.times += [self.parts[-1].began + entry.at_s] * len(tokens)
                branch.logprobs += entry.logprobs
                branch.finish = entry.finish or branch.finish
                branch.error = entry.error or branch.error
                if entry.finish is not None:
                    branch.capsule, branch.boundary = entry.capsule, entry.boundary
            case GivenUp():
                branch.is_given_up = True
            case CutShort():
                branch.cut = entry
            case Captured():
                branch.captured.append(entry)


def _check_same(ours: ModelSpec, theirs: ModelSpec) -> None:
    for name in ALWAYS_SAME:
        if getattr(ours, name) != getattr(theirs, name):
            raise CodecError(
                f"parts of different models: {name} is {getattr(ours, name)!r} in one and"
                f" {getattr(theirs, name)!r} in another; replay them one by one"
            )
