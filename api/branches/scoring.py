"""Scores of the branches of one request, by a verifier that is called beside decoding (`stop_when.score`).

One call runs at a time, about the newest texts of the branches that have grown enough, first those that have
waited longest: a slow verifier is asked less often, and nothing waits for it.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from mallee.api.branches.conditions import ScoreTerms
from mallee.api.callbacks.callbacks import Callbacks
from mallee.protocol.errors import CallbackFailed
from mallee.protocol.ids import RequestId, Scope

MAX_CHARS: Final = 1 << 20  # of a question's texts, unless one alone has more


class TextSoFar(msgspec.Struct, frozen=True):
    """A branch so far, as its client has it. `tokens`: of all of it."""

    index: int
    text: str
    reasoning: str
    tokens: int


class Verdict(msgspec.Struct, frozen=True):
    """The answer to a question: a score for each of its branches, in their order; None: not known yet."""

    scores: list[float | None]


class Question(msgspec.Struct, frozen=True):
    """The body of a call."""

    request: RequestId
    branches: list[TextSoFar]

    def flaw(self, verdict: Verdict) -> str:
        """The reason why `verdict` is no answer, if it is none."""
        num, asked = len(verdict.scores), len(self.branches)
        return "" if num == asked else f"it gave {num} scores for {asked} branches"


class Scored(NamedTuple):
    """The last score of a branch, and the last failure of a call about it."""

    score: float | None = None
    error: str = ""


class _Branch:
    __slots__ = ("asked_at", "num_tokens", "reasoning", "scored", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.num_tokens = 0
        self.asked_at = 0  # tokens that it had in its last question
        self.scored = Scored()

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.text)) + sum(map(len, self.reasoning))

    def shown(self, index: int) -> TextSoFar:
        self.text, self.reasoning = ["".join(self.text)], ["".join(self.reasoning)]
        return TextSoFar(index, self.text[0], self.reasoning[0], self.num_tokens)


class Scoring:
    """Belongs to one event loop. `on_verdict` is called when a branch is to end, or several are."""

    def __init__(
        self, terms: ScoreTerms, num_branches: int, callbacks: Callbacks, scope: Scope
    ) -> None:
        self._terms = terms
        self._callbacks = callbacks
        self._scope = scope
        self._branches = {i: _Branch() for i in range(num_branches)}  # that go on
        self._waiting: dict[int, None] = {}  # that have grown enough, in the order of their wait
        self._ending: dict[int, CallbackFailed | None] = {}  # the failure by which they end, if one
        self._call: asyncio.Task[None] | None = None
        self.request = RequestId("")
        self.on_verdict: Callable[[], None] = lambda: None

    def add(self, index: int, text: str, reasoning: str, num_tokens: int) -> None:
        """Take more of a branch that goes on; it has `num_tokens` now."""
        branch = self._branches[index]
        branch.text.append(text)
        branch.reasoning.append(reasoning)
        branch.num_tokens = num_tokens
        if num_tokens - branch.asked_at >= self._terms.every:
            self._waiting.setdefault(index)
            self._begin()

    def end(self, index: int) -> Scored:
        """The scores of a branch that goes on no more."""
        self._waiting.pop(index, None)
        self._ending.pop(index, None)
        return self._branches.pop(index).scored

    @property
    def has_verdicts(self) -> bool:
        """Whether branches are to end."""
        return bool(self._ending)

    def take(self) -> list[tuple[int, CallbackFailed | None]]:
        """The branches that are to end now, each once; by a failure, if there is one."""
        ending, self._ending = list(self._ending.items()), {}
        return ending

    def close(self) -> None:
        """Give up the call that runs. Idempotent."""
        self._waiting.clear()
        if self._call is not None:
            self._callbacks.tasks.cancel(self._call)
            self._call = None

    def _begin(self) -> None:
        if self._call is None and self._waiting:
            self._call = self._callbacks.tasks.spawn(self._ask(), name="a verifier's call")

    async def _ask(self) -> None:
        async with self._callbacks.turn(self._scope) as turn:
            if question := self._question():
                try:
                    verdict = await turn.ask(self._terms.url, question, Verdict, question.flaw)
                except CallbackFailed as error:
                    self._fail(question, error)
                else:
                    self._judge(question, verdict)
        self._call = None
        self._begin()
        if self._ending:
            self.on_verdict()

    def _question(self) -> Question | None:
        """The newest texts of branches that wait, which wait no more; None: all have ended."""
        found: list[TextSoFar] = []
        num_chars = 0
        for index in list(self._waiting):
            branch = self._branches[index]
            num_chars += branch.num_chars
            if found and num_chars > MAX_CHARS:
                break
            del self._waiting[index]
            branch.asked_at = branch.num_tokens
            found.append(branch.shown(index))
        return Question(self.request, found) if found else None

    def _judge(self, question: Question, verdict: Verdict) -> None:
        for asked, score in zip(question.branches, verdict.scores, strict=True):
            branch = self._branches.get(asked.index)
            if branch is not None:
                branch.scored = branch.scored._replace(score=score)
                if score is not None and score < self._terms.below:
                    self._ending[asked.index] = None

    def _fail(self, question: Question, error: CallbackFailed) -> None:
        for asked in question.branches:
            branch = self._branches.get(asked.index)
            if branch is not None:
                branch.scored = branch.scored._replace(error=error.message)
                if self._terms.is_required:
                    self._ending[asked.index] = error
