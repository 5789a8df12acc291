"""A mocked forward pass that takes time on a clock of its own: benches in virtual time."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.doubles.forward import MockForward
from mallee.protocol.model import ModelSpec
from mallee.worker.forward import Draw, ForwardBatch, Logits


class Timing(NamedTuple):
    """Seconds. A pass costs `base_s` and then by what it does.

    The defaults are about SmolLM2-135M in bfloat16 on two cores: 33, 43 and 54 ms for 1, 8 and 32
    rows over 512 tokens, 2,400 tokens/s of prefill; a plain torch decoder, measured.
    """

    base_s: float = 0.028
    token_s: float = 0.0004  # per token computed
    key_s: float = 0.6e-6  # per key slot read; shared ones once, if the pass can do that
    copy_s: float = 0.3e-6  # per slot copied
    draw_s: float = 0.05e-3  # per token drawn


class VirtualClock:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedForward(MockForward):
    """Draws what the mock draws, and moves `clock` by what that would take."""

    def __init__(
        self,
        spec: ModelSpec,
        clock: VirtualClock,
        timing: Timing,
        *,
        num_blocks: int,
        block_size: int,
        shares_reads: bool,
    ) -> None:
        super().__init__(spec, num_blocks=num_blocks, block_size=block_size)
        self._clock = clock
        self._timing = timing
        self._shares_reads = shares_reads

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        timing = self._timing
        self._clock.now += (
            timing.base_s
            + timing.token_s * sum(len(row.tokens) for row in batch.rows)
            + timing.key_s * self._num_reads(batch)
            + timing.copy_s * sum(copy.num_slots for copy in batch.copies)
        )
        return super().forward(batch)

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        self._clock.now += self._timing.draw_s * len(draws)
        return super().sample(draws)

    def _num_reads(self, batch: ForwardBatch) -> int:
        """Key slots that a pass reads of what was cached before."""
        if not self._shares_reads:
            return sum(row.start for row in batch.rows)
        size = self.block_size
        filled: dict[int, int] = {}
        for row in batch.rows:
            whole, rest = divmod(row.start, size)
            filled |= dict.fromkeys(row.table[:whole].tolist(), size)
            if rest:
                filled[int(row.table[whole])] = rest
        return sum(filled.values())
