"""Conditions by which branches end before their limits: `mallee.stop_when`, read and followed.

Scores come from a verifier, beside decoding (`scoring`); the others are followed here, token by token.
A regular expression is searched for in the bytes of a branch's tokens, one byte after the other, by the
lazy automata of llguidance: without backtracking, in bounded memory. A branch ends with the token that
completes the first match, however its tokens arrive.
"""

from collections import deque
from typing import Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, grammar_from

from mallee.api.callbacks.callbacks import AllowedUrls
from mallee.api.schemas import byte_matcher, fault_of
from mallee.protocol.api.shared import ScoreFields, StopWhenFields
from mallee.protocol.errors import InvalidParameter

# Of one expression's automaton: megabytes, and a few milliseconds for a byte at worst.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, max_lexer_states=20_000
)


class ScoreTerms(NamedTuple):
    """The verifier of a request's branches: a branch below `below` ends. `url` may be called."""

    url: str
    below: float
    every: int  # tokens of a branch between two questions about it, at least
    is_required: bool = False


class Conditions(NamedTuple):
    """`pattern` is copied for each branch. `below`: the mean log-probability of the last `window` tokens."""

    pattern: LLMatcher | None = None
    done: int | None = None
    below: float | None = None
    window: int = 0
    score: ScoreTerms | None = None


class BranchConditions:
    """The conditions of one branch, followed token by token."""

    __slots__ = ("_below", "_last", "_pattern", "_window")

    def __init__(self, conditions: Conditions) -> None:
        self._pattern = conditions.pattern.deep_copy() if conditions.pattern is not None else None
        self._below = conditions.below
        self._window = conditions.window
        self._last: deque[float] = deque()

    def take(self, raw: bytes, logprob: float | None) -> str:
        """The name of the condition that the branch's next token meets; empty: none.

        Raises InvalidParameter if the expression needs more memory than it may have.
        """
        if self._pattern is not None and self._matches(raw):
            return "regex"
        if self._below is not None and logprob is not None and self._is_below(logprob):
            return "logprob"
        return ""

    def _matches(self, raw: bytes) -> bool:
        assert self._pattern is not None
        for byte in raw:
            if not self._pattern.consume_token(byte):
                raise _bad_regex("it needs too much memory on this text; give a simpler one")
            if self._pattern.is_accepting():
                return True
        return False

    def _is_below(self, logprob: float) -> bool:
        assert self._below is not None
        self._last.append(logprob)
        if len(self._last) > self._window:
            self._last.popleft()
        # Not a running sum: a token of no chance at all would make it infinite for good.
        return len(self._last) == self._window and sum(self._last) / self._window < self._below


def read_conditions(
    fields: StopWhenFields | None, num_choices: int, urls: AllowedUrls
) -> Conditions | None:
    """Raises InvalidParameter."""
    if fields is None:
        return None
    if fields == StopWhenFields():
        raise InvalidParameter("mallee.stop_when", {}, "give regex, done, logprob or score")
    if fields.done is not None and not 1 <= fields.done <= num_choices:
        remedy = f"give 1 to {num_choices}, the branches"
        raise InvalidParameter("mallee.stop_when.done", fields.done, remedy)
    below, window = None, 0
    if fields.logprob is not None:
        below, window = fields.logprob.below, fields.logprob.tokens
    score = None if fields.score is None else _read_score(fields.score, urls)
    pattern = None if fields.regex is None else _compiled(fields.regex)
    return Conditions(pattern, fields.done, below, window, score)


def _read_score(fields: ScoreFields, urls: AllowedUrls) -> ScoreTerms:
    name = "mallee.stop_when.score"
    urls.check(f"{name}.url", fields.url)
    return ScoreTerms(fields.url, fields.below, fields.every, fields.required)


def _compiled(regex: str) -> LLMatcher:
    # Alone too: else its brackets could close those around it.
    for text in (regex, f"(?s:.*)({regex})"):
        found = byte_matcher(grammar_from("regex", text), _LIMITS)
        if fault := fault_of(found):
            raise _bad_regex(fault, regex)
    if found.is_accepting():
        raise _bad_regex("it matches the empty text: every branch would end at once", regex)
    return found


def _bad_regex(why: str, regex: str = "...") -> InvalidParameter:
    return InvalidParameter("mallee.stop_when.regex", regex, why)
