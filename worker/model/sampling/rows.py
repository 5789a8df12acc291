"""Rows of logits as batches: stacked, and in slabs that bound memory."""

from collections.abc import Iterator, Sequence

import torch

SLAB = 1 << 19
"""Logits looked at in one go: 2 MiB as float32, which a CPU's cache holds."""


def slabs(num_rows: int, row_size: int) -> Iterator[slice]:
    """All rows in order, in slices of at most `SLAB` logits, or of one row."""
    step = max(1, SLAB // max(row_size, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[len(rows), vocab]: a view if the rows follow one another in one batch, else a copy."""
    first = rows[0]
    if len(rows) == 1:
        return first[None]
    start = first.storage_offset()
    step = rows[1].storage_offset() - start
    base = first.untyped_storage().data_ptr()
    is_batch = step >= len(first) and all(
        row.storage_offset() == start + i * step
        and row.stride() == first.stride()
        and row.untyped_storage().data_ptr() == base
        for i, row in enumerate(rows)
    )
    if not is_batch:
        return torch.stack(list(rows))
    return first.as_strided((len(rows), len(first)), (step, first.stride(0)))
