"""The KV memory of a torch model as bytes, for `worker.kv.watch`. Doesn't know what a slot holds.

Slow: every call waits for the device and copies what it looks at.
"""

from collections.abc import Sequence

import torch
import xxhash

PATTERN = 0xA5
"""As bfloat16, float32 or float8 a small negative number: unfilled slots are read, with weight 0."""


class TorchKV:
    """Bytes of `memory` [num_layers, num_blocks * block_size, ...] by block."""

    __slots__ = ("_block_size", "_memory")

    def __init__(self, memory: torch.Tensor, block_size: int) -> None:
        self._memory = memory
        self._block_size = block_size

    def fill(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._bytes(block, self._block_size).fill_(PATTERN)

    def is_filled(self, block: int) -> bool:
        return bool((self._bytes(block, self._block_size) == PATTERN).all())

    def digest(self, block: int, num_slots: int) -> int:
        raw = self._bytes(block, num_slots).contiguous().cpu().numpy().tobytes()
        return xxhash.xxh3_64_intdigest(raw)

    def _bytes(self, block: int, num_slots: int) -> torch.Tensor:
        """[num_layers, num_slots, ...] uint8, a view."""
        begin = block * self._block_size
        return self._memory[:, begin : begin + num_slots].view(torch.uint8)
