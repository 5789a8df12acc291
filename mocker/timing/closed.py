"""Timing in closed form: a polynomial with a meaning for each coefficient, and constants.

Choice: `ClosedForm` for fitted accelerators: five to eight numbers, sums of thousands of
steps in O(1), sensible beyond what was measured. One decode plane fits devices whose memory is the
bottleneck throughout; where small batches are bound by something else, the largest of two planes does.
`Experts` adds what a mixture of experts costs: few tokens touch few of them, so its curve bends the
other way. `Fixed` for tests that want round figures. A grid (`grid.py`) for any other shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from mallee.protocol.errors import ConfigError


class Plane(NamedTuple):
    """Seconds of a decode pass: base_s + row_s * rows + token_s * context."""

    base_s: float
    row_s: float
    token_s: float


class ClosedForm(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="closed"
):
    """Prefill = a + b n + c n (p + n / 2) + d p; decode = the largest of `planes`.

    n new tokens behind p cached ones: b is the matrix products, c attention (each new token reads what
    is before it), d the reading of the cached keys. Seconds. Raises ConfigError on negative ones.
    """

    prefill_base_s: float
    new_s: float
    pair_s: float
    prefix_s: float
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        if not self.planes:
            raise ConfigError("planes=(): give at least one plane for decodes")
        for name in ("prefill_base_s", "new_s", "pair_s", "prefix_s"):
            _check_seconds(name, getattr(self, name))
        for plane in self.planes:
            for name, value in zip(Plane._fields, plane, strict=True):
                _check_seconds(f"planes.{name}", value)

    @property
    def base_s(self) -> float:
        return min(self.prefill_base_s, max(plane.base_s for plane in self.planes))

    def prefill_s(self, num_new: int, prefix: int) -> float:
        if not num_new:
            return 0.0
        return (
            self.prefill_base_s
            + num_new * (self.new_s + self.pair_s * (prefix + 0.5 * num_new))
            + self.prefix_s * prefix
        )

    def decode_s(self, rows: int, context: float) -> float:
        if not rows:
            return 0.0
        most = 0.0
        for base_s, row_s, token_s in self.planes:
            seconds = base_s + row_s * rows + token_s * context
            if seconds > most:
                most = seconds
        return most

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        """In O(planes^2): along the steps each plane is a line, so the largest is a few segments."""
        if not rows:
            return 0.0
        lines = [(b + r * rows + t * context, t * rows) for b, r, t in self.planes]
        if len(lines) == 1:
            at, slope = lines[0]
            return num_steps * (at + slope * 0.5 * (num_steps - 1))
        return _envelope_sum(lines, num_steps)

    def scaled(self, prefill: float, decode: float) -> "ClosedForm":
        """Itself, with prefills and decodes that take so many times as long."""
        return msgspec.structs.replace(
            self,
            prefill_base_s=self.prefill_base_s * prefill,
            new_s=self.new_s * prefill,
            pair_s=self.pair_s * prefill,
            prefix_s=self.prefix_s * prefill,
            planes=tuple(Plane(*(decode * value for value in plane)) for plane in self.planes),
        )


class Experts(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="form", tag="experts"
):
    """A mixture of experts: `dense`, and the reading of the experts that any token of a pass needs.

    Each token needs `share` of them, drawn evenly, so n tokens need 1 - (1 - share) ** n. Reading all
    takes `all_prefill_s` in a pass over a chunk and `all_decode_s` in one of decodes.
    """

    dense: ClosedForm
    share: float
    all_prefill_s: float
    all_decode_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"share={self.share}: give the share of experts a token needs")
        _check_seconds("all_prefill_s", self.all_prefill_s)
        _check_seconds("all_decode_s", self.all_decode_s)

    @property
    def base_s(self) -> float:
        return self.dense.base_s

    def touched(self, num_tokens: int) -> float:
        """The share of experts that so many tokens need together."""
        return float(1.0 - (1.0 - self.share) ** num_tokens)

    def prefill_s(self, num_new: int, prefix: int) -> float:
        return self.dense.prefill_s(num_new, prefix) + self.all_prefill_s * self.touched(num_new)

    def decode_s(self, rows: int, context: float) -> float:
        return self.dense.decode_s(rows, context) + self.all_decode_s * self.touched(rows)

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        experts = num_steps * self.all_decode_s * self.touched(rows)
        return self.dense.decodes_s(rows, context, num_steps) + experts

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """An expert is read once, however many tokens need it."""
        dense = self.dense
        device = dense.decode_s(rows, context) - (len(chunks) - 1 + (rows > 0)) * dense.base_s
        num_new = 0
        for new, prefix in chunks:
            device += dense.prefill_s(new, prefix)
            num_new += new
        every = max(self.all_prefill_s, self.all_decode_s) if rows else self.all_prefill_s
        return device + every * self.touched(num_new + rows)

    def scaled(self, prefill: float, decode: float) -> "Experts":
        """As `ClosedForm.scaled`."""
        dense = self.dense.scaled(prefill, decode)
        return Experts(dense, self.share, self.all_prefill_s * prefill, self.all_decode_s * decode)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every chunk takes `chunk_s` and every decode pass `token_s`, at any size."""

    chunk_s: float
    token_s: float

    def __post_init__(self) -> None:
        _check_seconds("chunk_s", self.chunk_s)
        _check_seconds("token_s", self.token_s)

    @property
    def base_s(self) -> float:
        return 0.0

    def prefill_s(self, num_new: int, prefix: int) -> float:
        return self.chunk_s if num_new else 0.0

    def decode_s(self, rows: int, context: float) -> float:
        return self.token_s if rows else 0.0

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        return self.token_s * num_steps if rows else 0.0


def _envelope_sum(lines: Sequence[tuple[float, float]], num_steps: int) -> float:
    """The sum over i below `num_steps` of the largest (at + slope * i) of `lines`."""
    total, step = 0.0, 0
    while step < num_steps:
        # The line that is largest now and, of equals, grows fastest stays so until a steeper line crosses.
        at, slope = max(lines, key=lambda line: (line[0] + line[1] * step, line[1]))
        end = num_steps
        for other_at, other_slope in lines:
            if other_slope > slope:
                crossing = (at - other_at) / (other_slope - slope)
                if crossing < end:
                    end = max(step + 1, int(crossing) + 1)
        count = end - step
        total += count * (at + slope * (step + 0.5 * (count - 1)))
        step = end
    return total


def _check_seconds(name: str, value: float) -> None:
    if not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name}={value}: give seconds, 0 or more")
