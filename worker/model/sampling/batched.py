"""Draws of a whole batch on its own device: the tokens of `sampler`, without a wait for each row.

`launch` only enqueues work: it edits and filters whole slabs of rows, runs a race of all tokens, and
sends the front runners of each draw to the host in one transfer. `collect` waits for that and runs their race
again on the host, by `sampler`'s own noise. Until then the first of them is the device's guess, with which it
may go on by itself. Draws that choose from the same tokens (branches of one capsule)
are filtered once. Rows are worked on in slabs, which bounds the memory that they need (`draw_nbytes`).

The tokens are those of `sampler` on any device, though logarithms, exponentials and sums round otherwise
there:

- Bias, penalties, temperature, top-k, min-p and masks are additions, divisions and comparisons of float32,
  which IEEE 754 defines to the last bit; the hash of a token is integers.
- The race of all tokens has noise that may be off by `_NOISE_ERROR`, hundreds of times what logarithms
  are off by. The winner is among the front runners if the best of them leads the last by more than that.
- top-p needs sums of exponentials. They are float64, off by less than `_MASS_ERROR` of the whole in any
  order of summing; a token is known to be in or out if its sum is farther than that from top_p.

Where that is not so, and where scores are no numbers, `sampler` draws again from the row on the host: one
draw in millions, but for flat rows, rows with several equal winners at temperatures near 0, and top_p
within 1e-10 of 1. Such rows come in one more transfer.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, Ids, TokenHistory, Words, num_words
from mallee.worker.memory.transfer import Fetched, sent
from mallee.worker.model.sampling.logits import COLDEST, LEAST_PENALTY
from mallee.worker.model.sampling.rows import slabs, stacked
from mallee.worker.model.sampling.sampler import gumbel, race_key, sample

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

_SLAB = 1 << 22  # logits of rows that are worked on together
_NOTHING: Final = np.zeros(1, dtype=np.float32)
_NUM_FRONT: Final = 4
_NOISE_ERROR: Final = 1e-3
_ROUNDING: Final = 2.0**-22  # of a sum in float32, with room
_MASS_ERROR: Final = 1e-10
_LEVELS: Final = ((21, 11), (10, 11), (0, 10))  # shifts and widths of a 32-bit number's digits


class Launched(NamedTuple):
    """Draws under way. `table`: a row for each, in the order of `places`; see `_race`."""

    draws: Sequence[Draw]
    places: list[int]
    keys: Int32s  # [num_draws, 2], as are the rows of
    table: torch.Tensor  # int32 [num_draws, 2 * num_front + 2]
    fetched: Fetched  # the same for the host


def draw_nbytes(num_rows: int, vocab_size: int) -> int:
    """Device memory that so many rows may need beside logits and results; about 256 MiB at most."""
    num_together = min(num_rows, max(1, _SLAB // vocab_size))
    return num_together * (64 * vocab_size + 4 * 8 * (1 << max(width for _, width in _LEVELS)))


def sample_batch(draws: Sequence[Draw]) -> list[int]:
    """One token id per draw, as `sampler.sample` draws them."""
    return collect(launch(draws)) if draws else []


def launch(draws: Sequence[Draw]) -> Launched:
    """Enqueue all that the device does for `draws`, of which there are some. Waits for nothing."""
    size = len(draws[0].logits)
    fields = sorted(_fields(draws), key=lambda places: _kind(draws[places[0]]))
    places = [place for each in fields for place in each]
    keys = _keys([draws[place] for place in places])
    tables: list[torch.Tensor] = []
    start = 0
    for is_greedy, group in groupby(fields, lambda each: not draws[each[0]].sampling.temperature):
        of_kind = list(group)
        for part in slabs(len(of_kind), size, _SLAB):
            slab = of_kind[part]
            field = _field([draws[each[0]] for each in slab], is_greedy)
            rows = np.repeat(np.arange(len(slab)), [len(each) for each in slab])
            for few in slabs(len(rows), size, _SLAB):
                own = keys[start : start + len(rows)][few]
                tables.append(_race(field, rows[few], None if is_greedy else own))
            start += len(rows)
    table = torch.cat(tables)
    return Launched(draws, places, keys, table, Fetched(table))


def guesses_there(launched: Launched, wanted: Sequence[int]) -> torch.Tensor:
    """The guesses of these of the draws, where they were made: int64 [len(wanted)]."""
    rows = np.argsort(launched.places)[wanted]
    return launched.table[:, 0].index_select(0, sent(rows, launched.table.device)).long()


def guesses(launched: Launched) -> list[int]:
    """The guess of each draw, here. Waits as `collect` does."""
    found = launched.fetched.wait()[:, 0].tolist()
    return [found[row] for row in np.argsort(launched.places)]


def collect(launched: Launched) -> list[int]:
    """The token of each draw. Waits for `launch`, and where rows are drawn again for all enqueued since."""
    draws, places = launched.draws, launched.places
    table = launched.fetched.wait()
    num_front = table.shape[1] // 2 - 1
    ids, scores = table[:, :num_front], table[:, num_front:-2].view(torch.float32)
    is_hot = torch.tensor([draws[place].sampling.temperature != 0.0 for place in places])
    low, high = torch.from_numpy(launched.keys)[:, :, None].unbind(1)
    results = torch.where(is_hot[:, None], scores + gumbel(ids, low, high), scores)
    best = results.amax(1, keepdim=True)
    winners = ids.masked_fill(results != best, torch.iinfo(torch.int32).max).amin(1)
    is_sure = (table[:, -1] == 0) & (best[:, 0] > _limit(table[:, -2].view(torch.float32)))
    tokens = dict(zip(places, winners.tolist(), strict=True))
    unsure = [place for place, sure in zip(places, is_sure.tolist(), strict=True) if not sure]
    tokens.update(zip(unsure, _drawn_again([draws[place] for place in unsure]), strict=True))
    return [tokens[i] for i in range(len(draws))]


def _limit(last: torch.Tensor) -> torch.Tensor:
    """The most that a token behind the front runners can have come to; `last` is the result of their last."""
    error = _NOISE_ERROR + _ROUNDING * last.double().abs()
    return torch.where(last == -torch.inf, last, last + error)


def _drawn_again(draws: Sequence[Draw]) -> list[int]:
    if not draws:
        return []
    distinct = {id(draw.logits): draw.logits for draw in draws}
    rows = dict(zip(distinct, stacked(list(distinct.values())).cpu().unbind(0), strict=True))
    return sample([draw._replace(logits=rows[id(draw.logits)]) for draw in draws])


# Of the draws, on the host


def _fields(draws: Sequence[Draw]) -> list[list[int]]:
    """The places of draws that choose from the same tokens, for each such set of tokens."""
    found: dict[object, list[int]] = {}
    for i, draw in enumerate(draws):
        allowed = draw.allowed
        mask = 0 if allowed is None else allowed.__array_interface__["data"][0]
        key = id(draw.logits), id(draw.sampling), id(draw.history), mask, draw.banned
        found.setdefault(key, []).append(i)
    return list(found.values())


def _kind(draw: Draw) -> tuple[bool, bool, int, bool]:
    """Puts draws beside each other that need the same work."""
    sampling = draw.sampling
    return (
        sampling.temperature == 0.0,
        sampling.top_p < 1.0,
        sampling.top_k,
        draw.allowed is None,
    )


def _keys(draws: Sequence[Draw]) -> Int32s:
    """[num_draws, 2]: the low and the high half of each draw's key."""
    keys = np.array([race_key(draw.seed, draw.position) for draw in draws], dtype="<u8")
    return keys.view("<i4").reshape(-1, 2)


