"""The segmented hash table: probing, inserting, erasing, moving to a larger or smaller one."""

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.jit import fetch, get, kernel, places, put, signed, trailing_zeros


@kernel
def add(address: int, index: int, value: int) -> None:
    put(address, index, get(address, index) + value)


@kernel
def column_word(s: int, region: int, place: int) -> int:
    """The index, in the control block, of word `place` of a region of columns."""
    return layout.AT_PER_COLUMN + region * get(s, layout.AT_COLUMNS) + place


# Keys are hashes, but of other engines too, which may be poor: multiplying spreads even 1, 2, 3.


@kernel
def segment_of(key: int) -> int:
    return ((key * layout.SPREAD) >> layout.SEGMENT_SHIFT) & (layout.NUM_SEGMENTS - 1)


@kernel
def line_of(key: int, lines: int) -> int:
    """The line of its segment that the key belongs in."""
    return ((((key * layout.SPREAD) >> layout.HOME_SHIFT) & layout.LOW) * lines) >> 32


@kernel
def home_of(key: int, cap: int) -> int:
    return line_of(key, cap >> layout.LINE_SHIFT) << layout.LINE_SHIFT


@kernel
def is_moved(s: int, segment: int) -> bool:
    return get(s, layout.AT_NEXT_CAP) != 0 and get(s, layout.AT_MOVED + segment) != 0


@kernel
def segment_cap(s: int, segment: int) -> int:
    return get(s, layout.AT_NEXT_CAP) if is_moved(s, segment) else get(s, layout.AT_CAP)


@kernel
def segment_base(s: int, segment: int) -> int:
    """The address of the segment's first entry."""
    if is_moved(s, segment):
        return get(s, layout.AT_NEXT_TABLE) + 16 * segment * get(s, layout.AT_NEXT_CAP)
    return get(s, layout.AT_TABLE) + 16 * segment * get(s, layout.AT_CAP)


@kernel
def probe(base: int, cap: int, key: int) -> int:
    """The entry of `key`, or ~(the empty entry where it would go)."""
    at = home_of(key, cap)
    while True:
        found = places(base + 16 * at, key)
        if found != 0:
            return at + trailing_zeros(found)
        free = places(base + 16 * at, 0)
        if free != 0:
            return ~(at + trailing_zeros(free))
        at += 1 << layout.LINE_SHIFT
        if at == cap:
            at = 0


@kernel
def value_of(s: int, key: int) -> int:
    """The value of `key`, or -1."""
    if key == 0:  # a probe would find an empty entry
        return -1
    segment = segment_of(key)
    base = segment_base(s, segment)
    at = probe(base, segment_cap(s, segment), key)
    return get(base, 2 * at + 1) if at >= 0 else -1


@kernel
def erase(s: int, segment: int, hole: int) -> None:
    """Remove one entry; those after it move up, so that no probe stops early."""
    base = segment_base(s, segment)
    cap = segment_cap(s, segment)
    at = hole
    while True:
        at += 1
        if at == cap:
            at = 0
        key = get(base, 2 * at)
        if key == 0:
            break
        from_home = at - home_of(key, cap)
        if from_home < 0:
            from_home += cap
        from_hole = at - hole
        if from_hole < 0:
            from_hole += cap
        if from_home >= from_hole:
            put(base, 2 * hole, key)
            put(base, 2 * hole + 1, get(base, 2 * at + 1))
            hole = at
    put(base, 2 * hole, 0)
    put(base, 2 * hole + 1, 0)
    add(s, layout.AT_SEGMENT_COUNTS + segment, -1)
    add(s, layout.AT_NUM_KEYS, -1)


@kernel
def move_segment(s: int, segment: int) -> None:
    """Move segment `segment` to the next table."""
    cap = get(s, layout.AT_CAP)
    next_cap = get(s, layout.AT_NEXT_CAP)
    base = get(s, layout.AT_TABLE) + 16 * segment * cap
    next_base = get(s, layout.AT_NEXT_TABLE) + 16 * segment * next_cap
    for at in range(cap):
        key = get(base, 2 * at)
        if key != 0:
            to = ~probe(next_base, next_cap, key)
            put(next_base, 2 * to, key)
            put(next_base, 2 * to + 1, get(base, 2 * at + 1))
    put(s, layout.AT_MOVED + segment, 1)
    add(s, layout.AT_NUM_MOVED, 1)


@kernel
def move_some(s: int, num_segments: int) -> None:
    """Move up to `num_segments` more segments to the next table."""
    while num_segments > 0 and get(s, layout.AT_MOVE_CURSOR) < layout.NUM_SEGMENTS:
        segment = get(s, layout.AT_MOVE_CURSOR)
        put(s, layout.AT_MOVE_CURSOR, segment + 1)
        if get(s, layout.AT_MOVED + segment) == 0:
            move_segment(s, segment)
            num_segments -= 1


@kernel
def pay_move(s: int) -> None:
    """Do an insertion's share of the move under way."""
    add(s, layout.AT_MOVE_DEBT, 8)
    if get(s, layout.AT_MOVE_DEBT) >= get(s, layout.AT_CAP):
        add(s, layout.AT_MOVE_DEBT, -get(s, layout.AT_CAP))
        move_some(s, 1)


@kernel
def insert(s: int, segment: int, at: int, key: int, value: int) -> bool:
    """Add `key`, which is absent, with `value`. `at` is where a probe ended.

    False, with AT_WANTS set to WANTS_FULL, if its segment is full and can't move. Asks for WANTS_ROOM
    before that.
    """
    taken = get(s, layout.AT_SEGMENT_COUNTS + segment) + 1
    must_probe = False
    if get(s, layout.AT_NEXT_CAP) != 0:
        pay_move(s)
        must_probe = True
    cap = segment_cap(s, segment)
    if get(s, layout.AT_NEXT_CAP) != 0:
        cap = min(cap, get(s, layout.AT_NEXT_CAP))  # it must fit there too, when its turn comes
    if taken * 5 > cap * 4:
        put(s, layout.AT_WANTS, layout.WANTS_ROOM)
        if taken * 12 > cap * 11:
            if get(s, layout.AT_NEXT_CAP) != 0 and not is_moved(s, segment):
                move_segment(s, segment)
            if taken * 12 > segment_cap(s, segment) * 11:
                put(s, layout.AT_WANTS, layout.WANTS_FULL)
                return False
            must_probe = True
    base = segment_base(s, segment)
    if must_probe:
        at = ~probe(base, segment_cap(s, segment), key)
    put(base, 2 * at, key)
    put(base, 2 * at + 1, value)
    put(s, layout.AT_SEGMENT_COUNTS + segment, taken)
    add(s, layout.AT_NUM_KEYS, 1)
    return True


@kernel
def prefetch(s: int, hashes: Hashes) -> None:
    """Load the lines where probes for these hashes begin, and those after full ones, into the CPU's cache.

    A probe waits for memory, and the next one for it; these loads wait for nothing and overlap. The first is
    no `fetch`: that does nothing where the address of a page is not at hand.
    """
    for i in range(len(hashes)):
        key = signed(hashes[i])
        segment = segment_of(key)
        line = segment_base(s, segment) + 16 * home_of(key, segment_cap(s, segment))
        fetch(line + 64 * int(places(line, 0) == 0))
