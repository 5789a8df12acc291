"""Draws tokens so that a draw depends on (logits, sampling, seed, position) and on nothing else.

Doesn't know rows, requests or models. No generator state: a replayed, forked or moved branch draws
the same token, whatever else is in its batch.

The scheme, version 1 (a change of any constant changes every sampled text: keep the golden test):

- temperature 0: the highest logit, the lowest id among equals.
- else logits / temperature in float32; then top-k (equals of the k-th stay, as in transformers);
  then top-p: a token stays if the tokens before it, by falling probability then rising id, have
  less than top_p together.
- of those, the id with the highest  logit - log(-log(1 - v))  wins (Gumbel-max), the lowest id among
  equals; v in (0, 1) is a hash of (seed, position, id):
    key = splitmix64(splitmix64(seed) + position); k0, k1 = its low and high 32 bits
    x = id ^ k0; x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x ^= k1; x *= 0x846ca68b;
    x ^= x >> 16                                         (all modulo 2**32: lowbias32 with two keys)
    v = ((x & 0x7fffffff) + 0.5) / 2**31

Gumbel-max is stable: a logit that moves by less than the winner's lead does not change the draw.
"""

from collections.abc import Sequence

import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw

_MASK64 = (1 << 64) - 1
_NUM_BANDS = 1024
_BANDS_PER_NAT = 32.0


def splitmix64(x: int) -> int:
    """The splitmix64 step: a bijection of 64-bit numbers that mixes well."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _as_int32(x: int) -> int:
    """The low 32 bits of x, read as a signed number."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


_M0 = _as_int32(0x7FEB352D)
_M1 = _as_int32(0x846CA68B)


def noise(ids: torch.Tensor, seed: int, position: int) -> torch.Tensor:
    """Standard Gumbel noise, float32, for each of `ids` (int32)."""
    key = splitmix64((splitmix64(seed & _MASK64) + position) & _MASK64)
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


def sample(draws: Sequence[Draw]) -> list[int]:
    """One token id per draw."""
    tokens = [0] * len(draws)
    greedy = [i for i, draw in enumerate(draws) if draw.sampling.temperature == 0.0]
    if greedy:
        # Without a stack: rows are mostly views of one batch, and may be large.
        for i in greedy:
            tokens[i] = int(draws[i].logits.argmax())
    for i, draw in enumerate(draws):
        if draw.sampling.temperature != 0.0:
            tokens[i] = _draw(draw)
    return tokens


def _draw(draw: Draw) -> int:
    scores, ids = filtered(draw.logits, draw.sampling)
    winner = int((scores + noise(ids, draw.seed, draw.position)).argmax())
    return int(ids[winner])


def filtered(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(scaled scores float32, ids int32) of the tokens that may be drawn, by rising id."""
    scores = logits.float() / sampling.temperature
    ids = torch.arange(len(scores), dtype=torch.int32, device=scores.device)
    if 0 < sampling.top_k < len(scores):
        bound = scores.topk(sampling.top_k, sorted=False).values.min()
        kept = (scores >= bound).nonzero().squeeze(1)
        scores, ids = scores[kept], ids[kept]
    if sampling.top_p < 1.0:
        kept = _nucleus(scores, sampling.top_p)
        scores, ids = scores[kept], ids[kept]
    return scores, ids


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places of the tokens that top-p keeps, rising.

    A histogram by score finds the narrow band in which the sum crosses top_p; only that is sorted
    (sorting a whole vocabulary costs ten times as much).
    """
    probabilities = scores.double().softmax(0)
    bands = ((scores.max() - scores) * _BANDS_PER_NAT).clamp_(max=_NUM_BANDS - 1).long()
    mass = torch.bincount(bands, weights=probabilities, minlength=_NUM_BANDS)
    before = mass.cumsum(0) - mass
    crossing = int((before < top_p).nonzero().max())
    band = (bands == crossing).nonzero().squeeze(1)
    order = scores[band].argsort(descending=True, stable=True)
    inside = probabilities[band[order]]
    kept = before[crossing] + inside.cumsum(0) - inside < top_p
    return torch.cat(((bands < crossing).nonzero().squeeze(1), band[order[kept]])).sort().values
