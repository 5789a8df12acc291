"""The short way through a Gumbel race: the same winner as the long one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw
from mallee.worker.model.kernels.race import race
from mallee.worker.model.sampling.sampler import contenders, noise, race_key, sample
from support.examples import examples

VOCAB = 5000


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    race.compile()


@examples(60)
@given(
    seed=st.integers(0, (1 << 64) - 1),
    position=st.integers(0, 1 << 20),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 1e4]),
    hidden=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_the_winner_is_always_among_the_contenders(
    seed: int, position: int, spread: float, hidden: float
) -> None:
    """I5: from flat to certain, with and without tokens that are out."""
    rng = np.random.default_rng(seed % (1 << 32))
    scores = torch.from_numpy(rng.normal(0, spread, VOCAB).astype(np.float32))
    scores[torch.from_numpy(rng.random(VOCAB) < hidden)] = -torch.inf
    scores[int(rng.integers(VOCAB))] = 0.0
    ids = torch.arange(VOCAB, dtype=torch.int32)
    exact = int((scores + noise(ids, seed, position)).argmax())
    places = contenders(scores, ids, race_key(seed, position))
    assert exact in places.tolist()
    assert places.tolist() == sorted(set(places.tolist()))
    draw = Draw(scores, Sampling(temperature=1.0), seed, position)
    assert sample([draw]) == [exact]


def test_few_tokens_are_left_of_a_language_models_scores() -> None:
    """The race is short: of 50,000 tokens at most a few hundred, at any draw."""
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(rng.normal(0, 3, 50_000).astype(np.float32))
    ids = torch.arange(50_000, dtype=torch.int32)
    left = [len(contenders(scores, ids, race_key(7, at))) for at in range(100)]
    assert min(left) >= 1
    assert max(left) < 500


def test_every_id_has_a_bound_that_holds() -> None:
    """The bound of the largest and the smallest hashes, where logarithms bend."""
    ids = torch.arange(1 << 20, dtype=torch.int32)
    for seed, position in ((0, 0), (3, 4), ((1 << 64) - 1, 9)):
        key = race_key(seed, position)
        exact = noise(ids, seed, position)
        # Scores that make every token's exact result equal: each must be left standing.
        scores = 10.0 - exact
        assert len(contenders(scores, ids, key)) == len(ids)
