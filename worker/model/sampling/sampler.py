"""Draws tokens so that a draw depends on its own `Draw` and on nothing else.

Doesn't know requests or models. No generator state: a replayed, forked or moved branch draws the same
token, whatever else is in its batch. These are the draws on a CPU, and the reference of `device`.

The scheme, version 1 (a change of any constant changes every sampled text: keep the golden test).
Logits are transformed in float32, in this order (up to the temperature as in vLLM, from there on as in
transformers; what is off costs nothing):

1. what the grammar doesn't allow, and what is banned, is out;
2. logit_bias is added;
3. repetition penalty, on all tokens of prompt and answer: a positive logit is divided by it, a
   negative one multiplied; then frequency penalty times the token's count in the answer is subtracted,
   and the presence penalty from each token that is in the answer;
4. temperature 0: the highest logit, the lowest id among equals. Else logits / temperature
   (at least 1e-8; so is a repetition penalty);
5. top-k (equals of the k-th stay, as in transformers);
6. top-p: a token stays if the tokens before it, by falling probability then rising id, have less than
   top_p together;
7. min-p: a token stays if it has at least min_p times the probability of the likeliest;
8. of those, the id with the highest  logit - log(-log(1 - v))  wins (Gumbel-max), the lowest id among
   equals; v in (0, 1) is a hash of (seed, position, id):
     key = splitmix64(splitmix64(seed) + position); k0, k1 = its low and high 32 bits
     x = id ^ k0; x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x ^= k1; x *= 0x846ca68b;
     x ^= x >> 16                                         (all modulo 2**32: lowbias32 with two keys)
     v = ((x & 0x7fffffff) + 0.5) / 2**31

Gumbel-max is stable: a logit that moves by less than the winner's lead does not change the draw.
Log-probabilities are of the untouched logits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs

from mallee.protocol.ids import splitmix64
from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import Draw, LogprobQuery
from mallee.worker.memory.transfer import Fetched, sent
from mallee.worker.model.cpu.race import contenders, race
from mallee.worker.model.sampling.logits import Field, all_ids, edited, filtered, masked
from mallee.worker.model.sampling.logprobs import logprobs
from mallee.worker.model.sampling.rows import slabs, stacked

MIN_BOUNDED = 2048
"""From so many tokens on the noise is computed only for those that can win, where the kernel is there."""


def _as_int32(x: int) -> int:
    """The low 32 bits of x, read as a signed number."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


_M0 = _as_int32(0x7FEB352D)
_M1 = _as_int32(0x846CA68B)


