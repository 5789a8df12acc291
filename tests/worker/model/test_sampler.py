"""The sampler against literal draws, plain references, transformers' filters and chi-square."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mallee.protocol.ids import splitmix64
from mallee.protocol.messages import Sampling, TokenLogprobs
from mallee.worker.forward import (
    Draw,
    LogprobQuery,
    TokenHistory,
    Words,
    distinct,
    num_words,
)
from mallee.worker.model.cpu.race import contenders, race
from mallee.worker.model.sampling import rows
from mallee.worker.model.sampling.logits import edited, filtered
from mallee.worker.model.sampling.logprobs import logprobs
from mallee.worker.model.sampling.sampler import (
    best,
    noise,
    race_key,
    sample,
)
from support.examples import examples
from support.golden_draws import GOLDEN, golden_draws, vocabulary

VOCAB = 97


def history_of(prompt: Sequence[int], answer: Sequence[int]) -> TokenHistory:
    history = TokenHistory(distinct(prompt))
    for token in answer:
        history.add(token)
    return history


def words(ids: Sequence[int], size: int = VOCAB) -> Words:
    bits = np.zeros(num_words(size) * 32, dtype=bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def reference(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """vLLM's order of bias and penalties, one token at a time."""
    scores = logits.float().tolist()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *answer}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(answer):
        scores[token] -= sampling.frequency_penalty * list(answer).count(token)
        scores[token] -= sampling.presence_penalty
    return scores


# Noise


def test_noise_is_what_the_scheme_says_in_plain_integers() -> None:
    ids = torch.tensor([0, 1, 2, 777, 49151, 2**31 - 1], dtype=torch.int32)
    for seed, position in ((0, 0), (7, 1), (2**64 - 1, 8191)):
        key = splitmix64(splitmix64(seed, 1) + position, 1)
        for i, found in zip(ids.tolist(), noise(ids, seed, position).tolist(), strict=True):
            x = i ^ (key & 0xFFFFFFFF)
            x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
            x = ((x ^ (x >> 15)) ^ (key >> 32)) * 0x846CA68B % 2**32
            x ^= x >> 16
            v = ((x & 0x7FFFFFFF) + 0.5) / 2**31
            assert found == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-5)


def test_draws_are_the_golden_ones() -> None:
    """A change here changes every sampled text ever replayed: don't."""
    assert [sample([draw])[0] for draw in golden_draws()] == GOLDEN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_rows_of_one_batch_are_found_together_and_as_alone(dtype: torch.dtype) -> None:
    """Views of one batch in any order, copies, repetitions and strides give what each gives alone.

    Of equal maxima that is the lowest.
    """
    assert sample([Draw(torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0]).to(dtype), Sampling(), 3, 3)]) == [
        1
    ]
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
    large = torch.stack([vocabulary(i, 60_000) for i in range(70)])  # searched in slabs
    assert best(large.unbind(0)) == large.argmax(1).tolist()


# The race: a short way to the winner


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
    size = 5000
    rng = np.random.default_rng(seed % (1 << 32))
    scores = torch.from_numpy(rng.normal(0, spread, size).astype(np.float32))
    scores[torch.from_numpy(rng.random(size) < hidden)] = -torch.inf
    scores[int(rng.integers(size))] = 0.0
    ids = torch.arange(size, dtype=torch.int32)
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


