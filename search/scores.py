"""Values from log-probabilities: of what was drawn, and of what a verifier answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from mallee.protocol.errors import InvalidParameter
from mallee.search.policy import FINITE, within
from mallee.search.tree import Proposal

MAX_PROMPT: Final = 65_536  # characters of a verifier's prompt
MAX_ANSWERS: Final = 20

Scoring: TypeAlias = Literal["outside", "mean_logprob", "sum_logprob"]
"""outside: somebody else values. mean_logprob: the geometric mean of the tokens' probabilities, in (0, 1].
sum_logprob: the text's log-probability. Both over the whole text below the root."""


def path_score(scoring: Scoring, path: Sequence[Proposal]) -> float | None:
    """The value of a text, given its pieces; None if one of their log-probabilities is unknown."""
    known = [each.logprob for each in path if each.logprob is not None]
    if len(known) < len(path):
        return None
    total = math.fsum(known)
    if scoring == "sum_logprob":
        return total
    return math.exp(total / max(sum(each.num_tokens for each in path), 1))


class Verifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks the model itself: each text is forked, goes on with `prompt`, and one of `answers` is awaited.

    `read`: "logprobs" draws one token; the value is the mean of the answers' values, weighted by the
    probabilities of the tokens that are answers, among the 20 likeliest. "text" draws
    `max_tokens` greedily, and the answer with which they begin counts. Case and spaces around are left out.
    A text of which no answer is found has no value.
    """

    prompt: str
    answers: dict[str, float]
    read: Literal["logprobs", "text"] = "logprobs"
    max_tokens: int = 8

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompt) <= MAX_PROMPT:
            remedy = f"give 1 to {MAX_PROMPT} characters"
            raise InvalidParameter("score.prompt", self.prompt, remedy)
        if not 1 <= len(self.answers) <= MAX_ANSWERS:
            remedy = f"give 1 to {MAX_ANSWERS} answers, each with its value"
            raise InvalidParameter("score.answers", self.answers, remedy)
        for answer, value in self.answers.items():
            if not answer.strip():
                raise InvalidParameter("score.answers", answer, "give answers that are not empty")
            within(f"score.answers.{answer}", value, *FINITE)
        within("score.max_tokens", self.max_tokens, 1, 4096)

    @property
    def tokens(self) -> int:
        """Tokens to draw."""
        return self.max_tokens if self.read == "text" else 1

    @property
    def num_logprobs(self) -> int | None:
        """The likeliest tokens to report; None: none are needed."""
        return 20 if self.read == "logprobs" else None

    def value(self, text: str, top: Sequence[Mapping[str, float]]) -> float | None:
        """The value of an answer: its text, and for each token the likeliest ones' log-probabilities."""
        if self.read == "logprobs":
            return self._by_chances(top[0]) if top else None
        said = text.strip().casefold()
        begun = [known for known in self.answers if said.startswith(known.strip().casefold())]
        return self.answers[max(begun, key=len)] if begun else None

    def _by_chances(self, top: Mapping[str, float]) -> float | None:
        chances: list[float] = []
        values: list[float] = []
        for token, logprob in top.items():
            said = token.strip().casefold()
            found = [v for answer, v in self.answers.items() if answer.strip().casefold() == said]
            if found:
                chances.append(math.exp(min(logprob, 0.0)))
                values.append(found[0])
        total = math.fsum(chances)
        if not total:
            return None
        return math.fsum(p * v for p, v in zip(chances, values, strict=True)) / total
