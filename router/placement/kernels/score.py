"""The price of a request on every worker, and the choice: one pass over flat arrays.

What the terms mean: `router.placement.pricing`. Arrays, not addresses: there is no inner call to pay for.
"""

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.router.index.kernels.layout import Counts
from mallee.router.jit import greater, kernel, lesser
from mallee.router.load import layout

Floats: TypeAlias = npt.NDArray[np.floating[Any]]


# Rows of the terms [NUM_TERMS, num_workers]; seconds, if nothing else is said
TERM_OVERLAP: Final = 0  # blocks
TERM_PULLED: Final = 1  # blocks that other workers lend; beyond the overlap
TERM_QUEUED: Final = 2  # from here on in the order of `router.placement.pricing.Cost`
TERM_PREFILL_S: Final = 3
TERM_DECODE: Final = 4
TERM_FETCH: Final = 5  # blocks brought back from host memory or disk
TERM_DISPLACED: Final = 6  # blocks that give way to it
TERM_PULL: Final = 7
TERM_TOTAL: Final = 8  # infinite where the request may not go
NUM_TERMS: Final = 9

# The demand, in the order of `router.placement.pricing.Demand`, and then the model [NUM_PARAMS]
P_PROMPT_TOKENS: Final = 0
P_NUM_BLOCKS: Final = 1  # full blocks of the prompt
P_OWN_BLOCKS: Final = 2  # blocks that it can't share
P_NEEDED_BLOCKS: Final = 3
P_NEW_ROWS: Final = 4
P_STEPS: Final = 5
P_FIXED_PREFILL: Final = 6  # tokens to compute wherever it goes; -1: those beyond the overlap
P_ONLY: Final = 7  # the only worker, or -1
P_MAY_WAIT: Final = 8  # 1: busy workers are out
P_HOME: Final = 9  # the worker of its prompt cache key, or -1
P_GROWTH: Final = 10  # blocks that its text brings with the later ones, for each that it brings now
P_SHARED: Final = 11  # leading blocks that other texts begin with, too
P_COPY: Final = 12  # share of a copy of these that it pays for
P_NOW: Final = 13
P_DRAW: Final = 14  # uniform in [0, 1)
P_WIDTH: Final = 15  # workers 0 .. WIDTH - 1 exist
P_NUM_TIERS: Final = 16  # 1: only the device counts
NUM_ASKED: Final = 17
P_POLICY: Final = 17
P_BLOCK_SIZE: Final = 18
P_TOKEN_S: Final = 19
P_PREFILL_WEIGHT: Final = 20
P_BASE_S: Final = 21
P_ROW_S: Final = 22
P_BLOCK_S: Final = 23
P_BUSY_RATIO: Final = 24
P_TEMPERATURE: Final = 25
P_HOST_BLOCK_S: Final = 26
P_DISK_BLOCK_S: Final = 27
P_PULL_FIRST_S: Final = 28
P_PULL_BLOCK_S: Final = 29
P_DISPLACED_WEIGHT: Final = 30
# and a result
P_BEST_OVERLAP: Final = 31  # blocks, of workers that could have taken it
P_CHOSEN: Final = 32  # terms of the chosen one
NUM_PARAMS: Final = 32 + NUM_TERMS

COST: Final = 0
DYNAMO: Final = 1
ROUND_ROBIN: Final = 2
RANDOM: Final = 3
LEAST_LOADED: Final = 4
PREFIX_ONLY: Final = 5

MORE_ROWS: Final = float(1 << 20)  # than a worker has
UNCONFIRMED: Final = 0.25  # of the outstanding prefill that counts however long ago it was booked


