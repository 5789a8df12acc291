"""Timing from measured tables: prefill over (new, prefix), decode over (rows, mean context).

Use: where a device does not follow a closed form (a CPU, experts, kernels that change with
the batch), and whenever `mallee profile` has measured the engine that is to be predicted. Nothing is
extrapolated: beyond the grid a pass costs what the edge costs, so measure as far as you will go.
"""

from collections.abc import Sequence
from math import log2

import msgspec

from mallee.mocker.timing.table import Axis, Table
from mallee.protocol.errors import ConfigError

_FEW = 24  # steps or tokens that are summed one by one


class Prefills(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds [len(new)][len(prefix)] of a pass over one chunk."""

    new: tuple[float, ...]
    prefix: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class Decodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds [len(rows)][len(context)] of a pass; `context` is what each row reads, on average."""

    rows: tuple[float, ...]
    context: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]


class Grid:
    """Interpolated between what was measured, see `table`. Raises ConfigError naming a wrong field.

    More new tokens, a longer prefix, more rows of the same mean context and a longer mean context
    never cost less.
    """

    __slots__ = ("base_s", "decodes", "prefills")

    def __init__(self, prefill: Prefills, decode: Decodes) -> None:
        new = Axis("prefill.new", prefill.new)
        rows, context = Axis("decode.rows", decode.rows), Axis("decode.context", decode.context)
        for name, axis in (
            ("prefill.new", new),
            ("decode.rows", rows),
            ("decode.context", context),
        ):
            if axis.points[0] <= 0:
                raise ConfigError(f"{name}[0]={axis.points[0]:g}: must be more than 0")
        prefix = Axis("prefill.prefix", prefill.prefix)
        self.prefills = Table.fitted("prefill.seconds", new, prefix, prefill.seconds)
        self.decodes = Table.fitted("decode.seconds", rows, context, decode.seconds)
        self.base_s = min(self.prefills.seconds[0][0], self.decodes.seconds[0][0])

    def prefill_s(self, num_new: int, prefix: int) -> float:
        return self.prefills(num_new, prefix) if num_new else 0.0

    def decode_s(self, rows: int, context: float) -> float:
        return self.decodes(rows, context / rows) if rows else 0.0

    def pass_s(self, chunks: Sequence[tuple[int, int]], rows: int, context: float) -> float:
        """Chunks count as one that has as many tokens and makes as many (token, earlier token) pairs.

        Their sum would pay what the smallest chunk pays again for each, and forks bring many small ones.
        """
        if len(chunks) == 1:
            num_new, prefix = chunks[0]
            device = self.prefills(num_new, prefix)
        else:
            num_new = sum(new for new, _ in chunks)
            pairs = sum(new * (prefix + 0.5 * new) for new, prefix in chunks)
            device = self.prefills(num_new, max(0.0, pairs / num_new - 0.5 * num_new))
        return device + self.decode_s(rows, context) - self.base_s if rows else device

    def decodes_s(self, rows: int, context: float, num_steps: int) -> float:
        """In O(points): between two of them the seconds are a power of the mean context."""
        if not rows:
            return 0.0
        mean = context / rows
        if num_steps <= _FEW:
            table = self.decodes
            return sum(table(rows, mean + i) for i in range(num_steps))
        points, logs = self.decodes.second.points, self.decodes.curve(rows)
        total, step = 0.0, 0
        for j in range(len(points)):
            count = min(num_steps, _steps_below(points[j], mean)) - step
            if count > 0:
                power = 0.0
                if j:
                    rise, run = logs[j] - logs[j - 1], log2(points[j]) - log2(points[j - 1])
                    power = rise / run
                at = logs[j] - power * log2(points[j])
                total += 2.0**at * power_sum(mean + step, count, power)
                step += count
        return total + float((num_steps - step) * 2.0 ** logs[-1])


def power_sum(first: float, count: int, power: float) -> float:
    """The sum of (first + i) ** power for i below `count`, power >= 0, by Euler and Maclaurin."""
    if not power:
        return float(count)
    head = 0.0
    while count > 0 and (
        first < _FEW or count <= _FEW
    ):  # where the formula is not exact, or no gain
        head += float(first**power)
        first, count = first + 1.0, count - 1
    if not count:
        return head
    last = first + count
    assert power > 0, "times don't fall with the context"
    integral = (last ** (power + 1) - first ** (power + 1)) / (power + 1)
    ends = 0.5 * (first**power - last**power)
    slopes = power / 12 * (last ** (power - 1) - first ** (power - 1))
    thirds = power * (power - 1) * (power - 2) / 720
    rest = thirds * (last ** (power - 3) - first ** (power - 3))
    return float(head + integral + ends + slopes - rest)


def _steps_below(point: float, mean: float) -> int:
    """The number of i >= 0 with mean + i < point."""
    gap = point - mean
    return 0 if gap <= 0 else -int(-gap // 1)
