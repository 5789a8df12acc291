"""Answers of an API that forks, as proposals; and how steps end."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from mallee.search.tree import Proposal

_LOST: Final = ("error", "cancelled")  # finish reasons of branches that are none


class Ends(NamedTuple):
    """The ends of steps. `stop`: strings after which the next step begins; they are part of the step.

    `marks`: a text with one of them in its last step is a whole answer.
    """

    stop: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


class Drawn(NamedTuple):
    """One branch, as its server told: `finish` is its finish reason, `capsule` the state that it left."""

    text: str
    finish: str | None
    capsule: str | None
    num_tokens: int
    logprobs: Sequence[float]


def proposal_of(drawn: Drawn, ends: Ends) -> Proposal | None:
    """The proposal of a branch; None if it failed.

    It is a whole answer if it ended by itself and not by a stop string, has a mark, ran out of its budget,
    or left no state from which it could go on.
    """
    if drawn.finish in _LOST:
        return None
    is_step = drawn.finish == "length" or (
        drawn.finish == "stop" and drawn.text.endswith(ends.stop)
    )
    has_mark = any(mark in drawn.text for mark in ends.marks)
    return Proposal(
        drawn.text,
        drawn.num_tokens,
        drawn.capsule or "",
        sum(drawn.logprobs) if drawn.logprobs else None,
        is_end=not is_step or has_mark or drawn.capsule is None,
    )