@kernel
def draw_one(p: Floats, terms: Floats, cheapest: float) -> int:
    """A worker drawn by the softmax of its price, scaled to the range of prices as Dynamo does."""
    dearest = cheapest
    for w in range(int(p[P_WIDTH])):
        if dearest < terms[TERM_TOTAL, w] < np.inf:
            dearest = terms[TERM_TOTAL, w]
    scale = (dearest - cheapest) * p[P_TEMPERATURE] if p[P_POLICY] != RANDOM else 1.0
    if scale <= 0.0:
        scale = 1.0
    total = 0.0
    for w in range(int(p[P_WIDTH])):
        if terms[TERM_TOTAL, w] < np.inf:
            total += np.exp((cheapest - terms[TERM_TOTAL, w]) / scale)
    left = p[P_DRAW] * total
    last = -1
    for w in range(int(p[P_WIDTH])):
        if terms[TERM_TOTAL, w] < np.inf:
            last = w
            left -= np.exp((cheapest - terms[TERM_TOTAL, w]) / scale)
            if left < 0.0:
                return w
    return last


@kernel
def fetch_s(p: Floats, loads: Floats, w: int, first: int, each: int, num_blocks: int) -> float:
    """Seconds to fetch the next blocks of a tier on worker `w`; infinite if it would compute them instead.

    `first`, `each`: the rows of its own figures, for the tier; without them the model's count.
    """
    token_s = loads[layout.LOAD_TOKEN_S, w]
    if token_s == 0.0:
        token_s = p[P_TOKEN_S]
    block_s = loads[each, w]
    if block_s == 0.0:
        block_s = p[P_HOST_BLOCK_S] if each == layout.LOAD_HOST_BLOCK_S else p[P_DISK_BLOCK_S]
    seconds = loads[first, w] + num_blocks * block_s
    return seconds if seconds <= num_blocks * p[P_BLOCK_SIZE] * token_s else np.inf


@kernel
def add_tiers(p: Floats, loads: Floats, held: Counts, active: Counts, terms: Floats) -> None:
    """Overlap and fetch time: what lies below the device counts as far as a worker would fetch it.

    It goes tier by tier, and computes all the rest once it computes a block.
    """
    for w in range(int(p[P_WIDTH])):
        overlap, total = max(held[0, w], active[w]), 0.0
        if held[1, w] > overlap:
            num = held[1, w] - overlap
            total = fetch_s(p, loads, w, layout.LOAD_HOST_FIRST_S, layout.LOAD_HOST_BLOCK_S, num)
            overlap = held[1, w] if total < np.inf else overlap
        if total < np.inf and held[2, w] > overlap:
            num = held[2, w] - overlap
            seconds = fetch_s(p, loads, w, layout.LOAD_DISK_FIRST_S, layout.LOAD_DISK_BLOCK_S, num)
            if seconds < np.inf:
                overlap, total = held[2, w], total + seconds
        terms[TERM_OVERLAP, w] = overlap
        terms[TERM_FETCH, w] = total if total < np.inf else 0.0


@kernel
def add_pulls(p: Floats, loads: Floats, held: Counts, terms: Floats) -> None:
    """Blocks that each worker would pull from another one that has most of the prompt, and the seconds.

    Disks are not lent. A worker pulls, as it fetches, where computing takes longer.
    """
    width, tier = int(p[P_WIDTH]), 0 if p[P_NUM_TIERS] == 1 else 1
    most = 0
    for w in range(width):
        num = held[tier, w] if loads[layout.LOAD_LENDS, w] > 0.0 else 0
        most = num if num > most else most
    if most == 0 or p[P_POLICY] != COST:
        terms[TERM_PULL, :width] = 0.0
        terms[TERM_PULLED, :width] = 0.0
        return
    owner, second = width, 0
    for w in range(width):
        is_owner = (loads[layout.LOAD_LENDS, w] > 0.0) & (held[tier, w] == most)
        at = w if is_owner else width
        owner = at if at < owner else owner
    for w in range(width):
        num = held[tier, w] if (loads[layout.LOAD_LENDS, w] > 0.0) & (w != owner) else 0
        second = num if num > second else second
    # Several loops: one of many rows would not run in lanes.
    for w in range(width):
        num = (second if w == owner else most) - terms[TERM_OVERLAP, w]
        terms[TERM_PULLED, w] = num if loads[layout.LOAD_LENDS, w] > 0.0 else 0.0
    for w in range(width):
        token_s, block_s = loads[layout.LOAD_TOKEN_S, w], loads[layout.LOAD_PEER_BLOCK_S, w]
        token_s = token_s if token_s != 0.0 else p[P_TOKEN_S]
        first_s = loads[layout.LOAD_PEER_FIRST_S, w] if block_s != 0.0 else p[P_PULL_FIRST_S]
        num = terms[TERM_PULLED, w]
        seconds = first_s + num * (block_s if block_s != 0.0 else p[P_PULL_BLOCK_S])
        pays = (num > 0.0) & (seconds <= num * p[P_BLOCK_SIZE] * token_s)
        terms[TERM_PULL, w] = seconds if pays else np.inf
    for w in range(width):
        pays = terms[TERM_PULL, w] < np.inf
        terms[TERM_PULLED, w] = terms[TERM_PULLED, w] if pays else 0.0
        terms[TERM_PULL, w] = terms[TERM_PULL, w] if pays else 0.0


