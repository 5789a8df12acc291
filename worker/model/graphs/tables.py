"""FlashInfer's decode plans over page tables whose addresses never change, for steps that are recorded.

A recorded step reads page tables, and how they are shared out between thread blocks, where they lay when it
was recorded. A new plan changes what lies there and nothing else: in FlashInfer's graph mode the grid, the
tile and whether rows are split follow from the number of rows alone. (Not so with fixed splits: there they
follow from the lengths, and FlashInfer doesn't promise that graphs work. So steps of deterministic mode are
never recorded.)

Steps of all sizes take turns with the same tables: a plan is made right before its step.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from mallee.worker.memory.transfer import Mark, sent_on
from mallee.worker.model.attention.base import AttentionSplit
from mallee.worker.model.attention.flashinfer import (
    FlashInferAttention,
    Pages,
    Part,
    Parts,
)

PLAN_NBYTES: Final = 1 << 20
"""Room for a plan's numbers: about ten for each thread block, of which there are some thousands at most.
FlashInfer takes eight times as much for each wrapper, and refuses a plan that doesn't fit."""


class FixedTables:
    """Page tables of at most `max_rows` rows, `max_blocks` blocks in all, for the layers of one window."""

    __slots__ = ("_copied", "_device", "indices", "indptr", "last_page_len", "numbers")

    def __init__(self, device: torch.device, *, max_rows: int, max_blocks: int) -> None:
        self._device = device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.indptr = torch.zeros(max_rows + 1, **ints)
        self.indices = torch.zeros(max_blocks, **ints)
        self.last_page_len = torch.zeros(max_rows, **ints)
        self.numbers = torch.zeros(PLAN_NBYTES, dtype=torch.uint8, device=device)
        self._copied: Mark | None = None

    def plan(self, wrapper: Any, pages: Pages, **options: Any) -> None:
        """Make `pages` the tables, and the plan of `wrapper`."""
        if self._copied is not None:  # the wrapper's pinned memory is still being read
            self._copied.wait()
        # Given on the host, FlashInfer would copy the indices itself, and wait until the device is done.
        indices = sent_on(pages.indices, self._device)
        wrapper.plan(pages.indptr, indices, pages.last_page_len, **options)
        self._copied = Mark(self._device)


class FixedDecode:
    """Plans for steps of `num_rows` rows of one token, over `tables` by `Segment.window_left`."""

    __slots__ = ("_attention", "_parts", "_tables", "num_rows")

    def __init__(
        self, attention: FlashInferAttention, tables: Mapping[int, FixedTables], num_rows: int
    ) -> None:
        self._attention = attention
        self._tables = tables
        self.num_rows = num_rows
        self._parts = {left: self._part(own) for left, own in tables.items()}

    def _part(self, tables: FixedTables) -> Part:
        num = self.num_rows
        wrapper = self._attention.decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=tables.indptr[: num + 1],
            paged_kv_indices_buffer=tables.indices,
            paged_kv_last_page_len_buffer=tables.last_page_len[:num],
        )
        wrapper.reset_workspace_buffer(self._attention.workspace, tables.numbers)
        return Part(wrapper, slice(0, num))

    def prepare(self, split: AttentionSplit) -> Parts:
        """`split`, of rows of one token that share nothing, in the place of the last one of its window."""
        segments = split.segments
        assert not split.shared
        assert len(segments) == split.num_tokens == self.num_rows
        left = segments[0].window_left
        part = self._parts[left]
        pages = self._attention.pages(segments)
        self._tables[left].plan(part.wrapper, pages, **self._attention.decode_options(left))
        return Parts((part,), None, ())