# Of a slab, on the device. Columns are [num_rows, 1].


class _Field(NamedTuple):
    """The tokens of each row that may be drawn: all others are -inf."""

    scores: torch.Tensor  # float32 [num_rows, vocab]
    is_unsure: torch.Tensor  # bool [num_rows]: to be drawn again


def _field(draws: Sequence[Draw], is_greedy: bool) -> _Field:
    """Steps 1 to 7 of the scheme."""
    scores = stacked([draw.logits for draw in draws]).to(torch.float32, copy=True)
    _edit(scores, draws)
    settings = [draw.sampling for draw in draws]
    if any(s.temperature not in (0.0, 1.0) for s in settings):
        scores /= _column([max(s.temperature, COLDEST) for s in settings], np.float32, scores)
    highest = scores.amax(1, keepdim=True)
    is_unsure = ~highest.isfinite()[:, 0]
    if is_greedy:
        return _Field(scores, is_unsure)
    counts = [s.top_k if s.top_k < scores.shape[1] else 0 for s in settings]
    if any(counts):
        scores.masked_fill_(scores < _top_k_bound(scores, counts), -torch.inf)
    if any(s.top_p < 1.0 for s in settings):
        shares = _column([s.top_p for s in settings], np.float64, scores)
        is_in, is_close = _nucleus(scores, highest, shares)
        scores.masked_fill_(~is_in, -torch.inf)
        is_unsure |= is_close
    if any(s.min_p > 0.0 for s in settings):
        logs = [math.log(s.min_p) if s.min_p else -math.inf for s in settings]
        scores.masked_fill_(scores < highest + _column(logs, np.float32, scores), -torch.inf)
    return _Field(scores, is_unsure)


