"""Draws under grammars, limits and penalties, on an engine whose model is mocked."""

import json
import random
from collections.abc import Callable, Sequence
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.forward import MockForward
from bench.doubles.structures import MockStructures
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import GrammarFailed
from mallee.protocol.messages import Fork, Generate, Grammar, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.forward import Draw, ForwardBatch, Logits, TokenHistory, distinct
from mallee.worker.records import EngineConfig
from support.driving import HistoryForward, drive, engine_over

EOS = 63
HOT = Sampling(temperature=1.0, seed=5)
PROMPT = pack_tokens(list(range(1, 12)))
PATHS = [[10, 11, 12, 13], [10, 11, 20], [10, 30, 31, 32, 33, 34], [40]]


def choice(*paths: Sequence[int]) -> Grammar:
    return Grammar("choice", json.dumps(paths))


def generate(name: str, grammar: Grammar | None, n: int = 1, tokens: int = 20, **more: Any) -> Any:
    sampling = more.pop("sampling", HOT)
    return Generate(name, PROMPT, Limits(tokens, **more), sampling, n, grammar=grammar)


@pytest.fixture
def bench(make_bench: Callable[..., Any]) -> Any:
    return make_bench(eos=(EOS,))


def test_constrained_answers_are_what_the_grammar_allows(bench: Any) -> None:
    """D9, I16, part: every branch ends inside the grammar, with "stop", and branches differ."""
    bench.run(generate("r", choice(*PATHS), n=24))
    answers = [bench.answers["r", i] for i in range(24)]
    assert {a.last.finish for a in answers} == {"stop"}
    found = {tuple(a.tokens) for a in answers}
    assert found <= {tuple(path) for path in PATHS}
    assert len(found) > 2


def test_an_answer_may_end_where_the_grammar_does_not_have_to(bench: Any) -> None:
    """D9: an end of text is drawn only where the text may end; ignore_eos doesn't change that."""
    paths = ([1, 2], [1, 2, 3, 4])
    bench.run(
        generate("r", choice(*paths), n=12), generate("s", choice(*paths), 12, ignore_eos=True)
    )
    for name in "rs":
        found = {tuple(bench.answers[name, i].tokens) for i in range(12)}
        assert found == {tuple(path) for path in paths}


def test_siblings_share_a_matcher_until_their_first_token(bench: Any) -> None:
    """D9, I16, part: n branches cost one mask at first, then each its own; none without a grammar."""
    sizes: list[int] = []
    bench.structures.on_fill = sizes.append
    bench.run(generate("free", None, n=4))
    assert bench.answers["free", 0].last.finish in ("length", "stop")
    assert not sizes
    bench.run(generate("r", choice(*PATHS), n=16))
    assert sizes[0] == 1
    assert max(sizes[1:]) > 1


def test_a_matcher_that_breaks_ends_its_branch_alone(bench: Any) -> None:
    """D9: an error of one grammar is one branch's error; the others' tokens are as if alone."""
    alone = generate("a", choice(*PATHS), n=6)
    bench.run(alone, generate("b", Grammar("regex", "3")), generate("c", None))
    error = bench.answers["b", 0].error
    assert isinstance(error, GrammarFailed)
    assert "broke" in error.message
    assert len(bench.answers["b", 0].tokens) == 2
    other = {i: bench.answers["a", i].tokens for i in range(6)}
    bench.answers.clear()
    bench.run(generate("d", choice(*PATHS), n=6))
    assert {i: bench.answers["d", i].tokens for i in range(6)} == other


def test_a_text_that_nothing_can_follow_is_an_error_not_a_hang(bench: Any) -> None:
    """D9: an empty mask ends the branch."""
    bench.structures.fill = lambda matchers, sets: None
    bench.run(generate("r", choice([1, 2])))
    assert "no token can follow" in bench.answers["r", 0].error.message


def test_a_capsule_cut_inside_an_object_goes_on_inside_it(bench: Any) -> None:
    """D9, F1, part: forked in mid-object, both children valid and different; a plain fork is free."""
    bench.run(generate("r", choice(*PATHS[:3]), tokens=1, sampling=Sampling()))
    parent = bench.answers["r", 0]
    assert (parent.tokens, parent.last.finish) == ([10], "length")
    more = Grammar("inherit")
    bench.run(
        Fork("f", parent.last.capsule, (b"",) * 12, Limits(20), HOT, grammar=more),
        Fork("g", parent.last.capsule, (b"",) * 12, Limits(20), HOT),
        Fork("h", parent.last.capsule, (b"",), Limits(20), HOT, grammar=choice([1, 2, 3])),
    )
    found = {(10, *bench.answers["f", i].tokens) for i in range(12)}
    assert found <= {tuple(path) for path in PATHS}
    assert len(found) > 1
    assert any(len(bench.answers["g", i].tokens) > 6 for i in range(12))
    assert bench.answers["h", 0].tokens == [1, 2, 3]


