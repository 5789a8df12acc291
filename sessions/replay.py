"""A recorded session asked again, of an engine of this process, and compared token by token.

One request after the other: each after that whose capsule it continues. What the client of the record did
while an answer ran (hung up, cut it at a stop string, took a capsule of it) is done at the same token again.
Sharing, batches, shards and moves differ from those of the record; tokens must not.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import ne
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import structs

from mallee.protocol.errors import IncompatibleCapsule, InternalError, MalleeError, from_wire
from mallee.protocol.ids import RequestId, capsule_id
from mallee.protocol.messages import (
    ALL_BRANCHES,
    Cancel,
    CapsuleReply,
    Capture,
    Command,
    Cut,
    Fork,
    Generate,
    Prefill,
    Release,
    Rewind,
    Update,
)
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.sessions.record import Captured, Rewound
from mallee.sessions.session import (
    ALWAYS_SAME,
    RecordedBranch,
    RecordedRequest,
    RecordedSession,
)
from mallee.worker.engine import Engine

NUM_BEFORE: Final = 8  # tokens that are told of what preceded a divergence
_OWN: Final = "replay"  # the gateway's name, and the beginning of names of requests of no client

Verdict: TypeAlias = Literal["equal", "diverged", "left out"]
MakeEngine: TypeAlias = Callable[[WeightVersion], Engine]


class Divergence(NamedTuple):
    """The first place where a branch's answer is another than recorded.

    `step` counts the tokens of its answer before it, `position` those of its whole text. `expected` and
    `got` are tokens, or the words for an end.
    """

    request: str
    branch: int
    step: int
    position: int
    expected: int | str
    got: int | str
    before: tuple[int, ...]

    def __str__(self) -> str:
        before = " ".join(map(str, self.before)) or "nothing"
        return (
            f"{self.request}, branch {self.branch}, step {self.step} (position {self.position}):"
            f" expected {self.expected}, got {self.got}; before it: {before}"
        )


class Outcome(NamedTuple):
    """A request's replay. `num_tokens` were equal; `reason` why it was left out."""

    request: RecordedRequest
    verdict: Verdict
    num_tokens: int
    divergences: tuple[Divergence, ...] = ()
    reason: str = ""


def check_model(recorded: ModelSpec, ours: ModelSpec) -> None:
    """Raises IncompatibleCapsule naming the fields that differ, of those that change tokens."""
    fields = (*ALWAYS_SAME, "dtype_nbytes")
    both = [(name, str(getattr(recorded, name)), str(getattr(ours, name))) for name in fields]
    if different := [each for each in both if each[1] != each[2]]:
        raise IncompatibleCapsule(f"of the recorded model {recorded.name}", different)


@dataclass(slots=True)
class _Branch:
    """A branch that is replayed beside what was recorded of it."""

    recorded: RecordedBranch
    start: int  # tokens of its text before its answer
    tokens: list[int]
    finish: str | None = None
    capsule: str | None = None
    boundary: int = 0
    is_left: bool = False  # as its client did
    has_diverged: bool = False
    num_captured: int = 0

    @property
    def num_wanted(self) -> int:
        """Tokens that are to be drawn before the client does what it did last."""
        taken = [each.boundary - self.start for each in self.recorded.captured]
        return max(len(self.recorded.tokens), *taken, 0)

    def take(self, update: Update) -> None:
        expected = self.recorded.tokens[len(self.tokens) :][: len(update.tokens)]
        self.has_diverged |= any(map(ne, expected, update.tokens))
        self.tokens += update.tokens
        if update.finish is not None and not self.is_left:
            self.finish, self.boundary = update.finish, update.boundary
            self.capsule = update.capsule


