"""Blocks of columns: store, remove, evict, sweep."""

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.layout import Ints
from mallee.router.index.kernels.sets import (
    column_key,
    contains,
    drop,
    scratch_ref,
    set_key,
    to_scratch,
    use,
    with_member,
    without_member,
)
from mallee.router.index.kernels.table import (
    add,
    column_word,
    erase,
    insert,
    prefetch,
    probe,
    segment_base,
    segment_cap,
    segment_of,
    value_of,
)
from mallee.router.jit import get, kernel, put, signed


@kernel
def fingerprint(key: int) -> int:
    """A block's share in its worker's digest: a sum of these doesn't depend on their order."""
    mixed = (key ^ (key >> 29)) * -4658895280553007687
    return mixed ^ (mixed >> 32)


@kernel
def tally(s: int, column: int, num_blocks: int, digest: int) -> None:
    """Count so many blocks more in `column`, whose fingerprints add up to `digest`."""
    place = get(s, column_word(s, layout.REGION_PLACES, column))
    add(s, column_word(s, layout.REGION_HELD, place), num_blocks)
    add(s, column_word(s, layout.REGION_DIGESTS, place), digest)


@kernel
def set_holes(s: int, column: int, may_have_holes: bool) -> None:
    """Mark `column` as one that may have holes: paths are walked block by block for it; or has none."""
    word = column_word(s, layout.REGION_MAY_HAVE_HOLES, column >> 6)
    bit = 1 << (column & 63)
    if (get(s, word) & bit != 0) != may_have_holes:
        put(s, word, get(s, word) ^ bit)
        add(s, layout.AT_NUM_MAY_HAVE_HOLES, 1 if may_have_holes else -1)


@kernel
def evict_key(s: int, key: int) -> None:
    """Remove `key` from every worker; those that held it may have a hole."""
    segment = segment_of(key)
    base = segment_base(s, segment)
    at = probe(base, segment_cap(s, segment), key)
    ref = get(base, 2 * at + 1) & layout.LOW
    for column in range(get(s, layout.AT_TIERS) * get(s, layout.AT_COLUMNS)):
        if contains(s, ref, column):
            tally(s, column, -1, -fingerprint(key))
            set_holes(s, column % get(s, layout.AT_COLUMNS), True)
    drop(s, ref)
    erase(s, segment, at)
    add(s, layout.AT_EVICTED, 1)


@kernel
def evict_one(s: int) -> None:
    """Evict the least recently used of the next eight entries."""
    num_seen = 0
    oldest_key = 0
    oldest = 0
    while num_seen < 8:
        segment = get(s, layout.AT_EVICT_CURSOR) & (layout.NUM_SEGMENTS - 1)
        at = get(s, layout.AT_EVICT_CURSOR) // layout.NUM_SEGMENTS
        if at >= max(get(s, layout.AT_CAP), get(s, layout.AT_NEXT_CAP)):
            put(s, layout.AT_EVICT_CURSOR, 0)
            continue
        add(s, layout.AT_EVICT_CURSOR, 1)
        if at >= segment_cap(s, segment):
            continue
        base = segment_base(s, segment)
        key = get(base, 2 * at)
        if key != 0:
            used = get(base, 2 * at + 1) >> 32
            if num_seen == 0 or used < oldest:
                oldest_key = key
                oldest = used
            num_seen += 1
    evict_key(s, oldest_key)


@kernel
def store(s: int, hashes: Hashes, column: int) -> int:
    """These blocks are in `column`; returns how many of them, or ~that if the owner has work to do.

    It stopped early for AT_WANTS (WANTS_FULL or WANTS_ROWS), or the table asks for room or is moving.
    """
    num_hashes = len(hashes)
    prefetch(s, hashes)
    add(s, layout.AT_CLOCK, 1)
    now = ((get(s, layout.AT_CLOCK) >> 8) & 0x7FFFFFFF) << 32
    from_ref = -1
    to_ref = -1
    num_new = 0
    digest = 0
    done = num_hashes
    for i in range(num_hashes):
        key = signed(hashes[i])
        if key == 0:
            continue
        segment = segment_of(key)
        base = segment_base(s, segment)
        at = probe(base, segment_cap(s, segment), key)
        if at >= 0:
            ref = get(base, 2 * at + 1) & layout.LOW
            if ref != from_ref:
                if contains(s, ref, column):
                    put(base, 2 * at + 1, now | ref)
                    continue
                to_ref = with_member(s, ref, column)
                if to_ref == layout.WANTS_ROWS:
                    put(s, layout.AT_WANTS, layout.WANTS_ROWS)
                    done = i
                    break
                from_ref = ref
            use(s, to_ref)
            drop(s, ref)
            put(base, 2 * at + 1, now | to_ref)
        else:
            if get(s, layout.AT_NUM_KEYS) >= get(s, layout.AT_MAX_KEYS):
                evict_one(s)
                if get(s, layout.AT_NUM_KEYS) >= get(s, layout.AT_MAX_KEYS):
                    evict_one(s)  # the cap fell, for rows took memory: come down to it
                from_ref = -1
                at = probe(segment_base(s, segment), segment_cap(s, segment), key)
            if not insert(s, segment, ~at, key, now | column):
                done = i
                break
        num_new += 1
        digest += fingerprint(key)
    tally(s, column, num_new, digest)
    return done if get(s, layout.AT_WANTS) == 0 and get(s, layout.AT_NEXT_CAP) == 0 else ~done


