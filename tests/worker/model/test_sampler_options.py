"""Penalties, bias, min-p, masks and log-probabilities against plain references and transformers'."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, TokenHistory, Words, distinct, flags, num_words
from mallee.worker.model.sampling.logits import edited, filtered
from mallee.worker.model.sampling.sampler import sample
from support.examples import examples

VOCAB = 97


def vocabulary(seed: int, size: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, size).astype(np.float32))


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


@pytest.mark.parametrize("penalty", [1.2, 0.8])
def test_repetition_penalty_is_transformers_own(penalty: float) -> None:
    """I5: prompt and answer alike, each token once however often it occurs."""
    logits = vocabulary(5)
    text = [3, 3, 9, 40, 9, 12]
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits[None].clone())
    draw = Draw(logits, Sampling(repetition_penalty=penalty), 0, 0, history_of(text[:3], text[3:]))
    assert torch.equal(edited(draw).scores, theirs[0])


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
                one = [d._replace(allowed=words([token])) for d in draws[:3]]
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


def test_options_do_not_make_a_draw_depend_on_its_row() -> None:
    """I5: rows with different options, together, reversed and alone."""
    kinds = [
        {"logit_bias": ((4, 3.0),)},
        {"repetition_penalty": 1.4},
        {"min_p": 0.05},
        {},
        {"frequency_penalty": 0.5, "top_k": 30},
    ]
    draws = []
    for i in range(30):
        temperature = 0.0 if i % 4 == 0 else 0.9
        sampling = Sampling(temperature, **kinds[i % 5])  # type: ignore[arg-type]
        history = history_of([i, i + 1], [i]) if i % 5 in (1, 4) else None
        allowed = words(range(i, i + 40)) if i % 3 == 0 else None
        draws.append(Draw(vocabulary(i).bfloat16(), sampling, i, i, history, allowed))
    alone = [sample([draw])[0] for draw in draws]
    assert sample(draws) == alone
    assert sample(draws[::-1]) == alone[::-1]


@pytest.mark.slow
def test_frequencies_under_options_pass_a_chi_square_test() -> None:
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
    draws = [Draw(logits, sampling, i, 11, history, allowed) for i in range(n)]
    counts = np.bincount(sample(draws), minlength=8)
    wanted = expected.numpy() * n
    assert all(counts[wanted == 0] == 0)
    live = wanted > 0
    assert live.sum() == 6
    assert float(((counts - wanted)[live] ** 2 / wanted[live]).sum()) < 20.5  # 5 degrees, p = 0.001


@given(st.sets(st.integers(0, VOCAB - 1)))
def test_words_and_flags_are_inverse(ids: set[int]) -> None:
    assert np.flatnonzero(flags(words(sorted(ids)), VOCAB)).tolist() == sorted(ids)
    both = flags(np.stack([words(sorted(ids)), words([])]), VOCAB)
    assert both.shape == (2, VOCAB)
    assert not both[1].any()


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-20])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_the_coldest_draw_is_the_greedy_one(temperature: float, filters: dict[str, float]) -> None:
    """Also with bans, a mask, and penalties that would leave float32's range."""
    logits = vocabulary(7)
    cold = Sampling(temperature=temperature, repetition_penalty=1e-300, **filters)  # type: ignore[arg-type]
    plain = Draw(logits, cold, 1, 5)
    edited = plain._replace(history=history_of([3, 8], [8, 11]), banned=(2,))
    only = plain._replace(allowed=words([41]))
    for draw in (plain, edited, only):
        greedy = draw._replace(sampling=Sampling(repetition_penalty=1e-300))
        assert sample([draw]) == sample([greedy])
    assert sample([only]) == [41]
