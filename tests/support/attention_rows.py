"""Rows over blocks of KV that they share, for tests of attention."""

from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mallee.worker.forward import Row


def make_row(table: Any, start: int, n: int) -> Row:
    return Row(np.zeros(n, dtype=np.uint32), start, np.asarray(table, dtype=np.int32), 1)


def forked(num_rows: int, shared: int, own: int, n: int = 1, *, size: int) -> list[Row]:
    """Rows over `shared` common blocks and `own` blocks each; `n` new tokens at the end."""
    rows = []
    for i in range(num_rows):
        table = [*range(shared), *(shared + i * own + j for j in range(own))]
        rows.append(make_row(table, (shared + own) * size - n - i % 3, n))
    return rows


@st.composite
def batches(
    draw: st.DrawFn, sizes: Sequence[int], chunks: Sequence[int], longest: int = 40
) -> tuple[list[Row], int]:
    """Rows over a random tree of shared blocks in random places, and their block size."""
    size = draw(st.sampled_from(sizes))
    ids = count()
    stems: list[list[int]] = [[]]
    for _ in range(draw(st.integers(0, 5))):
        stem = draw(st.sampled_from(stems))
        stems.append([*stem, *islice(ids, draw(st.integers(1, longest)))])
    tables, places = [], []
    for _ in range(draw(st.integers(1, 12))):
        stem = draw(st.sampled_from(stems))
        start = len(stem) * size + draw(st.integers(0, 2 * size))
        n = draw(st.sampled_from(chunks))
        num_own = -(-(start + n) // size) - len(stem)
        tables.append([*stem, *islice(ids, num_own)])
        places.append((start, n))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(next(ids))
    rows = [make_row(order[table], *place) for table, place in zip(tables, places, strict=True)]
    return rows, size
