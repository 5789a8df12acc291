"""Drafters that know the answers, and what an engine tells apart from when it tells it."""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from bench.doubles.forward import digest_of
from mallee.protocol.events import CapsuleStored, Event, Removed, Stored, unpack_hashes
from mallee.protocol.messages import Command, TokenLogprobs
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch
from mallee.worker.kv.paths import flatten
from mallee.worker.sched.branch import Branch
from mallee.worker.speculation.draft_model import DraftModel
from mallee.worker.speculation.drafters import Drafter, text_of
from mallee.worker.speculation.worth import StepCosts

Name: TypeAlias = tuple[str, int]
Kind: TypeAlias = Literal["right", "wrong", "mixed", "random"]


class EachAlone(ABC):
    """A drafter that guesses for one branch at a time, in no time."""

    @abstractmethod
    def read(self, branch: Branch) -> None: ...

    @abstractmethod
    def propose(self, branch: Branch, num_tokens: int) -> Sequence[int]: ...

    @abstractmethod
    def forget(self, branch: Branch) -> None: ...

    def propose_all(self, lengths: Mapping[Branch, int]) -> Mapping[Branch, Sequence[int]]:
        return {branch: self.propose(branch, num) for branch, num in lengths.items()}

    def seconds(self, branch: Branch, num_branches: int) -> float:
        return 0.0


class Knowing(EachAlone):
    """A drafter that knows `answers`, those of plain decoding, and tells them as `kind` says.

    Right, wrong from the first token on, right up to a token drawn by `rng`, or anything.
    """

    def __init__(self, kind: Kind, answers: Mapping[Name, Sequence[int]], *, vocab: int) -> None:
        self._kind = kind
        self._answers = answers
        self._vocab = vocab
        self._rng = random.Random(kind)
        self.num_proposed = 0

    def read(self, branch: Branch) -> None:
        """It has read all."""

    def forget(self, branch: Branch) -> None:
        """It remembers nothing of a branch."""

    def propose(self, branch: Branch, num_tokens: int) -> list[int]:
        self.num_proposed += 1
        rng = self._rng
        if self._kind == "random":
            return [rng.randrange(self._vocab) for _ in range(rng.randrange(num_tokens + 1))]
        answer = self._answers.get((branch.job.command.request, branch.index), ())
        at = branch.num_output
        draft = list(answer[at : at + num_tokens])
        wrong = {"right": num_tokens, "wrong": 0}.get(self._kind, rng.randrange(num_tokens + 1))
        return [t if i < wrong else (t + 1) % self._vocab for i, t in enumerate(draft)]


class Unsure:
    """A forward pass like `inner`, whose logits are others in one place of three, in no order.

    As a draft model it is mostly right for one that answers by `inner`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch) -> Sequence[Any]:
        return [changed(each) for each in self._inner.forward(batch)]


def changed(logits: int) -> int:
    """Others in one place of three."""
    return logits ^ (logits % 3 == 0)


class CheckedModel(DraftModel):
    """A draft model over an `Unsure` forward pass of digests, each of whose drafts is computed again.

    From the text alone, by `draw`: so its KV is that of the text, whatever was shared, rolled back, evicted.
    """

    def __init__(self, forward: Any, draw: Callable[[Draw], int], **options: Any) -> None:
        super().__init__(forward, clock=lambda: 0.0, **options)
        self._draw_again = draw
        self.num_checked = 0

    def propose_all(self, lengths: Mapping[Branch, int]) -> dict[Branch, list[int]]:
        found = super().propose_all(lengths)
        for branch, draft in found.items():
            text = text_of(branch, 0, branch.length)
            for i, token in enumerate(draft):
                logits = changed(digest_of(text + draft[:i]))
                assert token == self._draw_again(self._draw(branch, logits, draft[:i]))
                self.num_checked += 1
        return found


def draft_model(forward: Any, **options: Any) -> DraftModel:
    """A drafter that computes by `forward` and looks at no clock."""
    return DraftModel(forward, clock=lambda: 0.0, **options)


class Told(NamedTuple):
    """All that an engine told of one branch."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: str | None
    boundary: int
    capsule: str | None
    error: str | None


class Teller:
    """Adds up what an engine tells, checking positions and invariants."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self.most_tokens = 0  # of one update
        self.drafts: Counter[Name] = Counter()  # tokens drafted for each branch, as it was told
        self.accepted: Counter[Name] = Counter()
        self.events: list[Event] = []
        self._updates: dict[Name, list[Any]] = {}

    def step(self) -> None:
        result = self.engine.step()
        self.engine.check()
        speculator = self.engine._speculator
        for drafter in () if speculator is None else speculator.drafters:
            if isinstance(drafter, DraftModel):
                drafter.check()
        self.num_steps += 1
        for frame in result.frames.values():
            for update in frame.updates:
                own = self._updates.setdefault((update.request, update.branch), [])
                num = sum(len(each.tokens) for each in own)
                assert update.position == num or update.branch < 0, "a gap in an answer"
                own.append(update)
                drafted, accepted = update.drafts or (0, 0)
                self.drafts[update.request, update.branch] += drafted
                self.accepted[update.request, update.branch] += accepted
                self.most_tokens = max(self.most_tokens, len(update.tokens))
        if result.events is not None:
            self.events += result.events.events

    def run(self, *commands: Command, max_steps: int = 5000) -> None:
        for command in commands:
            self.engine.submit(command, "g")
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def updates(self, request: str, branch: int = 0) -> list[Any]:
        return self._updates[request, branch]

    def answers(self) -> dict[Name, list[int]]:
        return {name: list(told.tokens) for name, told in self.told().items()}

    def told(self) -> dict[Name, Told]:
        return {name: _told(updates) for name, updates in self._updates.items()}

    def stored(self) -> list[Any]:
        """Blocks and capsules that were stored, in no order: steps put them in different ones."""
        found: list[Any] = []
        for event in self.events:
            if isinstance(event, Stored | Removed):
                kind = type(event).__name__
                found += [(kind, event.group, h) for h in unpack_hashes(event.hashes).tolist()]
            elif isinstance(event, CapsuleStored):
                hashes = tuple(unpack_hashes(event.hashes).tolist())
                found.append(("CapsuleStored", event.capsule, event.boundary, hashes))
            else:
                found.append((type(event).__name__, getattr(event, "capsule", "")))
        return sorted(found, key=repr)

    def kv(self, read: Callable[[Sequence[int], int], Any]) -> dict[str, Any]:
        """The KV of each capsule that is there: `read` gets its blocks and the tokens in them."""
        found = {}
        for told in self.told().values():
            capsule = self.engine._capsules.peek(told.capsule) if told.capsule else None
            if capsule is not None and capsule.node is not None:
                table = flatten(capsule.node, self.engine._tree.block_size).tolist()
                found[capsule.id] = read(table, capsule.node.end)
        return found


def _told(updates: Sequence[Any]) -> Told:
    last = updates[-1]
    return Told(
        tuple(t for each in updates for t in each.tokens),
        tuple(p for each in updates for p in each.logprobs),
        last.finish,
        last.boundary,
        last.capsule,
        last.error[0] if last.error else None,
    )


class Free(StepCosts):
    """Positions that cost nothing: no draft is too bad."""

    def break_even(self, num_rows: int, draft_s: float = 0.0) -> float:
        return 1e-300


def draft_by(engine: Engine, drafter: Drafter) -> None:
    """From now on `engine`, which speculates, has drafts of `drafter` alone, and never gives up on it."""
    assert engine._speculator is not None, "it does not speculate"
    engine._speculator.drafters = (drafter,)
    engine._speculator._costs = Free()
