"""Log-probabilities of tokens that are being drawn: enqueued behind the draws, before the host knows a token.

So nothing waits for a pass that is launched behind them. They are those of `logprobs`, which is asked again
for a token that is not the one the device went on with, and where the candidates end among equals.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import Draw, LogprobQuery
from mallee.worker.memory.transfer import Fetched
from mallee.worker.model.sampling.rows import slabs, stacked

_SPARE: Final = 32
_SLAB: Final = 1 << 22  # logits of rows that are worked on together


class Reports(NamedTuple):
    """Reports under way, of `draws`. `fetched`, int32: token, its chance, candidates' chances and ids."""

    draws: Sequence[Draw]
    fetched: list[Fetched]  # by slab


def launch(draws: Sequence[Draw], tokens: torch.Tensor) -> Reports:
    """Enqueue the reports of `draws`, whose tokens are on the device: int64 [len(draws)]."""
    size = len(draws[0].logits)
    num_candidates = min(size, max(draw.sampling.logprobs for draw in draws) + _SPARE)
    fetched = []
    for part in slabs(len(draws), size, _SLAB):
        values = stacked([draw.logits for draw in draws[part]]).float().log_softmax(1)
        own, best = tokens[part, None], values.topk(num_candidates, sorted=True)
        floats = torch.cat((values.gather(1, own), best.values), 1).view(torch.int32)
        fetched.append(Fetched(torch.cat((own.int(), floats, best.indices.int()), 1)))
    return Reports(draws, fetched)


def collect(
    reports: Reports,
    tokens: Sequence[int],
    again: Callable[[Sequence[LogprobQuery]], list[TokenLogprobs]],
) -> list[TokenLogprobs]:
    """The report of each draw, which drew that one of `tokens`. `again` answers for the device's guesses."""
    table = np.concatenate([each.wait().numpy() for each in reports.fetched])
    num = table.shape[1] // 2 - 1
    guesses, floats, ids = table[:, 0], table[:, 1 : 2 + num].view(np.float32), table[:, 2 + num :]
    found: dict[int, TokenLogprobs] = {}
    for i, (draw, token) in enumerate(zip(reports.draws, tokens, strict=True)):
        num_top, chances = min(draw.sampling.logprobs, len(draw.logits)), floats[i, 1:]
        is_whole = num == len(draw.logits) or not num_top or chances[num_top - 1] > chances[-1]
        if token == guesses[i] and is_whole:
            order = np.lexsort((ids[i], -chances))[:num_top]
            likeliest = zip(ids[i][order].tolist(), chances[order].tolist(), strict=True)
            is_number = chances[0] == chances[0]
            found[i] = float(floats[i, 0]), tuple(likeliest) if is_number else ()
    rest = [i for i in range(len(tokens)) if i not in found]
    queries = [
        LogprobQuery(draw.logits, tokens[i], draw.sampling.logprobs)
        for i, draw in enumerate(reports.draws)
        if i not in found
    ]
    found.update(zip(rest, again(queries) if queries else (), strict=True))
    return [found[i] for i in range(len(tokens))]
