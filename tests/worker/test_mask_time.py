"""A step lasts as long as the longer of its forward pass and its masks, which are computed beside it."""

import json
from threading import Barrier

import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.messages import Generate, Grammar, Limits, pack_tokens
from mallee.testing.forward import MockForward
from mallee.testing.structures import MockStructures
from mallee.worker.forward import Draw, ForwardBatch, Logits
from mallee.worker.records import EngineConfig
from support.driving import engine_over

EOS = 63
PATHS = [[10, 11, 12, 13], [10, 11, 20, 21], [40, 41, 42, 43]]
FORWARD_MS = 5


class TimedForward(MockForward):
    """Counts virtual milliseconds of the engine's thread, which waits for the masks before it draws.

    The pass and the filling of its masks wait for each other in their middle: one that is only begun
    after the other's end breaks the barrier.
    """

    def __init__(self, masks_ms: int, *, overlap: bool) -> None:
        super().__init__(mock_spec(eos_token_ids=(EOS,)), num_blocks=64, block_size=4)
        self.masks_ms = masks_ms
        self.middle = Barrier(2) if overlap else None
        self.now_ms = 0
        self.masks_at_ms = 0

    def fill_masks(self, _: int) -> None:
        self.masks_at_ms = self.now_ms + self.masks_ms
        if self.middle is None:
            self.now_ms = self.masks_at_ms
        else:
            self.middle.wait(10)

    def forward(self, batch: ForwardBatch) -> list[Logits]:
        if self.middle is not None:
            self.middle.wait(10)
        self.now_ms += FORWARD_MS
        return list(super().forward(batch))

    def sample(self, draws: list[Draw]) -> list[int]:  # type: ignore[override]
        self.now_ms = max(self.now_ms, self.masks_at_ms)
        return super().sample(draws)


def steps_and_tokens(masks_ms: int, *, overlap: bool) -> tuple[set[int], list[int]]:
    """The durations of the steps of one constrained answer, and its tokens."""
    forward = TimedForward(masks_ms, overlap=overlap)
    engine = engine_over(
        forward,
        config=EngineConfig(overlap=overlap),
        clock=lambda: forward.now_ms / 1000,
        structures=MockStructures(64, (EOS,), forward.fill_masks),
    )
    grammar = Grammar("choice", json.dumps(PATHS))
    engine.submit(Generate("r", pack_tokens(range(1, 12)), Limits(20), grammar=grammar), "g")
    durations, tokens = set(), []
    while engine.has_work:
        began_ms = forward.now_ms
        for frame in engine.step().frames.values():
            tokens += [token for update in frame.updates for token in update.tokens]
        durations.add(forward.now_ms - began_ms)
    engine.close()
    return durations, tokens


@pytest.mark.parametrize("masks_ms", [2, 7])
def test_a_step_takes_the_longer_of_pass_and_masks_not_their_sum(masks_ms: int) -> None:
    """D11: also for masks longer than the pass. The tokens are those of one after the other."""
    together, tokens = steps_and_tokens(masks_ms, overlap=True)
    one_by_one, same = steps_and_tokens(masks_ms, overlap=False)
    assert together == {max(FORWARD_MS, masks_ms)}
    assert one_by_one == {FORWARD_MS + masks_ms}
    assert tokens == same
    assert tokens in PATHS
