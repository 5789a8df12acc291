"""Interned sets of columns. A ref names a set: a column, or ROW_BIT and a row."""

from mallee.router.index.kernels import layout
from mallee.router.index.kernels.table import add, column_word
from mallee.router.jit import get, kernel, put


@kernel
def row_at(s: int, row: int) -> int:
    """The address of a row: set key, number of blocks, bits."""
    return get(s, layout.AT_ROWS) + 8 * get(s, layout.AT_ROW_WORDS) * row


@kernel
def column_key(s: int, column: int) -> int:
    return get(s, column_word(s, layout.REGION_SET_KEYS, column))


@kernel
def set_key(s: int, ref: int) -> int:
    if ref & layout.ROW_BIT:
        return get(row_at(s, ref ^ layout.ROW_BIT), 0)
    return column_key(s, ref)


@kernel
def contains(s: int, ref: int, column: int) -> bool:
    if ref & layout.ROW_BIT:
        return (get(row_at(s, ref ^ layout.ROW_BIT), 2 + (column >> 6)) >> (column & 63)) & 1 != 0
    return ref == column


@kernel
def to_scratch(s: int, ref: int) -> int:
    """The address of row 0, which is now a copy of the set."""
    scratch = get(s, layout.AT_ROWS)
    if ref & layout.ROW_BIT:
        row = row_at(s, ref ^ layout.ROW_BIT)
        for word in range(2, get(s, layout.AT_ROW_WORDS)):
            put(scratch, word, get(row, word))
    else:
        for word in range(2, get(s, layout.AT_ROW_WORDS)):
            put(scratch, word, 0)
        put(scratch, 2 + (ref >> 6), 1 << (ref & 63))
    put(scratch, 0, set_key(s, ref))
    return scratch


@kernel
def equals_scratch(s: int, row: int) -> bool:
    scratch = get(s, layout.AT_ROWS)
    if get(row, 0) != get(scratch, 0):
        return False
    differences = 0
    for word in range(2, get(s, layout.AT_ROW_WORDS)):
        differences |= get(row, word) ^ get(scratch, word)
    return differences == 0


@kernel
def interned(s: int) -> int:
    """The ref of the row equal to row 0 (at least two members), made if need be; WANTS_ROWS if it can't."""
    scratch = get(s, layout.AT_ROWS)
    mask = get(s, layout.AT_INTERN_MASK)
    intern = get(s, layout.AT_INTERN)
    at = get(scratch, 0) & mask
    while get(intern, at) != 0:
        if equals_scratch(s, row_at(s, get(intern, at))):
            return get(intern, at) | layout.ROW_BIT
        at = (at + 1) & mask
    if get(s, layout.AT_NUM_FREE_ROWS) > 0:
        add(s, layout.AT_NUM_FREE_ROWS, -1)
        row = get(get(s, layout.AT_FREE_ROWS), get(s, layout.AT_NUM_FREE_ROWS))
    elif get(s, layout.AT_NUM_ROWS) < get(s, layout.AT_MAX_ROWS):
        row = get(s, layout.AT_NUM_ROWS)
        add(s, layout.AT_NUM_ROWS, 1)
    else:
        return layout.WANTS_ROWS
    put(intern, at, row)
    to = row_at(s, row)
    for word in range(get(s, layout.AT_ROW_WORDS)):
        put(to, word, get(scratch, word))
    put(to, 1, 0)
    return row | layout.ROW_BIT


@kernel
def forget_row(s: int, row: int) -> None:
    """Free `row` and remove it from the intern table."""
    mask = get(s, layout.AT_INTERN_MASK)
    intern = get(s, layout.AT_INTERN)
    hole = get(row_at(s, row), 0) & mask
    while get(intern, hole) != row:
        hole = (hole + 1) & mask
    at = hole
    while True:
        at = (at + 1) & mask
        other = get(intern, at)
        if other == 0:
            break
        home = get(row_at(s, other), 0) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            put(intern, hole, other)
            hole = at
    put(intern, hole, 0)
    put(get(s, layout.AT_FREE_ROWS), get(s, layout.AT_NUM_FREE_ROWS), row)
    add(s, layout.AT_NUM_FREE_ROWS, 1)


@kernel
def scratch_ref(s: int) -> int:
    """The ref of the set in row 0; -1 if it is empty; WANTS_ROWS."""
    scratch = get(s, layout.AT_ROWS)
    only = -1
    for word in range(get(s, layout.AT_ROW_WORDS) - 2):
        bits = get(scratch, 2 + word)
        if bits == 0:
            continue
        if only >= 0 or bits & (bits - 1) != 0:
            return interned(s)
        bit = 0
        while (bits >> bit) & 1 == 0:
            bit += 1
        only = 64 * word + bit
    return only


@kernel
def with_member(s: int, ref: int, column: int) -> int:
    """The ref of the set with `column` too; WANTS_ROWS."""
    scratch = to_scratch(s, ref)
    put(scratch, 0, get(scratch, 0) ^ column_key(s, column))
    word = 2 + (column >> 6)
    put(scratch, word, get(scratch, word) | 1 << (column & 63))
    return interned(s)


@kernel
def without_member(s: int, ref: int, column: int) -> int:
    """The ref of the set without `column`; -1 if nothing is left; WANTS_ROWS."""
    if not ref & layout.ROW_BIT:
        return -1
    scratch = to_scratch(s, ref)
    put(scratch, 0, get(scratch, 0) ^ column_key(s, column))
    word = 2 + (column >> 6)
    put(scratch, word, get(scratch, word) & ~(1 << (column & 63)))
    return scratch_ref(s)


@kernel
def use(s: int, ref: int) -> None:
    """Count one block more with this set."""
    if ref & layout.ROW_BIT:
        add(row_at(s, ref ^ layout.ROW_BIT), 1, 1)


@kernel
def drop(s: int, ref: int) -> None:
    """Count one block less with this set."""
    if ref & layout.ROW_BIT:
        row = row_at(s, ref ^ layout.ROW_BIT)
        add(row, 1, -1)
        if get(row, 1) == 0:
            forget_row(s, ref ^ layout.ROW_BIT)


@kernel
def intern_all(s: int) -> None:
    """Fill the empty intern table with every row in use."""
    mask = get(s, layout.AT_INTERN_MASK)
    intern = get(s, layout.AT_INTERN)
    for row in range(1, get(s, layout.AT_NUM_ROWS)):
        if get(row_at(s, row), 1) > 0:
            at = get(row_at(s, row), 0) & mask
            while get(intern, at) != 0:
                at = (at + 1) & mask
            put(intern, at, row)
