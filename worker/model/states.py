"""The states of recurrent layers in memory, and how a step's rows read and write them.

A slot holds the states of all layers side by side: first each layer's matrices, in float32, then the inputs
that its convolution has yet to see, in the model's dtype. So a slot is one run of bytes for whoever moves it.
Doesn't know the rule by which tokens are folded (`delta.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from mallee.worker.forward import Row
from mallee.worker.kv.sides.states import NO_STATE
from mallee.worker.memory.transfer import sent_together
from mallee.worker.model.config import DeltaShape

FOLD: Final = 64
"""Tokens of a row that are folded into its state at once. States after a multiple of so many tokens don't
depend on how the text before was cut into steps, to the last bit, if it was cut at such multiples only."""

EXTRA_SLOTS: Final = 2
"""Behind those that are handed out: one for rows of padding, and one that stays zero, the state before all
tokens."""


class LayerStates(NamedTuple):
    """The states of one layer by slot, as views."""

    matrices: torch.Tensor  # [slots, num_value_heads, value_dim, key_dim], float32
    inputs: torch.Tensor  # [slots, conv_width - 1, conv_inputs]: the last token's last


def layer_states(
    memory: torch.Tensor, shape: DeltaShape, dtype: torch.dtype, num_layers: int
) -> list[LayerStates]:
    """The states in `memory` [slots, bytes] of each layer."""
    slots, sizes = len(memory), (shape.matrix_nbytes, shape.conv_nbytes(dtype.itemsize))
    found = []
    for i in range(num_layers):
        begins = (i * sizes[0], num_layers * sizes[0] + i * sizes[1])
        matrices, inputs = (
            memory[:, begin : begin + size] for begin, size in zip(begins, sizes, strict=True)
        )
        heads = (shape.num_value_heads, shape.value_dim, shape.key_dim)
        found.append(
            LayerStates(
                matrices=matrices.view(torch.float32).view(slots, *heads),
                inputs=inputs.view(dtype).view(slots, shape.conv_width - 1, shape.conv_inputs),
            )
        )
    return found


class Turns(NamedTuple):
    """Rows of several tokens, cut into turns of `width`, in each of which the first rows take part.

    Where a turn is not full, it has tokens of number n, those of the step.
    """

    rows: torch.Tensor  # the longest first
    tokens: torch.Tensor  # [sum of `counts`, width]
    counts: tuple[int, ...]  # rows in each turn


class Folds(NamedTuple):
    """The states of a step's rows before and after it, and the cut of its tokens, by place in the batch.

    For the convolution rows lie behind one another, each behind the inputs that its state keeps. Rows of one
    token are folded together, and so are longer ones, apart from those that fill a turn of `FOLD`: each
    takes as much as the widest beside it.
    """

    read: torch.Tensor  # [rows] slots
    written: torch.Tensor  # [rows]
    before: torch.Tensor  # [rows * (conv_width - 1)] places of kept inputs in the line of all
    inputs: torch.Tensor  # [n] places of tokens in it
    after: torch.Tensor  # [rows * (conv_width - 1)] places of what is kept next
    length: int  # of the line
    single_rows: torch.Tensor  # [singles]
    singles: torch.Tensor  # [singles] their tokens
    long: tuple[Turns, ...]
    verified: torch.Tensor  # tokens of rows of which several logits are wanted (`Forward.refold`)
    begins: Mapping[int, int]  # of these rows' tokens among them, by slot written

    def first(self, num_rows: int) -> "Folds":
        """Those of the first rows, of rows of one token each."""
        width = len(self.before) // len(self.read) + 1
        return self._replace(
            read=self.read[:num_rows],
            written=self.written[:num_rows],
            before=self.before[: num_rows * (width - 1)],
            inputs=self.inputs[:num_rows],
            after=self.after[: num_rows * (width - 1)],
            length=num_rows * width,
        )

    @property
    def is_single(self) -> bool:
        """Whether each row has one token."""
        return not self.long


def make_folds(
    rows: Sequence[Row], group: int, *, num_slots: int, conv_width: int, device: torch.device
) -> Folds:
    """The folds of `rows`, whose states are those of side `group`, of which `num_slots` are handed out."""
    kept = conv_width - 1
    slots = np.array([row.sides[group] for row in rows], dtype=np.int64).reshape(len(rows), 2)
    slots[slots[:, 0] == NO_STATE, 0] = num_slots + EXTRA_SLOTS - 1
    sizes = np.array([len(row.tokens) for row in rows])
    ends = sizes.cumsum()
    begins = ends - sizes
    firsts = begins + np.arange(len(rows)) * kept  # of each row in the line
    steps = np.arange(kept)
    is_long, fills = sizes > 1, sizes >= FOLD
    long = [_turns(begins, sizes, own) for own in (fills, is_long & ~fills) if own.any()]
    verifies = np.array([row.num_logits > 1 for row in rows])
    own = sizes[verifies]
    begins_of_own = zip(slots[verifies, 1].tolist(), (own.cumsum() - own).tolist(), strict=True)
    parts = [
        slots[:, 0],
        slots[:, 1],
        (firsts[:, None] + steps).ravel(),
        np.arange(ends[-1]) + np.repeat((np.arange(len(rows)) + 1) * kept, sizes),
        (firsts[:, None] + sizes[:, None] + steps).ravel(),
        np.flatnonzero(~is_long),
        begins[~is_long],
        np.flatnonzero(np.repeat(verifies, sizes)),
        *(part.ravel() for rows_of, tokens, _ in long for part in (rows_of, tokens)),
    ]
    there = sent_together([part.astype(np.int64) for part in parts], device)
    return Folds(
        read=there[0],
        written=there[1],
        before=there[2],
        inputs=there[3],
        after=there[4],
        length=int(ends[-1]) + len(rows) * kept,
        single_rows=there[5],
        singles=there[6],
        long=tuple(
            Turns(there[8 + 2 * i], there[9 + 2 * i].view(tokens.shape), counts)
            for i, (_, tokens, counts) in enumerate(long)
        ),
        verified=there[7],
        begins=dict(begins_of_own),
    )


def _turns(
    begins: np.ndarray, sizes: np.ndarray, takes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The rows that it `takes`, and the tokens and counts of their turns."""
    rows = np.flatnonzero(takes)
    rows = rows[np.argsort(-sizes[rows], kind="stable")]
    begins, sizes, none = begins[rows], sizes[rows], int(sizes.sum())
    width = min(FOLD, 1 << (int(sizes[0]) - 1).bit_length())
    found, counts = [], []
    for done in range(0, int(sizes[0]), width):
        num = int((sizes > done).sum())
        places = done + np.arange(width)
        tokens = begins[:num, None] + places
        found.append(np.where(places < sizes[:num, None], tokens, none))
        counts.append(num)
    return rows, np.concatenate(found), tuple(counts)
