"""Draws and log-probabilities of whole batches: a program for each row, which loops over its vocabulary.

The scheme is that of `sampling.sampler`: the same steps in the same order, and the same hash. A program reads
the parameters, logits and candidates of its own row alone, so nothing beside it changes its token.
Likelihoods are summed as integers (2**40 for the likeliest token), which add up alike in any order.

A greedy or plain draw is one pass over the row, and min-p takes two. So do top-k and top-p: the first pass
finds the highest score in each of `GROUPS` groups of tokens. At least as many tokens reach the least of
these; the second pass copies them (some 7,000) and sums all likelihoods. The threshold is then found among
these candidates, by bisection over the bits of a float32, and they alone race. If it lies below them, another
pass copies more: those that reach the least of the best of `BLOCK` groups (some 30,000). If it lies below
these too, or too many are alike, each of some 30 steps is a pass over the row.

256 rows of 152,000 logits are 78 MB in bfloat16, 26 us a pass at 3 TB/s. Rows with penalties or bias are
copied as float32 first, which costs three such passes and doubles the others: at most seven, 0.2 ms.

An allowed logit that is no finite number counts as the lowest or the highest, so that every row has a token.
"""

import triton
import triton.language as tl

# Columns of a draw, int64.
ADDRESS = tl.constexpr(0)  # of its logits, or of their edited copy
KEY = tl.constexpr(1)
SETTINGS = tl.constexpr(2)  # row of the settings
MASK = tl.constexpr(3)  # row of the masks; -1: all tokens are allowed
IS_EDITED = tl.constexpr(4)
DRAW_COLUMNS = tl.constexpr(5)

# Columns of settings, float64.
TEMPERATURE = tl.constexpr(0)  # 0: greedy
TOP_K = tl.constexpr(1)  # 0: off
TOP_P = tl.constexpr(2)  # 1: off
LOG_MIN_P = tl.constexpr(3)  # -inf: off
SETTINGS_COLUMNS = tl.constexpr(4)

# Columns of an edit, int64: where the tokens of its prompt are, and those that have values of their own.
SOURCE = tl.constexpr(0)  # address of the logits
FIRST_PROMPT = tl.constexpr(1)
NUM_PROMPT = tl.constexpr(2)
FIRST_OWN = tl.constexpr(3)
NUM_OWN = tl.constexpr(4)
EDIT_COLUMNS = tl.constexpr(5)

# Columns of own values, float32, in the order in which they are applied.
ADDEND = tl.constexpr(0)
FACTOR = tl.constexpr(1)
SUBTRAHEND = tl.constexpr(2)
VALUE_COLUMNS = tl.constexpr(3)

# Columns of a query for log-probabilities, int64.
TOKEN = tl.constexpr(1)  # after its ADDRESS: place of its token among `tokens`
NUM_TOP = tl.constexpr(2)
QUERY_COLUMNS = tl.constexpr(3)

LOWEST = tl.constexpr(-3.4028234663852886e38)
HIGHEST = tl.constexpr(3.4028234663852886e38)
UNIT = tl.constexpr(1 << 40)  # the likeliest token in sums of likelihoods