# Options


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(examples(80), derandomize=True)
@given(
    seed=st.integers(0, 1000),
    prompt=tokens,
    answer=tokens,
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6, -1.5]),
    frequency=st.sampled_from([0.0, 0.25, -2.0]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5, 100.0])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_bias_and_penalties_are_what_a_token_by_token_reference_says(
    seed: int,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    dtype: torch.dtype,
) -> None:
    """I5: and the caller's logits stay as they were."""
    logits = vocabulary(seed).to(dtype)
    before = logits.clone()
    sampling = Sampling(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    draw = Draw(logits, sampling, 0, 0, history_of(prompt, answer))
    field = edited(draw)
    wanted = reference(logits, sampling, prompt, answer)
    assert field.scores.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert field.ids.tolist() == list(range(VOCAB))
    assert torch.equal(logits, before)
    assert sample([draw]) == [int(field.scores.argmax())]


@settings(examples(100), derandomize=True)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([7, VOCAB, 3000]),
    has_equals=st.booleans(),
    temperature=st.sampled_from([0.4, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 7, 400]),
    top_p=st.sampled_from([0.05, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_transformers_warpers_keep(
    seed: int,
    size: int,
    has_equals: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    """I5: temperature, top-k, top-p, min-p in their order, against their code."""
    logits = vocabulary(seed, size)
    if has_equals and top_p == 1.0:  # among equals rounding decides what touches top_p
        logits = (4 * logits).round() / 4
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0]
    ids = torch.arange(size, dtype=torch.int32)
    ours = filtered(logits, ids, Sampling(temperature, top_k, top_p, min_p=min_p))
    kept = torch.isfinite(theirs).nonzero().squeeze(1)
    assert ours.ids.tolist() == kept.tolist()
    assert torch.allclose(ours.scores, theirs[kept])


def test_only_allowed_tokens_are_drawn_and_all_of_them() -> None:
    """D9: zero masked tokens ever, whatever bias or penalty says; with one left, that one."""
    allowed = [0, 5, 31, 32, 64, 96]
    logits = torch.zeros(VOCAB)
    logits[50] = 50.0
    for more in ({}, {"logit_bias": ((50, 100.0),)}, {"top_k": 3}, {"min_p": 0.1, "top_p": 0.9}):
        for history in (None, history_of([50], [5])):
            hot = Sampling(temperature=1.0, **more)  # type: ignore[arg-type]
            draws = [Draw(logits, hot, i, 0, history, words(allowed)) for i in range(300)]
            found = set(sample(draws))
            assert found <= set(allowed)
            assert "top_k" in more or "top_p" in more or found == set(allowed)
            for token in allowed:
                one = [structs.replace(d, allowed=words([token])) for d in draws[:3]]
                assert sample(one) == [token] * 3
    greedy = Draw(logits, Sampling(), 0, 0, None, words(allowed))
    assert sample([greedy]) == [0]


def test_banned_tokens_are_not_drawn_unless_nothing_else_is_allowed() -> None:
    """I5: min_tokens bans ends of text; a grammar that allows nothing else wins."""
    logits = torch.zeros(VOCAB)
    logits[3] = 9.0
    assert sample([Draw(logits, Sampling(), 0, 0, banned=(3,))]) == [0]
    assert sample([Draw(logits, Sampling(), 0, 0, None, words([3, 8]), (3,))]) == [8]
    assert sample([Draw(logits, Sampling(), 0, 0, None, words([3]), (3,))]) == [3]
    many, last = list(range(1, 3000)), torch.zeros(3001)
    for temperature in (0.0, 1.0):
        draw = Draw(last, Sampling(temperature), 0, 0, None, words(many, 3001), tuple(many))
        assert sample([draw])[0] in many


@pytest.mark.parametrize("size", [97, 4099])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_mask_draws_what_is_drawn_without_the_tokens_that_it_takes_away(
    size: int, temperature: float
) -> None:
    """I16, part: equals, infinities and bfloat16 among them, whatever share of the tokens is allowed."""
    rng = np.random.default_rng(size)
    draws, without = [], []
    for i in range(60):
        logits = (vocabulary(i, size) * 2).round() if i % 3 else vocabulary(i, size)
        logits[rng.integers(size, size=5)] = -torch.inf
        is_allowed = rng.random(size) < rng.choice([0.01, 0.5, 0.99])
        is_allowed[rng.integers(size)] = True
        allowed = words(np.flatnonzero(is_allowed).tolist(), size)
        row = logits.bfloat16() if i % 2 else logits
        draws.append(Draw(row, Sampling(temperature), i, 3, None, allowed))
        bare = row.float().masked_fill(torch.from_numpy(~is_allowed), -torch.inf)
        without.append(Draw(bare, Sampling(temperature), i, 3))
    assert sample(draws) == sample(without)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["seed", "position"])
def test_frequencies_under_options_pass_a_chi_square_test(axis: str) -> None:
    """I5: what is drawn follows the transformed distribution."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.5, 3.0, -3.0])
    sampling = Sampling(
        temperature=1.3,
        min_p=0.05,
        repetition_penalty=1.5,
        presence_penalty=0.3,
        logit_bias=((0, 0.7),),
    )
    history, allowed = history_of([6], [2, 2]), words([0, 1, 2, 3, 5, 6, 7], 8)
    scores = torch.tensor(reference(logits, sampling, [6], [2, 2])) / 1.3
    scores[4] = -math.inf
    expected = scores.softmax(0)
    expected[expected < 0.05 * expected.max()] = 0.0
    expected = expected / expected.sum()
    n = 4000
    places = [(i, 11) if axis == "seed" else (11, i) for i in range(n)]
    draws = [Draw(logits, sampling, *place, history, allowed) for place in places]
    counts = np.bincount(sample(draws), minlength=8)
    wanted = expected.numpy() * n
    assert all(counts[wanted == 0] == 0)
    live = wanted > 0
    assert live.sum() == 6
    assert float(((counts - wanted)[live] ** 2 / wanted[live]).sum()) < 20.5  # 5 degrees, p = 0.001


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-20])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_the_coldest_draw_is_the_greedy_one(temperature: float, filters: dict[str, float]) -> None:
    """Also with bans, a mask, and penalties that would leave float32's range."""
    logits = vocabulary(7)
    cold = Sampling(temperature=temperature, repetition_penalty=1e-300, **filters)  # type: ignore[arg-type]
    plain = Draw(logits, cold, 1, 5)
    edited = structs.replace(plain, history=history_of([3, 8], [8, 11]), banned=(2,))
    only = structs.replace(plain, allowed=words([41]))
    for draw in (plain, edited, only):
        greedy = structs.replace(draw, sampling=Sampling(repetition_penalty=1e-300))
        assert sample([draw]) == sample([greedy])
    assert sample([only]) == [41]


# Log-probabilities


def sorted_logprobs(query: LogprobQuery) -> TokenLogprobs:
    """Of one row: the likeliest first, equals by rising id."""
    values = query.logits.float().log_softmax(0).tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: query.num_top]
    return values[query.token], tuple((i, values[i]) for i in order)


@examples(100)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([5, 97, 3000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    num_levels=st.sampled_from([1, 3, 40, 10_000]),
    asked=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from([0, 1, 5, 20])),
        min_size=1,
        max_size=12,
    ),
    slab=st.sampled_from([1, 7000, 1 << 22]),
)
def test_a_batch_says_what_a_sort_of_each_row_says(
    seed: int,
    size: int,
    dtype: torch.dtype,
    num_levels: int,
    asked: list[tuple[int, int, int]],
    slab: int,
) -> None:
    """I5: mixed counts, rows asked for several times, equals everywhere, in slabs."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(7, size, generator=generator).clamp(-3, 3)
    batch = ((noise * num_levels).round() * (4 / num_levels)).to(dtype).unbind(0)
    queries = [LogprobQuery(batch[row], token, num_top) for row, token, num_top in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SLAB", slab)
        assert logprobs(queries) == [sorted_logprobs(query) for query in queries]


def test_no_numbers_have_no_likeliest() -> None:
    ((chance, top),) = logprobs([LogprobQuery(torch.full((50,), torch.nan), 1, 3)])
    assert chance != chance
    assert top == ()
    assert logprobs([]) == []