@kernel
def lenders(
    loads: Floats, held: Counts, tier: int, slot: int, least: int, width: int
) -> tuple[int, int]:
    """The two workers but `slot` that lend most leading blocks, and more than `least`; -1: none.

    Of equal ones the least loaded, then the lowest slot.
    """
    first, second, most, after = -1, -1, -np.inf, -np.inf
    for w in range(width):
        if held[tier, w] <= least or w == slot or loads[layout.LOAD_LENDS, w] == 0.0:
            continue
        rows = loads[layout.LOAD_ROWS, w] + loads[layout.LOAD_EXTRA_ROWS, w]
        rank = held[tier, w] * MORE_ROWS - rows
        if rank > most:
            first, second, most, after = w, first, rank, most
        elif rank > after:
            second, after = w, rank
    return first, second


@kernel
def displaced_s(
    loads: Floats, w: int, more: float, later: float, block_size: float, token_s: float
) -> float:
    """Seconds to bring back what worker `w` evicts for `more` blocks.

    Beyond the blocks that are free and not spoken for, by prompts that are being computed or, if `later` is
    1 and not 0, by the growth of texts that are there.
    """
    growth = loads[layout.LOAD_GROWTH, w] * later
    spoken_for = loads[layout.LOAD_PREFILL, w] * (1.0 / block_size) + growth
    displaced = more + spoken_for - loads[layout.LOAD_FREE, w]
    displaced = displaced if displaced < more else more
    block_s = token_s * block_size
    fetch_s = loads[layout.LOAD_HOST_BLOCK_S, w]
    block_s = fetch_s if fetch_s > 0.0 and fetch_s < block_s else block_s
    return block_s * (displaced if displaced > 0.0 else 0.0)


@kernel
def add_displaced(p: Floats, loads: Floats, terms: Floats) -> None:
    """The price of what each worker evicts for this text, now or when it has grown.

    At its home a text pays for what gives way now: its next turns will come there.
    """
    brought, weight = p[P_NUM_BLOCKS] + p[P_OWN_BLOCKS], p[P_DISPLACED_WEIGHT]
    for w in range(int(p[P_WIDTH])):
        later = 0.0 if w == p[P_HOME] else 1.0
        more = (brought - terms[TERM_OVERLAP, w]) * (1.0 + (p[P_GROWTH] - 1.0) * later)
        more = more if more > 0.0 else 0.0
        seconds = displaced_s(loads, w, more, later, p[P_BLOCK_SIZE], p[P_TOKEN_S])
        terms[TERM_DISPLACED, w] = weight * seconds


@kernel
def price_copies(
    loads: Floats,
    blocks: "npt.NDArray[np.float64]",
    home: int,
    block_size: float,
    token_s: float,
) -> "npt.NDArray[np.float64]":
    """Seconds as `displaced_s` for `blocks` [num_workers] of a text that is copied to each worker."""
    seconds = np.empty_like(blocks)
    for w in range(len(blocks)):
        later = 0.0 if w == home else 1.0
        seconds[w] = displaced_s(loads, w, blocks[w], later, block_size, token_s)
    return seconds


