"""Matching: leading blocks of a path on every worker. A candidate (*alive*) has held all so far."""

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.kernels.sets import row_at
from mallee.router.index.kernels.table import (
    add,
    column_word,
    prefetch,
    probe,
    segment_base,
    segment_cap,
    segment_of,
    value_of,
)
from mallee.router.jit import get, kernel, put, signed, trailing_zeros


@kernel
def bits_of(s: int, ref: int, word: int, tiers: int) -> int:
    """Members of a set among 64 columns, in any of the first `tiers` tiers."""
    columns = get(s, layout.AT_COLUMNS)
    bits = 0
    if ref & layout.ROW_BIT:
        row = row_at(s, ref ^ layout.ROW_BIT)
        for tier in range(tiers):
            bits |= get(row, 2 + tier * (columns >> 6) + word)
    elif ref < tiers * columns and (ref % columns) >> 6 == word:
        bits = 1 << (ref & 63)  # columns is a multiple of 64
    return bits


@kernel
def credit(s: int, bits: int, word: int, matched: int, counts: Counts) -> None:
    """Credit the workers of these columns with `matched` leading blocks."""
    workers = column_word(s, layout.REGION_WORKERS, 64 * word)
    while bits != 0:
        counts[get(s, workers + trailing_zeros(bits))] = matched
        bits &= bits - 1


@kernel
def all_hold(s: int, key: int, tiers: int) -> bool:
    """Whether all candidates hold block `key`. KNOWN_REF remembers a set that has them all."""
    add(s, layout.AT_PROBES, 1)
    value = value_of(s, key)
    if value < 0:
        return False
    ref = value & layout.LOW
    if ref != get(s, layout.AT_KNOWN_REF):
        if not has_all(s, ref, tiers):
            return False
        put(s, layout.AT_KNOWN_REF, ref)
    return True


@kernel
def has_all(s: int, ref: int, tiers: int) -> bool:
    """Whether all candidates are in a set."""
    num_words = get(s, layout.AT_COLUMNS) >> 6
    alive_at = column_word(s, layout.REGION_ALIVE, 0)
    lost = 0
    if tiers == 1 and ref & layout.ROW_BIT:
        row = row_at(s, ref ^ layout.ROW_BIT)
        for word in range(num_words):  # without branches: several words at once
            lost |= get(s, alive_at + word) & ~get(row, 2 + word)
        return lost == 0
    for word in range(num_words):
        lost |= get(s, alive_at + word) & ~bits_of(s, ref, word, tiers)
    return lost == 0


@kernel
def walk(s: int, hashes: Hashes, tiers: int, at: int, stop: int) -> int:
    """The first block after `at` and before `stop` that a candidate lacks, or `stop`.

    Nothing is written in the loop, so that the addresses in it are computed once: all_hold for each block
    took twice as long.
    """
    known = get(s, layout.AT_KNOWN_REF)
    begin = at
    at += 1
    while at < stop:
        value = value_of(s, signed(hashes[at]))
        ref = value & layout.LOW
        if value < 0 or (ref != known and not has_all(s, ref, tiers)):
            break
        known = ref
        at += 1
    put(s, layout.AT_KNOWN_REF, known)
    add(s, layout.AT_PROBES, min(at, stop - 1) - begin)
    return at


@kernel
def may_have_holes(s: int) -> bool:
    """Whether any candidate may have holes."""
    if get(s, layout.AT_NUM_MAY_HAVE_HOLES) == 0:
        return False
    for word in range(get(s, layout.AT_COLUMNS) >> 6):
        alive = get(s, column_word(s, layout.REGION_ALIVE, word))
        if alive & get(s, column_word(s, layout.REGION_MAY_HAVE_HOLES, word)) != 0:
            return True
    return False


@kernel
def touch(s: int, key: int) -> None:
    """Block `key` was used just now."""
    segment = segment_of(key)
    base = segment_base(s, segment)
    at = probe(base, segment_cap(s, segment), key)
    if at >= 0:
        ref = get(base, 2 * at + 1) & layout.LOW
        put(base, 2 * at + 1, ((get(s, layout.AT_CLOCK) >> 8) & 0x7FFFFFFF) << 32 | ref)


@kernel
def next_loss(s: int, hashes: Hashes, tiers: int, at: int) -> int:
    """The first block after `at` (which all candidates hold) that one of them lacks.

    Where none may have holes their sets shrink along the path: if they all hold the last block, they
    hold those between, and else the loss is found by halving.
    """
    last = len(hashes) - 1
    if may_have_holes(s):
        while at < last:
            stop = min(at - at % layout.WALK + layout.WALK, last) + 1
            if at % layout.WALK == 0:
                prefetch(s, hashes, at + 1, stop)
            lost = walk(s, hashes, tiers, at, stop)
            if get(s, layout.AT_EVICTED) > 0:
                for used in range(at, lost):
                    touch(s, signed(hashes[used]))
            if lost < stop:
                return lost
            at = lost - 1
        return last + 1
    if at == last or all_hold(s, signed(hashes[last]), tiers):
        return last + 1
    lost = last
    while at + 1 < lost:
        middle = (at + lost) >> 1
        if all_hold(s, signed(hashes[middle]), tiers):
            at = middle
        else:
            lost = middle
    return lost


@kernel
def match(s: int, hashes: Hashes, tiers: int, scale: int, most: int, counts: Counts) -> None:
    """Leading hashes that each worker holds in any of its first `tiers` tiers, in `counts`.

    In units of `scale`, and at most `most`.
    """
    counts[:] = 0
    value = value_of(s, signed(hashes[0])) if len(hashes) > 0 else -1
    if value < 0:
        return
    put(s, layout.AT_KNOWN_REF, -1)
    alive_at = column_word(s, layout.REGION_ALIVE, 0)
    num_words = get(s, layout.AT_COLUMNS) >> 6
    num_alive = 0
    for word in range(num_words):
        live = get(s, column_word(s, layout.REGION_LIVE, word))
        alive = bits_of(s, value & layout.LOW, word, tiers) & live
        put(s, alive_at + word, alive)
        num_alive += alive != 0
    at = 0
    while num_alive > 0:
        at = next_loss(s, hashes, tiers, at)
        value = value_of(s, signed(hashes[at])) if at < len(hashes) else -1
        num_alive = 0
        for word in range(num_words):
            alive = get(s, alive_at + word)
            if alive != 0:
                left = alive & bits_of(s, value & layout.LOW, word, tiers) if value >= 0 else 0
                if left != alive:
                    credit(s, alive & ~left, word, min(at * scale, most), counts)
                    put(s, alive_at + word, left)
                num_alive += left != 0


@kernel
def match_all(
    index: int,
    used: int,
    hashes: Hashes,
    waypoints: Hashes,
    stride: int,
    held: Counts,
    active: Counts,
) -> None:
    """Leading blocks of a path that every worker holds (`held` [tiers, workers]) and uses (`active`).

    Two matches in one call: a call from Python costs as much as one of them. `index` and `used` are
    control blocks; `used` 0: nothing is known of use. The path's waypoints are written to `waypoints`.
    """
    n = len(hashes)
    for i in range(n // stride):
        waypoints[i] = hashes[(i + 1) * stride - 1]
    if n % stride:
        waypoints[n // stride] = hashes[n - 1]
    for tier in range(len(held)):
        match(index, hashes, tier + 1, 1, n, held[tier])
    if used != 0:
        match(used, waypoints, 1, stride, n, active)
    else:
        active[:] = 0
