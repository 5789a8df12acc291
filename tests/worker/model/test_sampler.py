"""The sampler against literal draws, a numpy oracle of the filters, and chi-square."""

import math

import numpy as np
import pytest
import torch

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw
from mallee.worker.model.sampling.logits import filtered
from mallee.worker.model.sampling.sampler import best, noise, sample, splitmix64

HOT = Sampling(temperature=1.0)
FIRST = [219, 259, 270, 403, 219, 933]
GOLDEN = [514, *FIRST, 47, 79, 219, *FIRST, 219, 219, 514, *FIRST, 47, 79]


def vocabulary(seed: int, size: int = 1000, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))


def test_splitmix64_is_the_published_function() -> None:
    """Source: the reference splitmix64.c, seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    found = [splitmix64((1234567 + i * golden) % 2**64) for i in range(3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_is_what_the_scheme_says_in_plain_integers() -> None:
    ids = torch.tensor([0, 1, 2, 777, 49151, 2**31 - 1], dtype=torch.int32)
    for seed, position in ((0, 0), (7, 1), (2**64 - 1, 8191)):
        key = splitmix64((splitmix64(seed) + position) % 2**64)
        for i, found in zip(ids.tolist(), noise(ids, seed, position).tolist(), strict=True):
            x = i ^ (key & 0xFFFFFFFF)
            x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
            x = ((x ^ (x >> 15)) ^ (key >> 32)) * 0x846CA68B % 2**32
            x ^= x >> 16
            v = ((x & 0x7FFFFFFF) + 0.5) / 2**31
            assert found == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-5)


def test_draws_are_the_golden_ones() -> None:
    """A change here changes every sampled text ever replayed: don't."""
    logits = vocabulary(0)
    sampled = [
        sample([Draw(logits, sampling, seed, position)])[0]
        for sampling in (HOT, Sampling(temperature=0.7, top_k=20), Sampling(1.3, 0, 0.8))
        for seed in (0, 1, 2**64 - 1)
        for position in (0, 1, 500)
    ]
    assert sampled == GOLDEN


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0])
    assert sample([Draw(logits, Sampling(), 3, 3)]) == [1]
    assert sample([Draw(logits.bfloat16(), Sampling(), 3, 3)]) == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_rows_of_one_batch_are_found_together_and_as_alone(dtype: torch.dtype) -> None:
    """Views of one batch in any order, copies, repetitions and strides give what each gives alone."""
    batch = (torch.stack([vocabulary(i, 700) for i in range(9)]) * 4).round().to(dtype)
    rows = list(batch.unbind(0))
    alone = [int(row.argmax()) for row in rows]
    assert best(rows) == alone
    assert best(rows[::-1]) == alone[::-1]
    assert best(rows[1::3]) == alone[1::3]
    assert best([rows[4]] * 5 + [rows[2].clone(), rows[4]]) == [*[alone[4]] * 5, alone[2], alone[4]]
    assert best(list(batch.T.contiguous().unbind(1))) == alone
    assert best([rows[0], rows[5], rows[6]]) == [alone[0], alone[5], alone[6]]
    assert best([]) == []


def test_a_large_batch_is_searched_in_slabs() -> None:
    batch = torch.stack([vocabulary(i, 60_000) for i in range(70)])
    assert best(batch.unbind(0)) == batch.argmax(1).tolist()


def test_branches_of_one_capsule_draw_from_one_field_as_each_would_alone() -> None:
    logits, sampling = vocabulary(8), Sampling(0.9, 40, 0.9)
    draws = [Draw(logits, sampling, seed, 3) for seed in range(40)]
    other = [Draw(logits, Sampling(1.5), seed, 3) for seed in range(40)]
    alone = [sample([draw])[0] for draw in draws + other]
    assert sample(draws + other) == alone


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["seed", "position"])
def test_frequencies_pass_a_chi_square_test(axis: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, 3.0, -3.0])
    n = 4000
    expected = (logits.softmax(0) * n).tolist()
    ids = torch.arange(8, dtype=torch.int32)
    counts = [0] * 8
    for i in range(n):
        seed, position = (i, 11) if axis == "seed" else (11, i)
        counts[int((logits + noise(ids, seed, position)).argmax())] += 1
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


def test_noise_of_neighbouring_ids_and_positions_is_uncorrelated() -> None:
    ids = torch.arange(4096, dtype=torch.int32)
    rows = torch.stack([noise(ids, 5, position) for position in range(64)]).double()
    assert float(rows.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(rows.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    centred = rows - rows.mean()
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs(float((a * b).mean())) / (math.pi**2 / 6) < 0.01


def test_filtered_draws_stay_inside_the_kept_set_and_reach_all_of_it() -> None:
    logits = vocabulary(1, 50)
    sampling = Sampling(temperature=2.0, top_k=6, top_p=0.9)
    kept = set(filtered(logits, torch.arange(50, dtype=torch.int32), sampling).ids.tolist())
    drawn = {sample([Draw(logits, sampling, i, i)])[0] for i in range(600)}
    assert drawn == kept
    assert 1 < len(kept) <= 6


def test_extreme_temperatures_and_masked_logits_are_drawn_soundly() -> None:
    logits = vocabulary(4)
    best = int(logits.argmax())
    assert (
        sample([Draw(logits, Sampling(temperature=1e-4), i, i) for i in range(20)]) == [best] * 20
    )
    masked = torch.full((100,), -torch.inf)
    masked[[3, 60]] = torch.tensor([0.0, 0.0])
    for sampling in (HOT, Sampling(1.0, 2), Sampling(1.0, 0, 0.9), Sampling(100.0)):
        assert {sample([Draw(masked, sampling, i, 0)])[0] for i in range(60)} == {3, 60}
