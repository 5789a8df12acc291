"""Sampled tokens have the model's distribution, whatever is drafted."""

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from scipy import stats

from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, pack_tokens
from mallee.testing.forward import MockForward
from mallee.worker.engine import Engine
from mallee.worker.forward import Draw, ForwardBatch
from mallee.worker.model.sampling.sampler import sample
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.speculation.speculator import SpeculationConfig
from support.speculating import Kind, Knowing, Teller, draft_by, draft_model

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])


class FixedForward(MockForward):
    """The same logits everywhere, drawn from by the real sampler."""

    def forward(self, batch: ForwardBatch) -> list[Any]:
        return [LOGITS.clone() for _ in super().forward(batch)]

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        return sample(draws)


class TiltedForward(FixedForward):
    """A draft model: other logits, the same draws."""

    def forward(self, batch: ForwardBatch) -> list[Any]:
        tilt = torch.linspace(0.0, 0.8, 8)
        return [each + tilt for each in super().forward(batch)]


def draw(kind: Kind | Literal["model"] | None) -> Teller:
    engine = Engine(
        FixedForward(mock_spec(vocab_size=8), num_blocks=4000, block_size=4),
        config=EngineConfig(
            SchedulerConfig(2048, 256),
            max_answer_capsules=0,
            speculation=SpeculationConfig("off" if kind is None else "auto"),
        ),
        clock=lambda: 0.0,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    if kind == "model":
        forward = TiltedForward(mock_spec(vocab_size=8), num_blocks=4000, block_size=4)
        draft_by(engine, draft_model(forward))
    elif kind is not None:
        answers = {("r", i): [i % 8, 0, 6, 0, 1] * 8 for i in range(128)}
        draft_by(engine, Knowing(kind, answers, vocab=8))
    teller = Teller(engine)
    limits = Limits(40, ignore_eos=True)
    teller.run(Generate("r", pack_tokens([1]), limits, Sampling(0.7, seed=11), 128))
    return teller


@pytest.mark.parametrize("kind", ["right", "random", "model"])
def test_drawn_tokens_have_the_models_distribution(kind: Kind | Literal["model"]) -> None:
    """I15, part: chi-square of 5,120 draws, of those that were drafted right or wrong and of all others."""
    teller = draw(kind)
    found = teller.engine.stats().speculation
    assert 300 < found.num_accepted < 0.9 * found.num_drafted
    tokens = torch.tensor([t for told in teller.told().values() for t in told.tokens])
    counts = torch.bincount(tokens, minlength=8).double().numpy()
    expected = torch.softmax(LOGITS.double() / 0.7, 0).numpy() * len(tokens)
    assert len(tokens) == 128 * 40
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 0.01
    assert teller.answers() == draw(None).answers()
