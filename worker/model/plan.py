"""The plan of one step as tensors: made once, used by every layer. Doesn't know layers or dtypes."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs

from mallee.worker.forward import Row
from mallee.worker.memory.transfer import Int64s, sent_together
from mallee.worker.model.attention.base import MIN_SHARED_SAVING, AttentionSplit, Reads, split_batch
from mallee.worker.model.states import Folds


class Plan(NamedTuple):
    """One step."""

    tokens: torch.Tensor  # [n] ids
    positions: torch.Tensor  # [n]
    slots: torch.Tensor  # [n] block * block_size + offset, where each token's KV goes
    window_slots: Mapping[int | None, torch.Tensor]  # the same, of windows with blocks of their own
    reads: Mapping[int | None, Reads]  # by window; None: layers that see everything
    outputs: torch.Tensor  # [k] flat tokens whose logits are wanted
    folds: Folds | None = None  # of recurrent layers


def make_plan(
    rows: Sequence[Row],
    *,
    block_size: int,
    device: str,
    prepare: Callable[[AttentionSplit], Reads],
    windows: Sequence[int | None] = (None,),
    groups: Sequence[int | None] = (),
    fold: Callable[[Sequence[Row]], Folds] | None = None,
    min_saving: int = MIN_SHARED_SAVING,
    keeps_windows: bool = False,
) -> Plan:
    """The plan for `rows`; with keeps_windows True a window that no row has outgrown has reads of its own
    all the same.

    `windows` are those that the model's layers have, `groups` those of them that have blocks of their
    own, the first of `Row.sides`, in their order; `fold` plans the states of recurrent layers; `prepare` and
    `min_saving` are the attention backend's. Nothing waits for the device.
    """
    counts = np.array([len(row.tokens) for row in rows])
    starts = np.array([row.start for row in rows])
    ends = counts.cumsum()
    positions = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    places, rests = np.divmod(positions, block_size)
    bounds = [0, *ends.tolist()]

    def slots_of(rows: Sequence[Row]) -> Int64s:
        blocks = [
            row.table[places[b:e]] for row, b, e in zip(rows, bounds, bounds[1:], strict=False)
        ]
        slots: Int64s = np.concatenate(blocks).astype(np.int64) * block_size + rests
        return slots

    own_rows = {
        window: [structs.replace(row, table=row.sides[g]) if row.sides else row for row in rows]
        for g, window in enumerate(groups)
    }
    length = int((starts + counts).max())
    reads: dict[int | None, Reads] = {}
    for window in windows:
        binding = window if window is not None and (keeps_windows or window < length) else None
        own = own_rows.get(window)
        if own is None and binding in reads:  # a window that no row has outgrown hides nothing
            reads[window] = reads[binding]
            continue
        split = split_batch(
            rows if own is None else own,
            block_size=block_size,
            window=binding,
            min_saving=min_saving,
        )
        reads[window] = prepare(split)
        if own is None:
            reads[binding] = reads[window]
    wanted = [
        i
        for row, end in zip(rows, bounds[1:], strict=True)
        for i in range(end - row.num_logits, end)
    ]
    ids = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    parts = [ids, positions, np.array(wanted, dtype=np.int64), slots_of(rows)]
    parts += [slots_of(own) for own in own_rows.values()]
    tokens, positions_there, outputs, slots, *own_slots = sent_together(parts, torch.device(device))
    return Plan(
        tokens=tokens,
        positions=positions_there,
        slots=slots,
        window_slots=dict(zip(own_rows, own_slots, strict=True)),
        reads=reads,
        outputs=outputs,
        folds=None if fold is None else fold(rows),
    )