@kernel
def remove(s: int, hashes: Hashes, column: int) -> int:
    """These blocks are not in `column`; returns how many: fewer, with AT_WANTS, if rows ran out."""
    prefetch(s, hashes)
    from_ref = -1
    to_ref = -1
    for i in range(len(hashes)):
        key = signed(hashes[i])
        segment = segment_of(key)
        base = segment_base(s, segment)
        at = probe(base, segment_cap(s, segment), key) if key != 0 else -1
        ref = get(base, 2 * at + 1) & layout.LOW if at >= 0 else 0
        if at < 0 or not contains(s, ref, column):
            continue
        if ref != from_ref:
            to_ref = without_member(s, ref, column)
            if to_ref == layout.WANTS_ROWS:
                put(s, layout.AT_WANTS, layout.WANTS_ROWS)
                return i
            from_ref = ref
        if to_ref < 0:
            erase(s, segment, at)
        else:
            use(s, to_ref)
            drop(s, ref)
            put(base, 2 * at + 1, (get(base, 2 * at + 1) & ~layout.LOW) | to_ref)
        tally(s, column, -1, -fingerprint(key))
    return len(hashes)


@kernel
def living_ref(s: int, ref: int, dead: Ints) -> int:
    """The ref of the set without the columns in `dead`; -1 if nothing is left; WANTS_ROWS."""
    scratch = to_scratch(s, ref)
    tier_words = get(s, layout.AT_COLUMNS) >> 6
    for word in range(get(s, layout.AT_ROW_WORDS) - 2):
        gone = get(scratch, 2 + word) & dead[word % tier_words]
        if gone == 0:
            continue
        put(scratch, 2 + word, get(scratch, 2 + word) ^ gone)
        for bit in range(64):
            if (gone >> bit) & 1:
                put(scratch, 0, get(scratch, 0) ^ column_key(s, 64 * word + bit))
    if get(scratch, 0) == set_key(s, ref):
        return ref
    return scratch_ref(s)


@kernel
def sweep(s: int, dead: Ints, num_segments: int) -> int:
    """The columns in `dead` (bits, one tier) are in no set of the next segments.

    Returns how many segments were done: fewer than asked, with AT_WANTS WANTS_ROWS, if rows ran out.
    """
    for step in range(num_segments):
        segment = get(s, layout.AT_SWEEP_CURSOR) & (layout.NUM_SEGMENTS - 1)
        base = segment_base(s, segment)
        at = 0
        from_ref = -1
        to_ref = -1
        while at < segment_cap(s, segment):
            if get(base, 2 * at) == 0:
                at += 1
                continue
            ref = get(base, 2 * at + 1) & layout.LOW
            if ref != from_ref:
                to_ref = living_ref(s, ref, dead)
                if to_ref == layout.WANTS_ROWS:
                    put(s, layout.AT_WANTS, layout.WANTS_ROWS)
                    return step
                from_ref = ref
            if to_ref >= 0:
                if to_ref != ref:
                    use(s, to_ref)
                    drop(s, ref)
                    put(base, 2 * at + 1, (get(base, 2 * at + 1) & ~layout.LOW) | to_ref)
                at += 1
            else:
                drop(s, ref)
                from_ref = -1
                erase(s, segment, at)
        add(s, layout.AT_SWEEP_CURSOR, 1)
    return num_segments


@kernel
def ref_of(s: int, key: int) -> int:
    """The set of block `key`, or -1."""
    value = value_of(s, key)
    return value & layout.LOW if value >= 0 else -1
