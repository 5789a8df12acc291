"""Kernels of counted paths (users of each waypoint, an index of those in use), of prompts and free blocks."""

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.blocks import remove, store
from mallee.router.index.kernels.table import (
    add,
    column_word,
    erase,
    insert,
    probe,
    segment_base,
    segment_cap,
    segment_of,
)
from mallee.router.jit import get, kernel, put, signed
from mallee.router.load.layout import LOAD_FREE, LOAD_ROOM


@kernel
def use_path(
    counts: int, index: int, waypoints: Hashes, salt: int, column: int, fresh: Hashes
) -> int:
    """Each waypoint counts one more under `salt`, and those that are new (in `fresh`) are in `column`.

    Returns how many are new. If a table is full before that, or either has to grow, ~(waypoints counted
    so far): FRESH of `counts` counts the new ones, none of which is in the index yet, or not all.
    """
    done = count_up(counts, waypoints, salt, 0, fresh, 0)
    num_fresh = get(counts, layout.AT_FRESH)
    grows = get(counts, layout.AT_WANTS) != 0 or get(counts, layout.AT_NEXT_CAP) != 0
    if done < len(waypoints) or grows or store(index, fresh[:num_fresh], column) < 0:
        return ~done
    return num_fresh


@kernel
def leave_path(
    counts: int, index: int, waypoints: Hashes, salt: int, column: int, gone: Hashes
) -> int:
    """Each waypoint counts one less under `salt`; those without users left (in `gone`) leave `column`.

    Returns how many; ~(that) if the index ran out of rows before it had forgotten all of them.
    """
    num_gone = count_down(counts, waypoints, salt, gone)
    if remove(index, gone[:num_gone], column) < num_gone:
        return ~num_gone
    return num_gone


@kernel
def counted_key(waypoint: int, salt: int) -> int:
    """The key of a waypoint's count; 0 would be an empty entry."""
    key = waypoint ^ salt
    return key if key != 0 else 1


@kernel
def count_up(
    s: int, waypoints: Hashes, salt: int, start: int, fresh: Hashes, num_fresh: int
) -> int:
    """Each waypoint counts one more under `salt`; those that had no count are added to `fresh`.

    Returns len(waypoints); or, with WANTS_FULL, where it must go on. FRESH is how many are in `fresh`.
    """
    put(s, layout.AT_FRESH, num_fresh)
    for i in range(start, len(waypoints)):
        key = counted_key(signed(waypoints[i]), salt)
        segment = segment_of(key)
        base = segment_base(s, segment)
        at = probe(base, segment_cap(s, segment), key)
        if at >= 0:
            add(base, 2 * at + 1, 1)
            continue
        if not insert(s, segment, ~at, key, 1):
            return i
        fresh[get(s, layout.AT_FRESH)] = waypoints[i]
        add(s, layout.AT_FRESH, 1)
    return len(waypoints)


@kernel
def count_down(s: int, waypoints: Hashes, salt: int, gone: Hashes) -> int:
    """Each waypoint counts one less under `salt`; those with no count left are in `gone`: how many."""
    num_gone = 0
    for i in range(len(waypoints)):
        key = counted_key(signed(waypoints[i]), salt)
        segment = segment_of(key)
        base = segment_base(s, segment)
        at = probe(base, segment_cap(s, segment), key)
        if at < 0:
            continue
        add(base, 2 * at + 1, -1)
        if get(base, 2 * at + 1) == 0:
            erase(s, segment, at)
            gone[num_gone] = waypoints[i]
            num_gone += 1
    return num_gone


@kernel
def note_blocks(
    keys: Hashes,
    following: Hashes,
    uses: "npt.NDArray[np.int32]",
    hashes: Hashes,
    step: int,
    found: "npt.NDArray[np.int64]",
) -> None:
    """Take in every `step`-th of a prompt's blocks; `found` is `load.prompts.Seen`.

    An entry, at the low bits of its key, is overwritten by another key. `following`: the block after it of
    the first prompt that had one; `uses` is negative once a prompt went on by another.
    """
    shared, num_shared, continues = 0, 0, 0
    is_known = True
    for i in range(step - 1, len(hashes), step):
        key = hashes[i]
        after = hashes[i + step] if i + step < len(hashes) else np.uint64(0)
        at = np.int64(key & np.uint64(len(keys) - 1))
        if keys[at] != key:
            keys[at], following[at], uses[at] = key, after, 1
            is_known = False
            continue
        num = abs(uses[at])
        has_parted = uses[at] < 0 or (following[at] != 0 and after != 0 and following[at] != after)
        if is_known:
            continues = 1 if following[at] == 0 else 0
            if has_parted:
                shared, num_shared = i + 1, num
        if following[at] == 0:
            following[at] = after
        uses[at] = -(num + 1) if has_parted else num + 1
    found[0], found[1], found[2] = shared, num_shared, continues


@kernel
def count_free(index: int, loads: "npt.NDArray[np.float64]", width: int) -> None:
    """Blocks of each worker with nothing in them, by the index's counts."""
    workers = column_word(index, layout.REGION_WORKERS, 0)
    held = column_word(index, layout.REGION_HELD, 0)
    for column in range(get(index, layout.AT_COLUMNS)):
        w = get(index, workers + column)
        is_live = (
            get(index, column_word(index, layout.REGION_LIVE, column >> 6)) >> (column & 63) & 1
        )
        if is_live != 0 and w < width:
            free = loads[LOAD_ROOM, w] - get(index, held + column)
            loads[LOAD_FREE, w] = free if free > 0.0 else 0.0
