"""Kernels of counted paths: users of each waypoint, and the index of those in use."""

from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.blocks import remove, store
from mallee.router.index.kernels.table import (
    add,
    erase,
    insert,
    probe,
    segment_base,
    segment_cap,
    segment_of,
)
from mallee.router.jit import get, kernel, put, signed


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
