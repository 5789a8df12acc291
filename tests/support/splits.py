"""The splits that an attention backend was given, and the blocks that are read for one."""

from typing import Any

from mallee.worker.model.attention.base import AttentionSplit
from mallee.worker.model.runner import TorchForward


class WatchedAttention:
    """`inner`, an attention backend; `splits` are those that it prepared."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.splits: list[AttentionSplit] = []

    def prepare(self, split: AttentionSplit) -> Any:
        self.splits.append(split)
        return self.inner.prepare(split)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def watch_splits(forward: TorchForward) -> list[AttentionSplit]:
    """Those of the eager steps of `forward` from now on."""
    watched = forward._attention = WatchedAttention(forward._attention)
    return watched.splits


def block_reads(split: AttentionSplit) -> int:
    """Blocks that a layer reads: each prefix's once, and those of the segments."""
    return sum(len(part.blocks) for part in (*split.shared, *split.segments))
