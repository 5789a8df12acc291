"""Earlier prompts, as far as prices of memory need them: what continues a text, and what many begin with.

A text that begins brings more blocks later, with its next turns. On its worker, room for those is spoken for
long before they are there. And a beginning that many texts share is worth a copy on another worker, since
others will use that copy. Both are seen from the prompts alone, by a block every `STEP_TOKENS` of each, in a
table of fixed size. An entry that another one takes over makes a text look new, nothing else.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import NO_HASHES, Hashes
from mallee.router.load.kernels import note_blocks

STEP_TOKENS: Final = 256
GROWTH: Final = 5.0
"""Blocks that a new text is expected to bring later, for each that it begins with.

Agents' sessions have dozens of turns. A higher figure spreads texts over free memory before there is need,
which costs copies of what they share; a lower one fills one worker until it evicts texts that go on. On the
scenes of docs/benchmarks.md 3 loses 7 % of the hits in the worst of them, and a figure that is learned from
the prompts changes none: those that would teach it come too late.
"""
_SIZE: Final = 1 << 16


class Seen(NamedTuple):
    """A prompt beside those before it, in leading full blocks."""

    shared: int  # that earlier prompts had, up to the last one after which prompts parted
    uses: int  # prompts that had the shared ones
    continues: bool  # it goes on where those that had its last known block ended


class EarlierPrompts:
    """A table of blocks of earlier prompts; about 1.3 MB."""

    def __init__(self, block_size: int) -> None:
        self._step = max(1, STEP_TOKENS // block_size)
        self._keys: Hashes = np.zeros(_SIZE, np.uint64)
        # Of each: the block looked at after it (0: none yet), and the prompts that had it, negative once they
        # parted behind it.
        self._next: Hashes = np.zeros(_SIZE, np.uint64)
        self._uses: npt.NDArray[np.int32] = np.zeros(_SIZE, np.int32)
        self._found: npt.NDArray[np.int64] = np.zeros(len(Seen._fields), np.int64)
        self._num_noted = 0
        for hashes in (NO_HASHES, np.frombuffer(b"", dtype=np.uint64)):
            self.note(hashes)  # compiles, as no request should have to

    def note(self, hashes: Hashes) -> Seen:
        """Take in a prompt's full blocks; returns what is seen of them by those before."""
        note_blocks(self._keys, self._next, self._uses, hashes, self._step, self._found)
        shared, uses, continues = self._found.tolist()
        self._num_noted += len(hashes) // self._step
        if self._num_noted > _SIZE:  # what was popular once counts less and less
            self._num_noted = 0
            self._uses //= 2
        return Seen(shared, uses, bool(continues))
