"""Kernels of counted paths (users of each waypoint, an index of those in use), of prompts and of loads."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.bookings import WAYPOINT_STRIDE
from mallee.protocol.hashing import Hashes
from mallee.router.index.kernels import layout
from mallee.router.index.kernels.blocks import remove, store
from mallee.router.index.kernels.layout import Counts
from mallee.router.index.kernels.match import match
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
from mallee.router.load import layout as rows_of
from mallee.router.load.layout import NUM_PROMPT_BLOCKS, PROMPT_WORDS

Loads: TypeAlias = npt.NDArray[np.float64]


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
def note_blocks(table: int, hashes: Hashes) -> None:
    """Take in every `step`-th of a prompt's blocks. Table: what is seen (`load.prompts.Seen`), step, entries.

    An entry, at the low bits of its key, is overwritten by another key. It is the key; the block after it of
    the first prompt that had one; the prompts that had it, negative once one went on by another block.
    """
    shared, num_shared, continues, step = 0, 0, 0, get(table, PROMPT_WORDS)
    is_known = True
    for i in range(step - 1, len(hashes), step):
        key = signed(hashes[i])
        after = signed(hashes[i + step]) if i + step < len(hashes) else 0
        entry = table + 8 * PROMPT_WORDS * (2 + (key & (NUM_PROMPT_BLOCKS - 1)))
        if get(entry, 0) != key:
            put(entry, 0, key)
            put(entry, 1, after)
            put(entry, 2, 1)
            is_known = False
            continue
        following, uses = get(entry, 1), get(entry, 2)
        num = abs(uses)
        has_parted = uses < 0 or (following != 0 and after != 0 and following != after)
        if is_known:
            continues = 1 if following == 0 else 0
            if has_parted:
                shared, num_shared = i + 1, num
        if following == 0:
            put(entry, 1, after)
        put(entry, 2, -(num + 1) if has_parted else num + 1)
    put(table, 0, shared)
    put(table, 1, num_shared)
    put(table, 2, continues)


@kernel
def match_prompt(
    index: int,
    used: int,
    prompts: int,
    hashes: Hashes,
    waypoints: Hashes,
    held: Counts,
    active: Counts,
    loads: Loads,
    width: int,
) -> None:
    """Leading blocks of a path that every worker holds (`held` [tiers, workers]) and uses (`active`).

    All that is looked up of a prompt, in one call: a call from Python costs as much as a match. `index` and
    `used` are control blocks; `used` 0: nothing is known of use. The path's waypoints are written to
    `waypoints`; `note_blocks` and `count_free` do the rest.
    """
    n = len(hashes)
    for i in range(n // WAYPOINT_STRIDE):
        waypoints[i] = hashes[(i + 1) * WAYPOINT_STRIDE - 1]
    if n % WAYPOINT_STRIDE:
        waypoints[n // WAYPOINT_STRIDE] = hashes[n - 1]
    for tier in range(len(held)):
        match(index, hashes, tier + 1, 1, n, held[tier])
    if used != 0:
        match(used, waypoints, 1, WAYPOINT_STRIDE, n, active)
    else:
        active[:] = 0
    note_blocks(prompts, hashes)
    count_free(index, loads, width)


@kernel
def count_free(index: int, loads: Loads, width: int) -> None:
    """Blocks of each worker with nothing in them, by the index's counts."""
    held = column_word(index, layout.REGION_HELD, 0)
    for w in range(width):
        free = loads[rows_of.LOAD_ROOM, w] - get(index, held + w)
        loads[rows_of.LOAD_FREE, w] = free if free > 0.0 else 0.0


@kernel
def count_booking(
    loads: Loads,
    w: int,
    rows: int,
    blocks: int,
    prefill_tokens: int,
    now: float,
    token_s: float,
    number: int,
    brought: int,
    expected: float,
) -> None:
    """A booking on worker `w` begins; as `load.slots.SlotTracker.book`."""
    loads[rows_of.LOAD_ROWS, w] += rows
    loads[rows_of.LOAD_BLOCKS, w] += blocks
    if prefill_tokens > 0:
        loads[rows_of.LOAD_PREFILL, w] += prefill_tokens
        begins = max(now, loads[rows_of.LOAD_PREFILL_ENDS, w])
        loads[rows_of.LOAD_PREFILL_ENDS, w] = begins + prefill_tokens * token_s
    if number >= 0:
        loads[rows_of.LOAD_CHOSEN, w] = number
        left = max(0.0, 1.0 - brought / max(loads[rows_of.LOAD_ROOM, w], 1.0))
        loads[rows_of.LOAD_GROWTH, w] = max(0.0, loads[rows_of.LOAD_GROWTH, w] * left + expected)


@kernel
def count_end(
    loads: Loads, w: int, rows: int, blocks: int, prefill_tokens: int, now: float, token_s: float
) -> None:
    """Rows and blocks on worker `w` end, or prefill. The rest of its queue is at most what is unconfirmed."""
    loads[rows_of.LOAD_ROWS, w] -= rows
    loads[rows_of.LOAD_BLOCKS, w] -= blocks
    loads[rows_of.LOAD_FREED_ROWS, w] += rows
    loads[rows_of.LOAD_FREED_BLOCKS, w] += blocks
    if prefill_tokens > 0:
        loads[rows_of.LOAD_PREFILL, w] -= prefill_tokens
        loads[rows_of.LOAD_FREED_PREFILL, w] += prefill_tokens
        ends = now + loads[rows_of.LOAD_PREFILL, w] * token_s
        loads[rows_of.LOAD_PREFILL_ENDS, w] = min(loads[rows_of.LOAD_PREFILL_ENDS, w], ends)
