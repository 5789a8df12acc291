"""The worth of drafts: how often they are right, and what a drafted position costs.

A step computes n positions in about a + b * n seconds. With R rows it yields R tokens, so a token takes
(a + b * R) / R seconds; one more position, that took d to draft, pays if it brings a token more often than
(b + d) R / (a + b R), the *break-even* rate. The k-th token of a draft is drawn if all before it are: with
probability p ** k. So a draft is as long as p ** k stays above break-even, and there is none where p itself
does not.
"""

from math import log
from typing import Final

FIRST_RATE: Final = 0.7
"""Acceptance that a drafter is believed to have before it has drafted."""
MIN_PAUSE: Final = 16
MAX_PAUSE: Final = 1024
"""Tokens that a branch draws without a draft after drafts that lost; doubled each time they lose again."""

_WEIGHT: Final = 1.0 / 12  # of a new observation of acceptance
_MIN_RATE: Final = 1e-3
_DECAY: Final = 0.98  # of steps that were timed, with each further one
_PRIOR: Final = 0.1  # break-even while costs are unknown, as on a clock that stands still in a step
_BOUNDS: Final = (0.02, 0.95)


class Acceptance:
    """One drafter's acceptance for one branch, and the length of its next draft. Deterministic."""

    __slots__ = ("_is_trial", "_pause", "_resume", "num_accepted", "num_drafted", "rate")

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        self.num_drafted = self.num_accepted = 0
        self._pause = MIN_PAUSE
        self._resume = 0
        self._is_trial = False  # the next draft is to find out whether it has become better

    def length(self, position: int, break_even: float, most: int) -> int:
        """Tokens to draft for the token at `position` of the answer: at most `most`, 0 while it loses."""
        if position < self._resume:
            return 0
        if (
            break_even >= 1.0
        ):  # not even a draft that is always right would pay: nothing to find out
            self.rest(position)
            return 0
        worth = most if self.rate >= 1.0 else int(log(break_even) / log(self.rate))
        if worth > 0:
            if not self._is_trial:
                self._pause = MIN_PAUSE
            return min(worth, most)
        if self._is_trial:
            return min(1, most)
        self.rest(position)
        return 0

    def rest(self, position: int) -> None:
        """Nothing is drafted for the next tokens from `position` on; then one, for a trial."""
        self._is_trial = True
        self._resume = position + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Of a draft of `num_drafted` tokens so many were drawn before another one was."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._is_trial = False
        for _ in range(num_accepted):
            self.rate += _WEIGHT * (1.0 - self.rate)
        if num_accepted < num_drafted:
            self.rate = max(_MIN_RATE, self.rate * (1.0 - _WEIGHT))

    def paused(self, position: int) -> int:
        """Tokens from `position` on for which nothing is drafted, whatever costs are."""
        return max(0, self._resume - position)


class StepCosts:
    """Seconds of steps by the positions that they compute: a straight line through the last ones."""

    __slots__ = ("_n", "_t", "_tx", "_x", "_xx")

    def __init__(self) -> None:
        self._n = self._x = self._t = self._xx = self._tx = 0.0

    def learn(self, num_positions: int, seconds: float) -> None:
        """A step of decodes took so long."""
        if seconds <= 0.0:
            return
        n, x = _DECAY * self._n + 1.0, float(num_positions)
        self._n = n
        self._x = _DECAY * self._x + x
        self._t = _DECAY * self._t + seconds
        self._xx = _DECAY * self._xx + x * x
        self._tx = _DECAY * self._tx + seconds * x

    @property
    def slope(self) -> float:
        """Seconds of one more position; 0 while that is unknown, or where larger steps took less."""
        return max(0.0, self._line()[2] or 0.0)

    def seconds(self, num_positions: int) -> float:
        """The time of a step of so many positions; 0 while that is unknown."""
        x, t, slope = self._line()
        return max(0.0, t + (slope or 0.0) * (num_positions - x))

    def break_even(self, num_rows: int, draft_s: float = 0.0) -> float:
        """The acceptance at which one more position beside `num_rows` neither pays nor costs.

        To draft it took `draft_s` seconds: then it may be more than 1.
        """
        x, t, slope = self._line()
        if t <= 0.0:
            return _PRIOR
        least, most = _BOUNDS
        if slope is None:
            return _PRIOR + draft_s * num_rows / t
        step = t + slope * (num_rows - x)
        if slope <= 0.0 or step <= 0.0:
            return (least if slope <= 0.0 else most) + draft_s * num_rows / t
        return min(most, max(least, slope * num_rows / step)) + draft_s * num_rows / step

    def _line(self) -> tuple[float, float, float | None]:
        """Mean positions and seconds of the last steps, and the slope there, if they differ enough."""
        n = self._n
        if n < 2.0:
            return 0.0, 0.0, None
        x, t = self._x / n, self._t / n
        spread = self._xx / n - x * x
        if spread < 0.25:  # all alike
            return x, t, None
        return x, t, (self._tx / n - x * t) / spread