@kernel
def dynamo_credit(p: Floats, held: Counts, active: Counts, w: int) -> float:
    """Blocks of overlap; in host memory and on disk they count less."""
    device = max(held[0, w], active[w])
    if p[P_NUM_TIERS] == 1:
        return float(device)
    host = max(held[1, w], device)
    lower = 0.75 * (host - device) + 0.25 * (max(held[2, w], host) - host)
    return float(device + lower)


@kernel
def other_policies(p: Floats, loads: Floats, held: Counts, active: Counts, terms: Floats) -> None:
    """Totals that are not seconds: the dynamo formula (in blocks) and the baselines."""
    for w in range(int(p[P_WIDTH])):
        total = 0.0  # round robin and random: all alike
        if p[P_POLICY] == DYNAMO:
            blocks = loads[layout.LOAD_BLOCKS, w] + p[P_NUM_BLOCKS] + p[P_OWN_BLOCKS] - active[w]
            waiting = (loads[layout.LOAD_PREFILL, w] + p[P_PROMPT_TOKENS]) / p[P_BLOCK_SIZE]
            waiting -= dynamo_credit(p, held, active, w)
            total = max(0.0, waiting) + blocks
        elif p[P_POLICY] == LEAST_LOADED:
            total = loads[layout.LOAD_ROWS, w] + loads[layout.LOAD_EXTRA_ROWS, w]
        elif p[P_POLICY] == PREFIX_ONLY:
            total = -terms[TERM_OVERLAP, w]
        terms[TERM_TOTAL, w] = total


@kernel
def price(p: Floats, loads: Floats, held: Counts, active: Counts, terms: Floats) -> None:
    """The terms of every worker's price, and their sum. No branches, so that it runs in lanes."""
    token_s, row_s, block_s = p[P_TOKEN_S], p[P_ROW_S], p[P_BLOCK_S]
    prefill_s = token_s * p[P_PREFILL_WEIGHT]
    rows, steps, base_s, now = p[P_NEW_ROWS], p[P_STEPS], p[P_BASE_S], p[P_NOW]
    blocks, block_size, fixed = (
        p[P_NUM_BLOCKS] + p[P_OWN_BLOCKS],
        p[P_BLOCK_SIZE],
        p[P_FIXED_PREFILL],
    )
    prompt_tokens, shared, not_paid = p[P_PROMPT_TOKENS], p[P_SHARED], 1.0 - p[P_COPY]
    width = int(p[P_WIDTH])
    if p[P_NUM_TIERS] == 1:
        for w in range(width):
            kept, used = held[0, w], active[w]
            terms[TERM_OVERLAP, w] = kept if kept > used else used
        terms[TERM_FETCH, :width] = 0.0
    else:
        add_tiers(p, loads, held, active, terms)
    for w in range(width):
        unconfirmed = loads[layout.LOAD_PREFILL, w] * token_s
        left = loads[layout.LOAD_PREFILL_ENDS, w] - now
        left = left if left < unconfirmed else unconfirmed
        least = unconfirmed * UNCONFIRMED
        terms[TERM_QUEUED, w] = (left if left > least else least) + loads[
            layout.LOAD_EXTRA_PREFILL, w
        ] * token_s
    add_pulls(p, loads, held, terms)
    for w in range(width):
        there = terms[TERM_OVERLAP, w] + terms[TERM_PULLED, w]
        prefill = prompt_tokens - there * block_size
        copied = shared - there
        prefill -= (copied if copied > 0.0 else 0.0) * block_size * not_paid
        prefill = prefill if prefill > 1.0 else 1.0
        terms[TERM_PREFILL_S, w] = prefill_s * (fixed if fixed >= 0.0 else prefill)
    if p[P_HOME] >= 0.0 and p[P_PREFILL_WEIGHT] > 1.0:
        terms[TERM_PREFILL_S, int(p[P_HOME])] /= p[P_PREFILL_WEIGHT]
    for w in range(width):
        rows_there = loads[layout.LOAD_ROWS, w] + loads[layout.LOAD_EXTRA_ROWS, w]
        there = row_s * rows_there + block_s * (
            loads[layout.LOAD_BLOCKS, w] + loads[layout.LOAD_EXTRA_BLOCKS, w]
        )
        added = (row_s * rows + block_s * (blocks - active[w])) * (1.0 + rows_there / rows)
        terms[TERM_DECODE, w] = steps * (base_s + there + added)
    add_displaced(p, loads, terms)
    for w in range(width):
        seconds = (
            terms[TERM_QUEUED, w]
            + terms[TERM_PREFILL_S, w]
            + terms[TERM_DECODE, w]
            + terms[TERM_FETCH, w]
            + terms[TERM_DISPLACED, w]
            + terms[TERM_PULL, w]
        )
        terms[TERM_TOTAL, w] = seconds