def _edit(scores: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Bias, penalties, masks and bans, in place."""
    flat, rows = scores.view(-1), list(enumerate(draws))
    if bias := [(i, *_bias(draw.sampling)) for i, draw in rows if draw.sampling.logit_bias]:
        at, addends = _entries(bias, scores)
        flat[at] += addends
    past = [(i, draw.history, draw.sampling) for i, draw in rows if draw.history is not None]
    if seen := [(i, _seen(h), _factor(s)) for i, h, s in past if s.repetition_penalty != 1.0]:
        at, factors = _entries(seen, scores)
        old = flat[at]
        flat[at] = torch.where(old > 0, old / factors, old * factors)
    if drawn := [
        (i, h.drawn, _subtrahends(h, s))
        for i, h, s in past
        if s.frequency_penalty or s.presence_penalty
    ]:
        at, subtrahends = _entries(drawn, scores)
        flat[at] -= subtrahends
    if any(draw.allowed is not None for draw in draws):
        scores.masked_fill_(_is_masked([draw.allowed for draw in draws], scores), -torch.inf)
    if banned := [(i, np.array(draw.banned), _NOTHING) for i, draw in rows if draw.banned]:
        at, _ = _entries(banned, scores)
        flat.index_fill_(0, at, -torch.inf)


def _entries(
    parts: Sequence[tuple[int, Ids, Float32s]], scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The places in all of `scores` of these rows' ids, and the value of each; one may be for all."""
    size = scores.shape[1]
    places = np.concatenate([row * size + ids for row, ids, _ in parts])
    values = np.concatenate([np.broadcast_to(each, ids.shape) for _, ids, each in parts])
    return sent(places, scores.device), sent(values, scores.device)


def _bias(sampling: Sampling) -> tuple[Ids, Float32s]:
    ids, addends = zip(*sampling.logit_bias, strict=True)
    return np.array(ids, dtype=np.int64), np.array(addends, dtype=np.float32)


def _seen(history: TokenHistory) -> Ids:
    return np.concatenate((history.prompt, history.drawn[~np.isin(history.drawn, history.prompt)]))


def _factor(sampling: Sampling) -> Float32s:
    return np.array(max(sampling.repetition_penalty, LEAST_PENALTY), dtype=np.float32)


def _subtrahends(history: TokenHistory, sampling: Sampling) -> Float32s:
    frequency, presence = (
        np.float32(sampling.frequency_penalty),
        np.float32(sampling.presence_penalty),
    )
    return frequency * history.counts + presence


def _is_masked(sets: Sequence[Words | None], scores: torch.Tensor) -> torch.Tensor:
    """bool [num_rows, vocab]: whether the row has a set, and the token is not in it."""
    rows = np.full((len(sets), num_words(scores.shape[1])), -1, dtype=np.int32)
    for row, words in zip(rows, sets, strict=True):
        if words is not None:
            row[:] = words
    shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
    bits = (sent(rows, scores.device)[..., None] >> shifts).bitwise_and_(1)
    return bits.flatten(1)[:, : scores.shape[1]] == 0


def _top_k_bound(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The `counts`-th highest score of each row, -inf for 0: a column."""
    best = scores.topk(max(counts)).values
    places = _column([max(count - 1, 0) for count in counts], np.int64, scores)
    is_on = _column([count > 0 for count in counts], np.bool_, scores)
    return best.gather(1, places).masked_fill_(~is_on, -torch.inf)


def _nucleus(
    scores: torch.Tensor, highest: torch.Tensor, shares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether top-p keeps each token, and for each row whether that is too close to tell.

    Finds the lowest score that is kept: digit by digit of its distance from the highest, counted in
    steps of float32. The weights of the tokens with each digit are summed; the one at which the sum of
    all before reaches the share is the score's. Of equals of that score, as many are kept as are needed.
    """
    weights = (scores.double() - highest.double()).exp_()
    whole = weights.sum(1, keepdim=True)
    target = shares * whole
    distances = _order(highest).long() - _order(scores)  # 0 to 2**32 - 1
    found = torch.zeros_like(target, dtype=torch.int64)
    for shift, width in _LEVELS:
        num_digits = 1 << width
        # Bin 0 is for what is above all those whose digits so far are the found ones, the last for
        # what is below.
        bins = ((distances >> shift) - (found << width)).clamp_(-1, num_digits).add_(1)
        sums = weights.new_zeros(len(scores), num_digits + 2).scatter_add_(1, bins, weights)
        before = sums.cumsum(1) - sums
        crossing = ((before < target).sum(1, keepdim=True) - 1).clamp_(1, num_digits)
        found = (found << width) + crossing - 1
    is_equal = distances == found
    each = sums.gather(1, crossing) / is_equal.sum(1, keepdim=True)
    needed = (target - before.gather(1, crossing)) / each
    off = (needed - needed.round()).abs() * each
    is_clear = (off > _MASS_ERROR * whole) & (needed > 0)
    is_in = is_equal.cumsum(1, dtype=torch.int32) <= needed.ceil()
    is_in &= is_equal
    is_in |= distances < found
    is_off = shares >= 1.0
    return is_in | is_off, ~(is_clear | is_off)[:, 0]


def _order(scores: torch.Tensor) -> torch.Tensor:
    """int32 numbers that are ordered as the scores are, equal where they are equal."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _race(field: _Field, rows: npt.NDArray[np.int64], keys: Int32s | None) -> torch.Tensor:
    """Steps 4 or 8 of the scheme for draws from these rows of `field`; no keys: all are greedy.

    int32 [num_draws, 2 * num_front + 2]: the ids of the front runners, their scores, the result of the
    last of them with its noise, and whether the draw is to be made again. Floats as their bits.
    """
    device, size = field.scores.device, field.scores.shape[1]
    num_front = min(_NUM_FRONT, size)
    at = sent(rows, device)
    if keys is None:
        best = field.scores.max(1, keepdim=True)
        ids = best.indices[at].expand(-1, num_front)
        scores = best.values[at].expand(-1, num_front)
        last = torch.full_like(scores[:, :1], -torch.inf)
    else:
        low, high = sent(keys, device)[:, :, None].unbind(1)
        ids = torch.arange(size, dtype=torch.int32, device=device)
        results = gumbel(ids, low, high)
        is_each = np.array_equal(rows, np.arange(len(field.scores)))
        own = field.scores if is_each else field.scores[at]
        results += own
        front = results.topk(num_front)
        ids, scores, last = front.indices, own.gather(1, front.indices), front.values[:, -1:]
    floats = torch.cat((scores, last), 1).view(torch.int32)
    return torch.cat((ids.int(), floats, field.is_unsure[at][:, None].int()), 1)


def _column(values: Sequence[float], dtype: npt.DTypeLike, scores: torch.Tensor) -> torch.Tensor:
    return sent(np.array(values, dtype=dtype)[:, None], scores.device)
