"""Layout of the memory that the kernels share.

**Table**. Open addressing with linear probing, in NUM_SEGMENTS independent segments (by the key's top
bits) of equal capacity. An entry is two int64 side by side, key and value, and probes begin at a line of
the CPU's cache, whose four entries are compared at once. Key 0 means empty: the hash 0 is never held (one
block in 2**64 is computed again). To grow or shrink, a second table is allocated and segments move to it
one at a time, a few per insertion or per idle turn, so that no call pays for more than a few of them.

**Sets**. In an index the value's low 32 bits name a set of columns: a column (below ROW_BIT) or a row of
bits. Rows are interned: blocks with the same workers share one row, which makes a further worker on a
shared block cost no memory, and a run of blocks that a worker adds to one set costs one lookup. The key
of a set is the exclusive or of random numbers, one per column, so that a set with one member more is
O(1) to look up. A row counts the blocks that have it; at 0 it is recycled. The value's high 32 bits are
the time of last use. A row is: set key, number of blocks, bits; row 0 is scratch space. The intern table
(row numbers, 0 empty) is followed by the stack of free rows.

**Columns**. A worker has one column in each tier. When a worker's blocks are forgotten it gets a
new column, and the old one is masked out at once and swept from the table in idle turns. Counts and
digests are kept by *place*, worker + tier x C, so that they can be read in one go; a dead column counts
in a place that no worker has.

**Control block** (`s` in the kernels: its address). The scalars below; NUM_SEGMENTS counts; NUM_SEGMENTS
moved flags; then with C columns per tier: blocks held, by place, set keys, digests, by place, and the
place of each column [3C each, a third per tier]; live columns and columns that may have holes [C / 64
words of bits, in C words each].

Names of words begin with AT_, of regions of columns with REGION_; no other record's names do, since
nothing checks an index.

All integers are int64, hashes and bits too: numba turns mixtures of signed and unsigned into floats.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Counts: TypeAlias = npt.NDArray[np.int32]

NUM_SEGMENTS: Final = 4096
SEGMENT_SHIFT: Final = 52
HOME_SHIFT: Final = SEGMENT_SHIFT - 32  # the bits below the segment's
SPREAD: Final = -7046029254386353131  # 2**64 / golden ratio, odd
ROW_BIT: Final = 1 << 31
LOW: Final = 0xFFFFFFFF
LINE_SHIFT: Final = 2  # four entries are a line of the CPU's cache
WALK: Final = 64  # blocks of a path that are looked up at once where it is walked

# Addresses
AT_TABLE: Final = 0
AT_NEXT_TABLE: Final = 1
AT_ROWS: Final = 2
AT_INTERN: Final = 3
AT_FREE_ROWS: Final = 4
# Scalars
AT_CAP: Final = 5  # entries per segment of the table
AT_NEXT_CAP: Final = 6  # of the next one; 0: no move is under way
AT_NUM_KEYS: Final = 7
AT_MAX_KEYS: Final = 8
AT_NUM_MOVED: Final = 9
AT_MOVE_CURSOR: Final = 10
AT_MOVE_DEBT: Final = 11
AT_WANTS: Final = 12  # 0, or one of WANTS_*
AT_COLUMNS: Final = 13  # per tier, a multiple of 64
AT_TIERS: Final = 14
AT_ROW_WORDS: Final = 15
AT_MAX_ROWS: Final = 16
AT_NUM_ROWS: Final = 17  # ever taken, with row 0
AT_NUM_FREE_ROWS: Final = 18
AT_INTERN_MASK: Final = 19
AT_NUM_MAY_HAVE_HOLES: Final = 20  # columns that may have holes
AT_CLOCK: Final = 21
AT_EVICTED: Final = 22
AT_EVICT_CURSOR: Final = 23
AT_SWEEP_CURSOR: Final = 24
AT_PROBES: Final = 25  # blocks looked up by matches
AT_KNOWN_REF: Final = 26  # in a match: a set that has all that are alive
AT_FRESH: Final = 27
AT_ALIVE_WORDS: Final = 28  # in a match: words of ALIVE, up to the last that isn't 0
NUM_SCALARS: Final = 32

AT_FOUND: Final = NUM_SCALARS  # values of WALK blocks of a walked path
AT_SEGMENT_COUNTS: Final = AT_FOUND + WALK
AT_MOVED: Final = AT_SEGMENT_COUNTS + NUM_SEGMENTS
AT_PER_COLUMN: Final = AT_MOVED + NUM_SEGMENTS
REGION_HELD: Final = 0  # offsets behind PER_COLUMN, in units of C
REGION_SET_KEYS: Final = 3
REGION_DIGESTS: Final = 6
REGION_PLACES: Final = 9
REGION_LIVE: Final = 12
REGION_MAY_HAVE_HOLES: Final = 13
REGION_ALIVE: Final = 14  # scratch bits of a match
NUM_REGIONS: Final = 15

# Requests of a kernel to the owner of its memory
WANTS_ROOM: Final = 1  # soon; the others stopped it
WANTS_FULL: Final = -1
WANTS_ROWS: Final = -2


def control_words(columns: int) -> int:
    """Length of a control block for `columns` columns per tier."""
    return AT_PER_COLUMN + NUM_REGIONS * columns
