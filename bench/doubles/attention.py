"""Attention in its plainest form: what every backend must agree with."""

from collections.abc import Sequence

import torch

from mallee.worker.forward import Row


def attend_plain(
    rows: Sequence[Row],
    q: torch.Tensor,
    memory: torch.Tensor,
    size: int,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """The oracle for attention backends: row by row, every key read, softmax in float32. Slow."""
    heads = memory.shape[2]
    parts, begin = [], 0
    for row in rows:
        n = len(row.tokens)
        at = torch.arange(row.start + n)
        slots = torch.from_numpy(row.table.astype("int64"))[at // size] * size + at % size
        keys, values = memory[slots].float().repeat_interleave(q.shape[1] // heads, 2).unbind(1)
        own = q[begin : begin + n].float()
        scores = torch.einsum("qhd,khd->hqk", own, keys) * scale
        distance = torch.arange(row.start, row.start + n)[:, None] - at[None, :]
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        begin += n
    return torch.cat(parts).to(q.dtype)
