"""The rows of a fan-out for each worker, so that the slowest row is done soon.

Rows beyond what a worker can run at once decode in later waves; those it runs already are taken to be
over after the first. Workers are positions of arrays; position 0 is the owner of the prefix.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.router.index.kernels.layout import Ints
from mallee.router.jit import kernel

Floats = npt.NDArray[np.float64]

SCALE: Final = 1.04
FINEST_S: Final = 1e-9
TIGHTEN: Final = 12  # halvings of the best step of the scale


class Wave(NamedTuple):
    """Seconds that a wave of rows takes: `fresh_s` with any of ours in it + `each_s` for each of ours."""

    step_s: float  # the part of fresh_s that a wave without ours takes too
    fresh_s: float
    each_s: float


class Places(NamedTuple):
    """The workers, each [num_places]."""

    starts_s: Floats  # when rows can start there
    works_s: Floats  # work that staying would not take
    busy_s: Floats  # what runs there adds to the first wave
    first: Ints  # rows of ours that fit into the first wave, may be 0
    later: Ints  # rows that fit into each later one, >= 1


@kernel
def span(rows: int, busy_s: float, first: int, later: int, wave: Wave) -> float:
    """Seconds from the start of `rows` >= 1 rows to the end of the last."""
    total = rows * wave.each_s
    if first > 0:
        total += wave.fresh_s + busy_s
    elif busy_s > 0.0:
        total += wave.step_s + busy_s  # a wave of theirs alone
    if rows > first:
        total += wave.fresh_s * ((rows - first + later - 1) // later)
    return total


@kernel
def rows_within(span_s: float, most: int, busy_s: float, first: int, later: int, wave: Wave) -> int:
    """The largest number of rows, up to `most`, whose `span` is at most `span_s`."""
    if span(most, busy_s, first, later, wave) <= span_s:
        return most
    left_s = span_s - busy_s
    if first > 0:
        left_s -= wave.fresh_s
        if left_s < wave.each_s * first:
            return int(left_s / wave.each_s) if left_s > 0.0 else 0
    elif busy_s > 0.0:
        left_s -= wave.step_s
    left_s -= wave.each_s * first
    if left_s <= wave.fresh_s:
        return first
    wave_s = wave.fresh_s + wave.each_s * later
    waves = int(left_s / wave_s)
    left_s -= waves * wave_s
    done = first + waves * later
    if left_s > wave.fresh_s and wave.each_s > 0.0:
        done += min(later, int((left_s - wave.fresh_s) / wave.each_s))
    return min(done, most)


@kernel
def fill(
    deadline_s: float,
    rows: int,
    max_parts: int,
    places: Places,
    wave: Wave,
    order: Ints,
    room: Ints,
) -> int:
    """The number of workers beside the owner that are needed to be done by `deadline_s`; -1: too many.

    The owner counts as a part if it takes rows. The others are order[:n], and worker i has room for
    room[i] rows. `order`, a permutation of 1 .. , is sorted anew; it is nearly sorted if it comes from a
    call with about the same deadline.
    """
    works_s = places.works_s
    for i in range(room.size):
        room[i] = rows_within(
            deadline_s - places.starts_s[i],
            rows,
            places.busy_s[i],
            places.first[i],
            places.later[i],
            wave,
        )
    missing = rows - room[0]
    if missing <= 0:
        return 0
    for at in range(1, order.size):
        one, to = order[at], at
        while to > 0:
            other = order[to - 1]
            if room[one] < room[other] or (
                room[one] == room[other] and works_s[one] >= works_s[other]
            ):
                break
            order[to] = other
            to -= 1
        order[to] = one
    most = max_parts - 1 if room[0] > 0 else max_parts
    for used in range(min(most, order.size)):
        one = order[used]
        if room[one] == 0:
            break
        if room[one] >= missing:
            for at in range(used + 1, order.size):  # the rest goes to the cheapest that has room
                other = order[at]
                if room[other] >= missing and works_s[other] < works_s[order[used]]:
                    order[used], order[at] = other, order[used]
            return used + 1
        missing -= room[one]
    return -1


@kernel
def work(num_used: int, works_s: Floats, order: Ints) -> float:
    """Seconds of work that order[:num_used] take beyond what staying would."""
    total = 0.0
    for at in range(num_used):
        total += works_s[order[at]]
    return total


@kernel
def split(
    rows: int,
    stay_s: float,
    bar_s: float,
    work_weight: float,
    max_parts: int,
    places: Places,
    wave: Wave,
    taken: Ints,
) -> float:
    """The deadline kept by the best split, rows per worker in `taken`; inf: none costs less than `bar_s`.

    Its cost: the deadline + work_weight x `work`. `stay_s`: what staying takes.
    """
    order = np.arange(1, places.first.size)
    room = np.zeros(places.first.size, dtype=np.int64)
    # No deadline below `low` can be kept, whatever the work.
    low, high = 0.0, stay_s
    while high - low > 0.01 * high + FINEST_S:
        middle = (low + high) / 2
        if fill(middle, rows, max_parts, places, wave, order, room) >= 0:
            high = middle
        else:
            low = middle
    best, best_cost = np.inf, bar_s
    deadline = high + FINEST_S
    while deadline < best_cost:
        used = fill(deadline, rows, max_parts, places, wave, order, room)
        if used >= 0:
            cost = deadline + work_weight * work(used, places.works_s, order)
            if cost < best_cost:
                best, best_cost = deadline, cost
        if used == 0:
            break
        deadline *= SCALE
    if best == np.inf:
        return best
    low, high = best / SCALE, best
    for _ in range(TIGHTEN):
        middle = (low + high) / 2
        used = fill(middle, rows, max_parts, places, wave, order, room)
        if used >= 0 and middle + work_weight * work(used, places.works_s, order) <= best_cost:
            high = middle
            best_cost = middle + work_weight * work(used, places.works_s, order)
        else:
            low = middle
    used = fill(high, rows, max_parts, places, wave, order, room)
    taken[:] = 0
    left = rows - min(rows, room[0])
    taken[0] = rows - left
    for at in range(used):
        one = order[at]
        taken[one] = min(left, room[one])
        left -= taken[one]
    return high