class Replay:
    """Replays one session. `make_engine` gives an engine with those weights, the same one for the same.

    The engines are its own, and have room for what the session keeps.
    """

    def __init__(self, session: RecordedSession, make_engine: MakeEngine) -> None:
        self._session = session
        self._make_engine = make_engine
        self._order = session.in_order()
        self._uses = Counter(self._used())
        self._made: dict[str, str] = {}  # capsules: names in the record, names here
        self._boundaries: dict[str, int] = {}  # of capsules by names in the record
        self._failed: dict[str, str] = {}  # capsules that there are not, and why
        self._captures: dict[str, Captured] = {}  # under way, by their requests
        self._num_own = 0

    def _used(self) -> Iterator[str]:
        """Every use of every capsule, by a fork or a rewind."""
        for request in self._order:
            capsule = request.source
            while capsule is not None:
                yield capsule
                rewound = self._session.rewound.get(capsule)
                capsule = None if rewound is None else rewound.source

    def run(self) -> Iterator[Outcome]:
        """Replay all requests, in order."""
        for request in self._order:
            outcome = self._replay(request)
            self._let_go(request)
            yield outcome

    def _replay(self, request: RecordedRequest) -> Outcome:
        if not any(_has_news(branch) for branch in request.branches):
            return Outcome(request, "equal", 0, (), "nothing was answered")
        try:
            engine = self._engine(request.weights)
            command, start = self._command(request, engine)
            branches = self._run(engine, command, request, start)
        except _LeftOut as left_out:
            for capsule in request.capsules():
                self._failed[capsule] = f"it would come from {request.name}, which was left out"
            return Outcome(request, "left out", 0, (), str(left_out))
        found = [_compared(request, i, branch) for i, branch in enumerate(branches)]
        divergences = tuple(each for _, each in found if each is not None)
        for branch in branches:
            self._note(request, branch, is_good=not divergences)
        num_equal = sum(num for num, _ in found)
        return Outcome(request, "diverged" if divergences else "equal", num_equal, divergences)

    def _engine(self, weights: WeightVersion) -> Engine:
        """Raises _LeftOut."""
        try:
            return self._make_engine(weights)
        except MalleeError as error:
            raise _LeftOut(f"its weights, {weights.label}, can't be had: {error}") from error

    # Capsules

    def _command(
        self, request: RecordedRequest, engine: Engine
    ) -> tuple[Generate | Fork | Prefill, list[int]]:
        """The command that asks again, and the tokens before each branch's answer."""
        command = request.command
        needed = any(self._uses[capsule] for capsule in request.capsules())
        keep_s = 0.0 if needed else None
        if isinstance(command, Prefill):
            num = len(command.tokens) // 4
            return structs.replace(command, ttl_s=0.0), [num]
        if isinstance(command, Generate):
            num = len(command.tokens) // 4
            return structs.replace(command, keep_s=keep_s), [num] * command.n
        boundary = self._bring(command.capsule, engine)
        boundary = boundary if command.at is None else command.at
        starts = [boundary + len(suffix) // 4 for suffix in command.suffixes]
        own = self._made[command.capsule]
        return structs.replace(command, capsule=own, keep_s=keep_s), starts

    def _bring(self, capsule: str, engine: Engine) -> int:
        """Have `capsule` on the engine; its boundary. Raises _LeftOut."""
        chain = [capsule]
        while chain[-1] not in self._made and chain[-1] in self._session.rewound:
            chain.append(self._session.rewound[chain[-1]].source)
        for name in reversed(chain):
            if name in self._made:
                continue
            if (why := self._failed.get(name)) is not None:
                raise _LeftOut(f"it continues {name}: {why}")
            if (rewound := self._session.rewound.get(name)) is not None:
                self._rewind(engine, rewound)
            else:
                self._build(name, engine)
        return self._boundaries[capsule]

    def _build(self, capsule: str, engine: Engine) -> None:
        """A capsule from before the record, of its text."""
        manifest = self._session.manifests.get(capsule)
        if manifest is None or manifest.tokens is None:
            raise _LeftOut(f"it continues {capsule}, of which the record has no text")
        name = self._new_name()
        command = Prefill(
            name,
            manifest.tokens,
            capsule=capsule,
            grammar=manifest.grammar,
            continuation=manifest.continuation,
        )
        last = [each for each in _played(engine, command) if isinstance(each, Update)][-1]
        if last.error is not None:
            raise _LeftOut(f"{capsule} can't be built: {from_wire(last.error)}")
        self._made[capsule] = capsule
        self._boundaries[capsule] = last.boundary

    def _rewind(self, engine: Engine, rewound: Rewound) -> None:
        """Make a capsule of the beginning of another. Raises _LeftOut."""
        command = Rewind(self._new_name(), self._made[rewound.source], rewound.boundary)
        for news in _played(engine, command):
            if isinstance(news, CapsuleReply):
                self._keep(rewound.capsule, rewound.boundary, news)
        if (why := self._failed.get(rewound.capsule)) is not None:
            raise _LeftOut(f"it continues {rewound.capsule}: {why}")

    def _keep(self, capsule: str, boundary: int, reply: CapsuleReply) -> None:
        """Remember what was `capsule` in the record, or why it is not there."""
        if reply.status is None:
            error = reply.error and from_wire(reply.error)
            self._failed[capsule] = f"it can't be made: {error}"
        elif reply.status.boundary != boundary:
            self._failed[capsule] = f"it was made at {reply.status.boundary}, not at {boundary}"
        else:
            self._made[capsule] = reply.status.capsule
            self._boundaries[capsule] = boundary

    def _note(self, request: RecordedRequest, branch: _Branch, *, is_good: bool) -> None:
        """Remember the capsules that a branch left."""
        recorded = branch.recorded
        name = recorded.capsule if recorded.cut is None else recorded.cut.capsule
        if name is not None and branch.capsule is not None:
            self._made[name] = branch.capsule
            self._boundaries[name] = branch.boundary
        if not is_good:
            for capsule in request.capsules():
                self._made.pop(capsule, None)
                self._failed[capsule] = f"it would come from {request.name}, which diverged"

    def _let_go(self, request: RecordedRequest) -> None:
        """Release the capsules that are needed no more."""
        capsule = request.source
        while capsule is not None:
            self._uses[capsule] -= 1
            self._release(capsule, request.weights)
            rewound = self._session.rewound.get(capsule)
            capsule = None if rewound is None else rewound.source
        for left in request.capsules():
            self._release(left, request.weights)

    def _release(self, capsule: str, weights: WeightVersion) -> None:
        if self._uses[capsule] <= 0 and (own := self._made.pop(capsule, None)) is not None:
            self._make_engine(weights).submit(Release(own), _OWN)

    def _new_name(self) -> str:
        self._num_own += 1
        return f"{_OWN}{self._num_own}"

    # Branches

    def _run(
        self,
        engine: Engine,
        command: Generate | Fork | Prefill,
        request: RecordedRequest,
        starts: list[int],
    ) -> list[_Branch]:
        """Ask for all branches and play what their client did. Raises _LeftOut."""
        rows = zip(request.branches, starts, strict=True)
        branches = [_Branch(recorded, start, []) for recorded, start in rows]
        engine.submit(command, _OWN)
        while True:
            self._play_client(engine, command.request, branches)
            if not engine.has_work:
                break
            for news in _news(engine):
                if isinstance(news, CapsuleReply):
                    taken = self._captures.pop(news.request)
                    self._keep(taken.capsule, taken.boundary, news)
                elif news.branch == ALL_BRANCHES:
                    _refuse(branches, news)
                else:
                    branches[news.branch].take(news)
        if any(branch.finish is None and not branch.is_left for branch in branches):
            raise InternalError(f"{command.request} is idle and has not ended")
        return branches

    def _play_client(self, engine: Engine, name: str, branches: list[_Branch]) -> None:
        """Do what the client did at this token of each branch."""
        for i, branch in enumerate(branches):
            if not branch.is_left:
                self._play_branch(engine, name, i, branch)

    def _play_branch(self, engine: Engine, name: str, i: int, branch: _Branch) -> None:
        recorded, num, is_over = branch.recorded, len(branch.tokens), branch.finish is not None
        for taken in recorded.captured[branch.num_captured :]:
            if is_over or branch.start + num < taken.boundary:
                break
            branch.num_captured += 1
            command = Capture(self._new_name(), name, i)
            self._captures[command.request] = taken
            engine.submit(command, _OWN)
        if branch.has_diverged:
            branch.is_left = True
            engine.submit(Cancel(name, i), _OWN)
        elif num < branch.num_wanted and not is_over:
            return
        elif recorded.cut is not None:
            branch.is_left = True
            at, residue = recorded.cut.at, recorded.cut.residue
            engine.submit(Cut(name, i, at, residue), _OWN)
            branch.capsule = capsule_id(RequestId(name), i)
            branch.boundary = at + len(residue) // 4
        elif not recorded.is_whole and not is_over:
            branch.is_left = True
            engine.submit(Cancel(name, i), _OWN)


class _LeftOut(Exception):
    """A request can't be replayed; its text says why."""


def _has_news(branch: RecordedBranch) -> bool:
    """Whether a client got anything of it."""
    return bool(branch.tokens or branch.is_whole or branch.captured or branch.cut)


def _refuse(branches: list[_Branch], update: Update) -> None:
    """Take the refusal of a whole request. Raises _LeftOut if the record has none."""
    if all(branch.recorded.error is None for branch in branches):
        raise _LeftOut(f"refused here: {update.error and from_wire(update.error)}")
    for branch in branches:
        branch.finish = "error"


def _compared(
    request: RecordedRequest, number: int, branch: _Branch
) -> tuple[int, Divergence | None]:
    """The number of tokens that are as recorded, and the first that isn't."""
    recorded = branch.recorded
    pairs = enumerate(zip(recorded.tokens, branch.tokens, strict=False))
    step = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
    if step is None:
        step = min(len(recorded.tokens), len(branch.tokens))
        is_short = step < len(recorded.tokens)
        is_long = recorded.is_whole and step < len(branch.tokens)
        is_other_end = recorded.is_whole and branch.finish != recorded.finish
        if not (is_short or is_long or is_other_end):
            return step, None
    expected = recorded.tokens[step] if step < len(recorded.tokens) else f"its end ({recorded.end})"
    end = f"its end ({branch.finish})"
    got = branch.tokens[step] if step < len(branch.tokens) else end
    before = tuple(recorded.tokens[max(0, step - NUM_BEFORE) : step])
    position = branch.start + step
    return step, Divergence(
        request=request.name,
        branch=number,
        step=step,
        position=position,
        expected=expected,
        got=got,
        before=before,
    )


def _news(engine: Engine) -> Iterator[Update | CapsuleReply]:
    """One step's."""
    frame = engine.step().frames.get(_OWN)
    if frame is not None:
        yield from frame.updates
        yield from frame.replies


def _played(engine: Engine, command: Command) -> list[Update | CapsuleReply]:
    """The news of `command`, up to an idle engine."""
    engine.submit(command, _OWN)
    found: list[Update | CapsuleReply] = []
    while engine.has_work:
        found += _news(engine)
    return found
