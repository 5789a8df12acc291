"""The seam between the engine and whatever computes tokens: a GPU, this CPU, or a timing model.

The engine decides which tokens run and where their KV lives; a `Forward` fills the blocks and draws
tokens. Torch-free: logits are opaque here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mallee.protocol.hashing import Tokens
from mallee.protocol.messages import Sampling, TokenLogprobs
from mallee.protocol.model import ModelSpec
from mallee.worker.history import TokenHistory
from mallee.worker.kv.watch import KVMemory
from mallee.worker.structure import Words

Logits: TypeAlias = Any
"""Scores over the vocabulary for one next token; only a `Forward` looks inside."""

BlockTable: TypeAlias = npt.NDArray[np.int32]


class BlockCopy(NamedTuple):
    """Copy the first `num_slots` token slots (all layers, keys and values) of block src to dst."""

    src: int
    dst: int
    num_slots: int


class Row(NamedTuple):
    """One branch's share of a step: `tokens` at positions start, start + 1, ... of its sequence.

    `table` maps block index to block id and covers start + len(tokens) tokens. Slots before `start`
    are filled; the row's own slots are written by this pass, and no two rows write the same slot.
    """

    tokens: Tokens  # [n], n >= 1
    start: int
    table: BlockTable  # [>= ceil((start + n) / block_size)]
    wants_logits: bool  # the logits after the last token


class ForwardBatch(NamedTuple):
    """What one engine step computes. Copies happen before any row is read or written."""

    copies: Sequence[BlockCopy]
    rows: Sequence[Row]


class Draw(NamedTuple):
    """One token to draw: from these logits, for the token at `position`, in stream `seed`.

    The result depends on the fields and on nothing else: not on the row in the batch, not on what else is
    drawn. `sampling.seed` is ignored in favour of `seed`, `sampling.logprobs` in favour of a call of its
    own. `history` is needed for penalties alone. `allowed` (never empty): no other token may be drawn.
    `banned`: none of these (unless nothing is left then).
    """

    logits: Logits
    sampling: Sampling
    seed: int
    position: int
    history: TokenHistory | None = None
    allowed: Words | None = None
    banned: tuple[int, ...] = ()


class Forward(Protocol):
    """Owns the KV memory of `num_blocks` blocks and computes over it. Called from one thread."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def memory(self) -> KVMemory:
        """The bytes of the blocks, for checks."""
        ...

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        """Fill the rows' KV; one Logits per row that wants them, in row order.

        The result is valid until the next call; `keep` what must live longer.
        """
        ...

    def keep(self, logits: Logits) -> Logits:
        """A copy of one row's logits that survives later calls and pins no batch memory."""
        ...

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        """One token id per draw."""
        ...

    def logprobs(self, logits: Logits, token: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of `token` and of the `num_top` likeliest, of the model's own distribution.

        That is before penalties, masks, temperature and filters. Equals by rising id.
        """
        ...
