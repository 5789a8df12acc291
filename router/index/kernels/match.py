"""Matching: leading blocks of a path on every worker. A candidate (*alive*) has held all so far."""

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.kernels.sets import row_at
from mallee.router.index.kernels.table import (
    add,
    column_word,
    line_of,
    probe,
    segment_base,
    segment_cap,
    segment_of,
    value_of,
)
from mallee.router.jit import fetch, get, kernel, places, put, signed, trailing_zeros


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
    workers = column_word(s, layout.REGION_PLACES, 64 * word)
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
    num_words = get(s, layout.AT_ALIVE_WORDS)
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
def may_have_holes(s: int) -> bool:
    """Whether any candidate may have holes."""
    if get(s, layout.AT_NUM_MAY_HAVE_HOLES) == 0:
        return False
    for word in range(get(s, layout.AT_ALIVE_WORDS)):
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
def look_up(s: int, hashes: Hashes, start: int, stop: int, known: int) -> int:
    """Bits of those of blocks `start` to `stop` whose set isn't `known`; FOUND has their values, or -1.

    In passes, each of which fetches what the next one needs, so that no miss of the cache waits for another.
    Two of them run in lanes: over a slice, since an index that might be negative would be gathered.
    """
    lines = get(s, layout.AT_CAP) >> layout.LINE_SHIFT
    table = get(s, layout.AT_TABLE)
    found, keys = s + 8 * layout.AT_FOUND, hashes[start:stop]
    for i in range(len(keys)):
        key = signed(keys[i])
        put(found, i, table + 64 * (segment_of(key) * lines + line_of(key, lines)))
    for i in range(len(keys)):
        fetch(get(found, i))
    # While the table moves, entries that have moved are still here, as they were then.
    is_moving = get(s, layout.AT_NEXT_CAP) != 0
    others = 0
    for i in range(len(keys)):  # without branches: most could not be foreseen
        line = get(found, i)
        place = places(line, signed(keys[i]))
        value = get(line, 2 * trailing_zeros(place | 8) + 1)
        put(found, i, value if place != 0 else -1)
    for i in range(len(keys)):
        value = get(found, i)
        is_known = (value >= 0) & (value & layout.LOW == known) & (keys[i] != 0)
        others |= (1 - int(is_known & (not is_moving))) << i
    left = others
    while left != 0:
        i = trailing_zeros(left)
        left &= left - 1
        value, key = get(found, i), signed(keys[i])
        if value < 0 or is_moving or key == 0:
            value = value_of(s, key)
            put(found, i, value)
        if value >= 0 and value & layout.ROW_BIT:
            row = row_at(s, (value & layout.LOW) ^ layout.ROW_BIT)
            for line in range(0, 8 * get(s, layout.AT_ROW_WORDS), 64):
                fetch(row + line)
    return others


@kernel
def narrow(s: int, value: int, tiers: int, matched: int, counts: Counts) -> bool:
    """Credit the candidates that lack a block of this value (-1: all) with `matched`; whether any is left."""
    alive_at = column_word(s, layout.REGION_ALIVE, 0)
    ref = value & layout.LOW
    row = row_at(s, ref ^ layout.ROW_BIT) if value >= 0 and ref & layout.ROW_BIT else 0
    remain = 0
    for word in range(get(s, layout.AT_ALIVE_WORDS)):
        alive = get(s, alive_at + word)
        held = 0
        if tiers == 1 and row != 0:
            held = get(row, 2 + word)
        elif value >= 0:
            held = bits_of(s, ref, word, tiers)
        if alive & ~held != 0:
            credit(s, alive & ~held, word, matched, counts)
            put(s, alive_at + word, alive & held)
        remain |= alive & held
    return remain != 0


@kernel
def walk(s: int, hashes: Hashes, tiers: int, scale: int, most: int, counts: Counts) -> int:
    """Follow a path block by block while any candidate may have holes.

    Returns the last block reached, which all that are left hold; or len(hashes) if none is left.
    """
    at = 0
    known = -1
    while at < len(hashes) - 1 and may_have_holes(s):
        stop = min(at + layout.WALK, len(hashes) - 1) + 1
        left = look_up(s, hashes, at + 1, stop, known)
        begin = at
        at = stop - 1
        while left != 0:
            i = begin + 1 + trailing_zeros(left)
            left &= left - 1
            value = get(s, layout.AT_FOUND + i - begin - 1)
            ref = value & layout.LOW
            has_lost = value < 0 or (ref != known and not has_all(s, ref, tiers))
            if has_lost and not narrow(s, value, tiers, min(i * scale, most), counts):
                at = len(hashes)
                stop = i
                break
            known = ref
        add(s, layout.AT_PROBES, stop - 1 - begin)
        if get(s, layout.AT_EVICTED) > 0:
            for used in range(begin, stop):
                touch(s, signed(hashes[used]))
    return at


@kernel
def next_loss(s: int, hashes: Hashes, tiers: int, at: int) -> int:
    """The first block after `at` (which all candidates hold) that one of them lacks; none may have holes.

    Their sets shrink along the path: if they all hold the last block, they hold those between, and else
    the loss is found by halving.
    """
    last = len(hashes) - 1
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
    num_words = 0
    for word in range(get(s, layout.AT_COLUMNS) >> 6):
        live = get(s, column_word(s, layout.REGION_LIVE, word))
        alive = bits_of(s, value & layout.LOW, word, tiers) & live
        put(s, alive_at + word, alive)
        if alive != 0:
            num_words = word + 1
    if num_words == 0:
        return
    put(s, layout.AT_ALIVE_WORDS, num_words)
    at = walk(s, hashes, tiers, scale, most, counts)
    while at < len(hashes):
        at = next_loss(s, hashes, tiers, at)
        value = value_of(s, signed(hashes[at])) if at < len(hashes) else -1
        if not narrow(s, value, tiers, min(at * scale, most), counts):
            return
