"""What one step does, as values."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mallee.protocol.errors import PoolExhausted
from mallee.worker.kv.node import SlotCopy
from mallee.worker.kv.text import Text
from mallee.worker.sched.sequence import Sequence


class Chunk(NamedTuple):
    """Compute `tokens` of `sequence` from `start` on. `is_last`: nothing is pending after it."""

    sequence: Sequence
    tokens: Text
    start: int
    is_last: bool


@dataclass(slots=True)
class Plan:
    """What to do in one step.

    `decodes` compute the one token that they drew last; `chunks` are pieces of prompts; `ready` draw
    without a pass; `failed` can't go on. `copies` come before everything.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ready: list[Sequence] = field(default_factory=list)
    copies: list[SlotCopy] = field(default_factory=list)
    failed: list[tuple[Sequence, PoolExhausted]] = field(default_factory=list)