@kernel
def mask_ineligible(p: Floats, loads: Floats, terms: Floats) -> None:
    """Set the total to infinity where the request may not go."""
    rows, only, width = p[P_NEW_ROWS], p[P_ONLY], int(p[P_WIDTH])
    needed = max(1.0, p[P_NEEDED_BLOCKS])
    for w in range(width):
        fits = loads[layout.LOAD_ROOM, w] >= needed
        terms[TERM_TOTAL, w] = terms[TERM_TOTAL, w] if fits else np.inf
    if p[P_MAY_WAIT] > 0.0:
        for w in range(width):
            rows_there = loads[layout.LOAD_ROWS, w] + loads[layout.LOAD_EXTRA_ROWS, w]
            most = loads[layout.LOAD_MAX_ROWS, w]
            # One larger than the limit goes where nothing runs, or it would wait for ever.
            is_busy = (rows_there > 0) & (most > 0) & (rows_there + rows > most * p[P_BUSY_RATIO])
            terms[TERM_TOTAL, w] = np.inf if is_busy else terms[TERM_TOTAL, w]
    if only >= 0:
        for w in range(width):
            if w != only:
                terms[TERM_TOTAL, w] = np.inf


@kernel
def cheapest_of(p: Floats, loads: Floats, totals: Floats) -> int:
    """The worker whose total is least, -1 if none is finite.

    Of equally cheap ones the one chosen longest ago, then the lowest slot.
    """
    width = int(p[P_WIDTH])
    least, since, best = np.float32(np.inf), np.inf, width
    for w in range(width):
        least = lesser(totals[w], least)
    if least == np.inf:
        return -1
    for w in range(width):
        since = lesser(loads[layout.LOAD_CHOSEN, w] if totals[w] == least else np.inf, since)
    for w in range(width):
        is_best = (totals[w] == least) & (loads[layout.LOAD_CHOSEN, w] == since)
        at = w if is_best else width
        best = at if at < best else best
    return best


@kernel
def choose(p: Floats, loads: Floats, held: Counts, active: Counts, terms: Floats) -> int:
    """The worker for a demand, the cheapest one, or -1 if it may go nowhere; `terms` say why.

    `held` is [NUM_TIERS, num_workers], cumulative over tiers.
    """
    price(p, loads, held, active, terms)
    if p[P_POLICY] != COST:
        other_policies(p, loads, held, active, terms)
    mask_ineligible(p, loads, terms)
    cheapest = cheapest_of(p, loads, terms[TERM_TOTAL])
    if cheapest < 0:
        return -1
    most = np.float32(0.0)
    for w in range(int(p[P_WIDTH])):
        may_go = terms[TERM_TOTAL, w] < np.inf
        most = greater(terms[TERM_OVERLAP, w] if may_go else np.float32(0.0), most)
    p[P_BEST_OVERLAP] = most
    if p[P_TEMPERATURE] > 0.0 or p[P_POLICY] == RANDOM:
        cheapest = draw_one(p, terms, terms[TERM_TOTAL, cheapest])
    for term in range(NUM_TERMS):
        p[P_CHOSEN + term] = terms[term, cheapest]
    return cheapest