def test_an_inherited_suffix_is_part_of_the_text(bench: Any) -> None:
    """D9: what a client writes into the object counts, and is refused where it can't stand."""
    bench.run(generate("r", choice(*PATHS[:3]), tokens=1, sampling=Sampling()))
    capsule = bench.answers["r", 0].last.capsule
    inherit = Grammar("inherit")
    suffixes = (pack_tokens([11]), pack_tokens([30, 31]), b"")
    bench.run(Fork("f", capsule, suffixes, Limits(20), HOT, grammar=inherit))
    assert bench.answers["f", 0].tokens in ([12, 13], [20])
    assert bench.answers["f", 1].tokens == [32, 33, 34]
    bench.run(Fork("g", capsule, (pack_tokens([5]),), Limits(20), HOT, grammar=inherit))
    assert bench.answers["g", -1].error.fields["param"] == "suffixes[0]"


def test_only_capsules_inside_a_text_can_be_inherited_from(bench: Any) -> None:
    bench.run(generate("r", choice([1, 2])), Prefill("p", PROMPT))
    for i, capsule in enumerate((bench.answers["r", 0].last.capsule, "p.0")):
        bench.run(Fork(f"f{i}", capsule, (b"",), Limits(5), grammar=Grammar("inherit")))
        assert "not inside" in bench.answers[f"f{i}", -1].error.message


def test_min_tokens_holds_back_ends(bench: Any) -> None:
    """I5: no end of text and no stop id before; a grammar's own end comes first."""
    stops = tuple(range(0, 63, 2))
    bench.run(
        generate("r", None, n=16, min_tokens=6, stop_token_ids=stops),
        generate("s", None, n=16, stop_token_ids=stops),
        generate("t", choice([1, 3]), min_tokens=6),
        generate("u", choice([1], [1, 3, 5]), n=8, min_tokens=2),
        generate("v", None, min_tokens=2, stop_token_ids=(1 << 31,)),
    )
    lengths = [len(bench.answers["r", i].tokens) for i in range(16)]
    assert min(lengths) == 6
    assert min(len(bench.answers["s", i].tokens) for i in range(16)) < 6
    assert bench.answers["t", 0].tokens == [1, 3]
    assert all(bench.answers["u", i].tokens == [1, 3, 5] for i in range(8))
    assert bench.answers["v", 0].error is None


def test_every_token_comes_with_its_logprobs_if_asked(bench: Any) -> None:
    """I5: one entry a token, on the branch's updates alone."""
    asked = Sampling(temperature=1.0, seed=5, logprobs=3)
    bench.run(generate("r", None, n=2, sampling=asked), generate("s", None))
    for i in range(2):
        answer = bench.answers["r", i]
        assert len(answer.logprobs) == len(answer.tokens) > 0
        for token, (_, top) in zip(answer.tokens, answer.logprobs, strict=True):
            assert [t for t, _ in top] == [(token + k) % 64 for k in range(3)]
    assert bench.answers["s", 0].logprobs == []


@pytest.mark.parametrize("n", [1, 3])
def test_penalties_look_at_the_whole_text_of_a_forked_branch(n: int) -> None:
    """I5: the prompt is all of the capsule's path and the suffix; the answer is the branch's own."""
    forward = HistoryForward(256)
    engine = engine_over(forward)
    rng = random.Random(n)
    prompt = [rng.randrange(64) for _ in range(21)]
    penalty = Sampling(temperature=1.0, seed=3, repetition_penalty=1.3, presence_penalty=0.5)

    def run(command: Any) -> dict[int, list[int]]:
        engine.submit(command, "g")
        return {branch: tokens for (_, branch), (tokens, _) in drive(engine).items()}

    answers = run(Generate("r", pack_tokens(prompt), Limits(6), penalty, n))
    suffix = [7, 7, 9]
    fork = Fork("f", f"r.{n - 1}", (pack_tokens(suffix), b""), Limits(8), penalty)
    run(Generate("other", pack_tokens([1, 2, 3]), Limits(2), penalty))
    text = prompt + answers[n - 1]
    forward.seen.clear()
    children = run(fork)
    for index, before in ((0, text + suffix), (1, text)):
        seed = next(s for s, p in forward.seen if p == len(before) and (s == 3) is (index == 0))
        for i in range(8):
            known, counts = forward.seen[seed, len(before) + i]
            assert known == sorted(set(before))
            assert counts == {t: children[index][:i].count(t) for t in set(children[index][:i])}


@given(st.lists(st.integers(0, 40), max_size=120))
def test_a_history_counts_like_a_dictionary(tokens: list[int]) -> None:
    """I5: against a brute-force count."""
    history = TokenHistory(distinct([3, 1, 3]))
    for token in tokens:
        history.add(token)
        history.check()
    counts = dict(zip(history.drawn.tolist(), history.counts.tolist(), strict=True))
    assert counts == {t: tokens.count(t) for t in set(tokens)}
    assert history.prompt.tolist() == [1, 3]
    assert np.issubdtype(history.drawn.dtype, np.integer)


# Masks are computed beside the forward pass

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
    grammar = Grammar("choice", json.dumps(PATHS[:2]))
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