@triton.jit
def draw(
    draws,  # [num_draws, DRAW_COLUMNS]
    settings,  # [num_settings, SETTINGS_COLUMNS]
    masks,  # int32 [num_masks, mask_size]: sets of tokens as bits
    few_scores,  # float32 [num_draws, capacity], and as many
    few_ids,  # int32: room for candidates, needed for top-k and top-p alone
    tokens,  # int64 [num_draws]: the result
    size,  # of the vocabulary
    mask_size,
    capacity,
    DTYPE: tl.constexpr,  # of logits that are not edited
    IS_ALIGNED: tl.constexpr,  # whether every row begins at a multiple of 16 bytes
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The token of each draw."""
    place = tl.program_id(0).to(tl.int64)
    own = draws + place * DRAW_COLUMNS
    key = tl.load(own + KEY)
    mask = tl.load(own + MASK)
    chosen = settings + tl.load(own + SETTINGS) * SETTINGS_COLUMNS
    temperature = tl.load(chosen + TEMPERATURE).to(tl.float32)
    top_k = tl.load(chosen + TOP_K).to(tl.int64)
    top_p = tl.load(chosen + TOP_P)
    log_min_p = tl.load(chosen + LOG_MIN_P).to(tl.float32)
    is_edited = tl.load(own + IS_EDITED) != 0
    is_hot = temperature > 0.0
    row = (
        tl.load(own + ADDRESS),
        tl.where(is_hot, temperature, 1.0),
        masks + mask * mask_size,
        tl.where(mask < 0, 0, size),
        tl.where(is_edited, size, 0),
        tl.where(is_edited, 0, size),
    )
    is_cut = (top_k > 0) | (top_p < 1.0)
    lanes = tl.arange(0, BLOCK)

    # The tokens that may win: above `floor`, and at it up to the id `last`.
    floor = tl.full((), -float("inf"), tl.float32)
    last = size
    num_few = tl.full((), 0, tl.int32)  # of candidates that have all of them; 0: the row has
    few_scores += place * capacity
    few_ids += place * capacity
    if is_hot & (is_cut | (log_min_p > -float("inf"))):
        highest = tl.full((BLOCK,), -float("inf"), tl.float32)
        for start in range(0, size, BLOCK):
            highest = tl.maximum(highest, _scores(row, start + lanes, DTYPE, IS_ALIGNED))
        top = tl.max(highest, 0)
        if is_cut:
            best = tl.max(tl.reshape(highest, (BLOCK // GROUPS, GROUPS)), 0)
            bound = tl.maximum(tl.min(best, 0), LOWEST)
            mass = tl.full((), 0, tl.int64)
            num_tries = 0
            while (num_few == 0) & (num_tries < 2):
                whole = tl.zeros((BLOCK,), tl.int64)
                above = tl.zeros((BLOCK,), tl.int64)
                for start in range(0, size, BLOCK):
                    scores = _scores(row, start + lanes, DTYPE, IS_ALIGNED)
                    weights = _weights(scores, top)
                    is_taken = scores >= bound
                    whole += weights
                    above += tl.where(is_taken, weights, 0)
                    at = num_few + tl.cumsum(is_taken.to(tl.int32), 0) - 1
                    fits = is_taken & (at < capacity)
                    tl.store(few_scores + at, scores, mask=fits)
                    tl.store(few_ids + at, start + lanes, mask=fits)
                    num_few += tl.sum(is_taken.to(tl.int32), 0)
                tl.debug_barrier()  # what is stored there is loaded by other threads
                mass = tl.sum(whole, 0)
                share = _share(mass, top_p)
                enough = tl.where(top_k > 0, num_few >= top_k, tl.sum(above, 0) >= share)
                num_few = tl.where((num_few <= capacity) & (enough | (bound <= LOWEST)), num_few, 0)
                floor = tl.where(num_few > 0, bound, LOWEST)
                bound = tl.maximum(tl.min(highest, 0), LOWEST)
                num_tries += 1
            few = (few_scores, few_ids, num_few, row, size)
            if top_k > 0:
                floor = _threshold(floor, top_k, 0, top, few, DTYPE, IS_ALIGNED, BLOCK)
                mass = _weight_from(floor, 1, top, few, DTYPE, IS_ALIGNED, BLOCK)
            if top_p < 1.0:
                share = _share(mass, top_p)
                floor = _threshold(floor, share, 1, top, few, DTYPE, IS_ALIGNED, BLOCK)
                # Of the tokens at the threshold, as many as are needed.
                higher = _score(_order(floor) + 1)
                share -= _weight_from(higher, 1, top, few, DTYPE, IS_ALIGNED, BLOCK)
                each = _weights(floor, top)
                num_equal = (share + each - 1) // each
                last = _id_of(num_equal, floor, few, DTYPE, IS_ALIGNED, BLOCK)
        if top + log_min_p > floor:
            floor = top + log_min_p
            last = size

    # The race, or the choice of the highest.
    few = (few_scores, few_ids, num_few, row, size)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    winners = tl.full((BLOCK,), 0, tl.int32) + size
    for start in range(0, _num(few), BLOCK):
        scores, ids = _candidates(few, start + lanes, DTYPE, IS_ALIGNED)
        results = scores
        if is_hot:
            results += _gumbel(ids, key)
        may_win = (scores > floor) | ((scores == floor) & (ids <= last))
        is_better = may_win & (results > best)
        best = tl.where(is_better, results, best)
        winners = tl.where(is_better, ids, winners)
    winner = tl.min(tl.where(best == tl.max(best, 0), winners, size), 0)
    tl.store(tokens + place, tl.minimum(winner, size - 1).to(tl.int64))


@triton.jit
def edit(
    edits,  # [num_edits, EDIT_COLUMNS]
    factors,  # float32 [num_edits]: the repetition penalties
    prompts,  # int32
    ids,  # int32 [num_own]
    values,  # float32 [num_own, VALUE_COLUMNS]
    edited,  # float32 [num_edits, stride]: the result
    size,
    stride,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies of rows with bias and penalties. Each is computed from the row itself; the last one counts."""
    place = tl.program_id(0).to(tl.int64)
    own = edits + place * EDIT_COLUMNS
    address = tl.load(own + SOURCE)
    row = edited + place * stride
    lanes = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        at = start + lanes
        tl.store(row + at, _logits(address, at, at < size, DTYPE, IS_ALIGNED), mask=at < size)
    tl.debug_barrier()
    first = prompts + tl.load(own + FIRST_PROMPT)
    num = tl.load(own + NUM_PROMPT).to(tl.int32)
    penalty = tl.load(factors + place)
    for start in range(0, num, BLOCK):
        inside = start + lanes < num
        at = tl.load(first + start + lanes, mask=inside, other=0)
        logits = _logits(address, at, inside, DTYPE, False)
        tl.store(row + at, _penalised(logits, penalty), mask=inside)
    tl.debug_barrier()
    begin = tl.load(own + FIRST_OWN)
    num = tl.load(own + NUM_OWN).to(tl.int32)
    for start in range(0, num, BLOCK):
        inside = start + lanes < num
        entry = begin + start + lanes
        at = tl.load(ids + entry, mask=inside, other=0)
        value = values + entry * VALUE_COLUMNS
        addend = tl.load(value + ADDEND, mask=inside, other=0.0)
        factor = tl.load(value + FACTOR, mask=inside, other=1.0)
        subtrahend = tl.load(value + SUBTRAHEND, mask=inside, other=0.0)
        logits = _logits(address, at, inside, DTYPE, False) + addend
        tl.store(row + at, _penalised(logits, factor) - subtrahend, mask=inside)


@triton.jit(do_not_specialize=["most"])
def report(
    queries,  # [num_queries, QUERY_COLUMNS]
    tokens,  # int64
    found,  # int32 [num_queries, 1 + 2 * most]: chances of the token and the likeliest as bits, and their ids
    size,
    most,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-probabilities. Two passes over a row, and one for each of its likeliest, equals by rising id."""
    place = tl.program_id(0).to(tl.int64)
    own = queries + place * QUERY_COLUMNS
    address = tl.load(own + ADDRESS)
    token = tl.load(tokens + tl.load(own + TOKEN))
    num_top = tl.load(own + NUM_TOP).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    for start in range(0, size, BLOCK):
        at = start + lanes
        logits = _logits(address, at, at < size, DTYPE, IS_ALIGNED)
        highest = tl.where(at < size, tl.maximum(highest, _finite(logits)), highest)
    top = tl.max(highest, 0)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + lanes
        logits = _logits(address, at, at < size, DTYPE, IS_ALIGNED)
        sums += tl.where(at < size, tl.exp(logits - top), 0.0)
    whole = tl.log(tl.sum(sums, 0))
    found += place * (1 + 2 * most)
    chance = _logits(address, token, True, DTYPE, False) - top - whole
    tl.store(found, chance.to(tl.int32, bitcast=True))
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for i in range(num_top):
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        winners = tl.full((BLOCK,), 0, tl.int32) + size
        for start in range(0, size, BLOCK):
            at = start + lanes
            logits = _finite(_logits(address, at, at < size, DTYPE, IS_ALIGNED))
            is_left = (logits < last) | ((logits == last) & (at > last_id))
            is_better = (at < size) & is_left & (logits > best)
            best = tl.where(is_better, logits, best)
            winners = tl.where(is_better, at, winners)
        last = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last, winners, size), 0)
        chance = tl.where(last > LOWEST, last - top - whole, -float("inf"))
        tl.store(found + 1 + i, chance.to(tl.int32, bitcast=True))
        tl.store(found + 1 + most + i, last_id)


# Parts. A `row` is (address, divisor, words of its mask, and the number of tokens whose mask, whose edited
# logits and whose plain logits are read). `few` are (scores, ids and number of candidates, row, size).


@triton.jit
def _logits(address, at, inside, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """The logits at `address` + `at` as float32."""
    pointers = address.to(tl.pointer_type(DTYPE)) + at
    if IS_ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _finite(scores):
    return tl.where(scores > LOWEST, tl.minimum(scores, HIGHEST), LOWEST)


@triton.jit
def _penalised(logits, factor):
    return tl.where(logits > 0.0, tl.math.div_rn(logits, factor), logits * factor)


@triton.jit
def _scores(row, at, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """The finite scores of the tokens `at`; -inf of those that are not allowed, and beyond the row."""
    address, divisor, words, num_masked, num_edited, num_plain = row
    edited = _logits(address, at, at < num_edited, tl.float32, IS_ALIGNED)
    plain = _logits(address, at, at < num_plain, DTYPE, IS_ALIGNED)
    scores = _finite(tl.math.div_rn(edited + plain, divisor))
    bits = tl.load(words + (at >> 5), mask=at < num_masked, other=-1)
    is_allowed = (at < tl.maximum(num_edited, num_plain)) & (((bits >> (at & 31)) & 1) != 0)
    return tl.where(is_allowed, scores, -float("inf"))


@triton.jit
def _num(few):
    num_few, size = few[2], few[4]
    return tl.where(num_few > 0, num_few, size)


@triton.jit
def _candidates(few, at, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """The scores and ids of the candidates `at`: the copied ones, or else the row's; -inf beyond them."""
    few_scores, few_ids, num_few, row, _ = few
    if num_few > 0:
        scores = tl.load(few_scores + at, mask=at < num_few, other=-float("inf"))
        ids = tl.load(few_ids + at, mask=at < num_few, other=0)
    else:
        scores = _scores(row, at, DTYPE, IS_ALIGNED)
        ids = at
    return scores, ids


@triton.jit
def _weights(scores, top):
    return (tl.exp(scores - top) * UNIT).to(tl.int64)


@triton.jit
def _share(mass, top_p):
    """The least sum of likelihoods that is `top_p` of `mass`."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p).to(tl.int64), 1)


@triton.jit
def _weight_from(
    bound, is_mass, top, few, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of likelihoods of the candidates from the score `bound` on, or their number."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, _num(few), BLOCK):
        scores, _ = _candidates(few, start + tl.arange(0, BLOCK), DTYPE, IS_ALIGNED)
        if is_mass:
            total += tl.where(scores >= bound, _weights(scores, top), 0)
        else:
            total += (scores >= bound).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _threshold(
    floor,
    needed,
    is_mass,
    top,
    few,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The highest score from which on the candidates sum up to `needed`; `floor` if none does."""
    low = _order(floor)
    high = _order(top) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        weight = _weight_from(_score(middle), is_mass, top, few, DTYPE, IS_ALIGNED, BLOCK)
        is_enough = weight >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return _score(low)


@triton.jit
def _id_of(number, score, few, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the candidate that is `number` (from 1 on) among those of `score`, by rising id."""
    found = tl.full((BLOCK,), -1, tl.int32)
    before = tl.full((), 0, tl.int32)
    for start in range(0, _num(few), BLOCK):
        scores, ids = _candidates(few, start + tl.arange(0, BLOCK), DTYPE, IS_ALIGNED)
        is_equal = (scores == score).to(tl.int32)
        places = before + tl.cumsum(is_equal, 0)
        found = tl.where((is_equal != 0) & (places <= number), ids, found)
        before += tl.sum(is_equal, 0)
    return tl.max(found, 0)


@triton.jit
def _order(score):
    """A number that is ordered as the finite float32 `score` is."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _score(order):
    """The score of an `_order`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(ids, key):
    """Standard Gumbel noise: see `sampler`."""
    x = ids.to(tl.uint32) ^ key.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x ^= (key >> 32).to(tl.uint32)
    x *= 0x846CA68B
    x ^= x >> 16
    v = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / (1 << 31))
    v = tl.minimum(v, 1.0 - 1.0 / (1 << 24))
    # -log(1 - v); where v is small, 1 - v is too coarse.
    small = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.0625, small, -tl.log(1.0 - v)))