def noise(ids: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """Standard Gumbel noise, float32, for each of `ids` (int32)."""
    key = race_key(seed, position)
    # int32 arithmetic wraps; its >> drags the sign along, hence the masks.
    x = ids ^ _as_int32(key)
    x ^= (x >> 16) & 0xFFFF
    x *= _M0
    x ^= (x >> 15) & 0x1FFFF
    x ^= _as_int32(key >> 32)
    x *= _M1
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    v = (x.float() + 0.5) * 2.0**-31
    v.clamp_(max=1.0 - 2.0**-24)  # float32 rounds the largest up to 1
    return v.neg_().log1p_().neg_().log_().neg_()


def race_key(seed: int, position: int) -> int:
    """The key of a draw: 64 bits of seed and position, mixed."""
    return splitmix64(splitmix64(seed, 1) + position, 1)


class Drawn(NamedTuple):
    """Draws under way: the token of each where it is drawn (int64), and on its way to the host.

    `logprobs` waits for the reports of the draws whose `sampling.logprobs` wants some.
    """

    tokens: torch.Tensor
    fetched: Fetched
    logprobs: Callable[[], list[TokenLogprobs]]

    def collect(self) -> list[int]:
        """The tokens. Waits for them, and for nothing that was enqueued later."""
        found: list[int] = self.fetched.wait().tolist()
        return found

    def there(self, wanted: Sequence[int]) -> torch.Tensor:
        """The tokens of these of the draws, where they were drawn."""
        if list(wanted) == list(range(len(wanted))):
            return self.tokens[: len(wanted)]
        return self.tokens.index_select(0, sent(np.array(wanted), self.tokens.device))


class HostSampler:
    """Draws from logits in host memory, mostly row by row.

    A CPU takes two to twelve times as long for whole batches, since noise is computed for every token of a
    vocabulary there instead of a few dozen.
    """

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return sample(draws)

    def launch(self, draws: Sequence[Draw]) -> Drawn:
        found = sample(draws)
        queries = [
            LogprobQuery(draw.logits, token, draw.sampling.logprobs)
            for draw, token in zip(draws, found, strict=True)
            if draw.sampling.logprobs >= 0
        ]
        tokens = torch.tensor(found)
        return Drawn(tokens, Fetched(tokens), lambda: logprobs(queries))

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        return logprobs(queries)


def sample(draws: Sequence[Draw]) -> list[int]:
    """One token id per draw, of logits in host memory."""
    tokens = [0] * len(draws)
    greedy: list[int] = []
    fields: dict[tuple[int, int], Field] = {}
    for i, draw in enumerate(draws):
        if draw.sampling.temperature != 0.0:
            tokens[i] = _drawn(draw, fields)
        elif not _is_plain(draw):
            scores, ids = edited(draw)
            tokens[i] = int(ids[scores.max(0).indices])
        else:
            greedy.append(i)
    for i, token in zip(greedy, best([draws[i].logits for i in greedy]), strict=True):
        tokens[i] = token
    # What wins against all tokens wins against those of a mask, too: most masks allow it.
    others = [i for i in greedy if not _allows(draws[i], tokens[i])]
    for i, token in zip(others, best_allowed([draws[i] for i in others]), strict=True):
        tokens[i] = token
    return tokens


def best(rows: Sequence[torch.Tensor]) -> list[int]:
    """The id of the highest of each row [vocab], the lowest among equals.

    A row that is given several times (branches of one capsule) is looked at once. In float32: on a CPU
    that is faster, copy included, than a search in bfloat16.
    """
    distinct = {id(row): row for row in rows}
    todo = list(distinct.values())
    found: list[int] = []
    for part in slabs(len(todo), len(rows[0]) if rows else 1):
        found += _highest(stacked(todo[part]).float())
    places = dict(zip(distinct, found, strict=True))
    return [places[id(row)] for row in rows]


def best_allowed(draws: Sequence[Draw]) -> list[int]:
    """As `best`, of the tokens that each draw allows."""
    found: list[int] = []
    size = len(draws[0].logits) if draws else 1
    for each in slabs(len(draws), size):
        part = draws[each]
        scores = stacked([draw.logits for draw in part]).float()
        sets = np.stack([draw.allowed for draw in part if draw.allowed is not None])
        found += _highest(masked(scores, sets))
    return found


def _highest(scores: torch.Tensor) -> list[int]:
    """Places of the highest of each row, the first of equals. Numpy is four times as fast as torch."""
    found: list[int] = scores.numpy().argmax(1).tolist()
    return found


def _drawn(draw: Draw, seen: dict[tuple[int, int], Field]) -> int:
    """The winner of the race among the tokens that may be drawn; of all tokens, if it may be."""
    sampling = draw.sampling
    is_filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if draw.allowed is not None and _is_plain(draw) and not is_filtered:
        token = _race(_field(structs.replace(draw, allowed=None), seen), draw)
        if _allows(draw, token):
            return token
    return _race(_field(draw, seen), draw)


def _allows(draw: Draw, token: int) -> bool:
    """Whether the grammar's mask, if there is one, has `token`."""
    return draw.allowed is None or bool(draw.allowed[token // 32] >> (token % 32) & 1)


def _field(draw: Draw, seen: dict[tuple[int, int], Field]) -> Field:
    """The tokens that the draw chooses from. Branches of one capsule choose from the same: computed once."""
    if draw.allowed is not None or not _is_plain(draw):
        return filtered(*edited(draw), draw.sampling)
    key = (id(draw.logits), id(draw.sampling))
    if key not in seen:
        ids = all_ids(len(draw.logits))
        seen[key] = filtered(draw.logits.float(), ids, draw.sampling)
    return seen[key]


def _race(field: Field, draw: Draw) -> int:
    scores, ids = field.scores, field.ids
    key = race_key(draw.seed, draw.position)
    if race.is_ready and len(scores) >= MIN_BOUNDED:
        places = contenders(scores, ids, key)
        scores, ids = scores[places], ids[places]
    return int(ids[(scores + noise(ids, draw.seed, draw.position)).max(0).indices])


def _is_plain(draw: Draw) -> bool:
    """Whether the logits are taken as they are, but for a grammar's mask."""
    return draw.history is None and not draw.banned and not draw.sampling.logit_bias
