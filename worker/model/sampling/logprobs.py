"""Log-probabilities of tokens, by the model's own distribution.

The likeliest tokens are found as candidates, a few more than asked for, all rows at once; they are put
in order on the host, where equals of the last one count by their ids. Rows in which even the candidates
end among equals are looked at again with more.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from mallee.protocol.messages import TokenLogprobs
from mallee.worker.forward import LogprobQuery
from mallee.worker.model.sampling.rows import slabs, stacked

_SPARE: Final = 32
_MORE: Final = 16


def logprobs(queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
    """See `Forward.logprobs`."""
    by_row: dict[int, list[int]] = {}
    for i, query in enumerate(queries):
        by_row.setdefault(id(query.logits), []).append(i)
    places = list(by_row.values())  # of the queries about each distinct row
    found: dict[int, TokenLogprobs] = {}
    for part in slabs(len(places), len(queries[0].logits) if queries else 1):
        asked = [[(i, queries[i]) for i in about] for about in places[part]]
        values = stacked([about[0][1].logits for about in asked]).float().log_softmax(1)
        tops = _tops(values, [max(query.num_top for _, query in about) for about in asked])
        flat = [(row, i, query) for row, about in enumerate(asked) for i, query in about]
        rows, tokens = torch.tensor([(row, query.token) for row, _, query in flat]).T
        for (row, i, query), chance in zip(flat, values[rows, tokens].tolist(), strict=True):
            found[i] = chance, tops[row][: query.num_top]
    return [found[i] for i in range(len(queries))]


def _tops(values: torch.Tensor, counts: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The `counts` likeliest of each row [rows, vocab], equals by rising id; none if they are no numbers."""
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    size = values.shape[1]
    left = [i for i, n in enumerate(counts) if n]
    num_candidates = max(counts) + _SPARE
    while left:
        num_candidates = min(num_candidates, size)
        part = values if len(left) == len(counts) else values[torch.tensor(left)]
        best = part.topk(num_candidates, sorted=True)
        again = []
        for i, row, row_ids in zip(left, best.values.numpy(), best.indices.numpy(), strict=True):
            num_top = min(counts[i], size)
            if num_candidates < size and not row[num_top - 1] > row[-1]:
                again.append(i)
            elif row[0] == row[0]:
                order = np.lexsort((row_ids, -row))[:num_top]
                tops[i] = tuple(zip(row_ids[order].tolist(), row[order].tolist(), strict=True))
        left, num_candidates = again, num_candidates * _MORE
    return tops
