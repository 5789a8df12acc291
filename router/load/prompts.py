"""Earlier prompts, as far as prices of memory need them: what continues a text, and what many begin with.

A text that begins brings more blocks later, with its next turns. On its worker, room for those is spoken for
long before they are there. And a beginning that many texts share is worth a copy on another worker, since
others will use that copy. Both are seen from the prompts alone, by a block every `STEP_TOKENS` of each, in a
table of fixed size. An entry that another one takes over makes a text look new, nothing else.
"""

from typing import Final, cast

import numpy as np
from msgspec import Struct

from mallee.router.load import layout

STEP_TOKENS: Final = 256
GROWTH: Final = 5.0
"""Blocks that a new text is expected to bring later, for each that it begins with.

Agents' sessions have dozens of turns. A higher figure spreads texts over free memory before there is need,
which costs copies of what they share; a lower one fills one worker until it evicts texts that go on. On the
scenes of docs/benchmarks.md 3 loses 7 % of the hits in the worst of them, and a figure that is learned from
the prompts changes none: those that would teach it come too late.
"""


class Seen(Struct, frozen=True, gc=False):
    """A prompt beside those before it, in leading full blocks."""

    shared: int  # that earlier prompts had, up to the last one after which prompts parted
    uses: int  # prompts that had the shared ones
    continues: bool  # it goes on where those that had its last known block ended


class EarlierPrompts:
    """A table of blocks of earlier prompts; 1.6 MB. A match of a prompt takes it in."""

    def __init__(self, block_size: int) -> None:
        self._step = max(1, STEP_TOKENS // block_size)  # blocks
        table = np.zeros((2 + layout.NUM_PROMPT_BLOCKS, layout.PROMPT_WORDS), np.int64)
        table[1, 0] = self._step
        self.address = table.ctypes.data
        self._uses = table[2:, 2]
        self._found = cast("memoryview[int]", table[0].data)
        self._num_noted = 0

    def seen(self, num_blocks: int) -> Seen:
        """The prompt matched last, which has so many full blocks, beside those before it."""
        shared, uses, continues = self._found
        self._num_noted += num_blocks // self._step
        if self._num_noted > layout.NUM_PROMPT_BLOCKS:  # what was popular once counts less and less
            self._num_noted = 0
            self._uses //= 2
        return Seen(shared, uses, bool(continues))
