"""Branches that were cut off go on in a fresh engine as if undisturbed; lost capsules are built again."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from bench.doubles.structures import MockStructures
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.events import CapsuleStored
from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.cutting import AGAIN, HOT, check_cuts, check_forks, continuation, play
from support.driving import HistoryForward, engine_over
from support.examples import examples

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 2
MODEL = random_model("llama", 8)  # its end of text is token 2
PROMPT = random.Random(1).sample(range(3, 128), 23)
PROMPT_64 = [token % 61 + 3 for token in PROMPT]
LIMITS = Limits(14, ignore_eos=True)
PATHS = [[10, 11, 12, 13], [10, 11, 20], [10, 30, 31, 32, 33, 34], [40, 41]]
CHOICE = Grammar("choice", json.dumps(PATHS))
ANY = Grammar("json_object")


def make_engine(forward: Any, *, structures: Any = None, **config: Any) -> Engine:
    return engine_over(
        forward,
        config=replace(EngineConfig(SchedulerConfig(16, 32)), **config),
        structures=structures,
    )


def on_torch() -> Engine:
    """A tiny decoder in float32, drawn from by the real sampler."""
    return make_engine(MODEL.forward(num_blocks=120))


def mocked(**config: Any) -> Engine:
    spec = mock_spec(vocab_size=64, eos_token_ids=(EOS,))
    forward = MockForward(spec, num_blocks=256, block_size=4)
    return make_engine(forward, structures=MockStructures(64, (EOS,)), **config)


WAYS: dict[str, tuple[Sampling, Limits]] = {
    "greedy": (Sampling(), LIMITS),
    "temperature": (HOT, LIMITS),
    "top_p": (Sampling(1.3, top_p=0.8, seed=3), LIMITS),
    "top_k": (Sampling(1.3, top_k=9, seed=4), LIMITS),
    "min_p": (Sampling(1.3, min_p=0.02, seed=5), LIMITS),
    "repetition_penalty": (Sampling(0.7, repetition_penalty=1.7, seed=6), LIMITS),
    "presence_penalty": (Sampling(0.7, presence_penalty=-2.0, seed=11), LIMITS),
    "frequency_penalty": (Sampling(0.4, frequency_penalty=1.1, seed=7), LIMITS),
    "all penalties": (
        Sampling(
            repetition_penalty=1.4, presence_penalty=-1.0, frequency_penalty=-0.8, temperature=0.1
        ),
        LIMITS,
    ),
    "logit_bias": (Sampling(1.0, seed=8, logit_bias=((7, 6.0), (9, 5.5), (11, -9.0))), LIMITS),
    "logprobs": (Sampling(1.0, seed=9, logprobs=4), LIMITS),
    "min_tokens": (Sampling(1.0, seed=10), Limits(40, tuple(range(3, 128, 3)), min_tokens=6)),
    "stop_token_ids": (Sampling(1.0, seed=1), Limits(60, tuple(range(5, 128, 11)))),
    "end of text": (Sampling(2.0, seed=2, logit_bias=((EOS, 3.0),)), Limits(60)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_cut_after_any_token_goes_on_as_if_uncut(way: str) -> None:
    """X4, part: a real forward pass in float32 and the real sampler; then its forks agree."""
    sampling, limits = WAYS[way]
    whole = Generate("r", pack_tokens(PROMPT), limits, sampling)
    engine = on_torch()
    ended = play(engine, whole)["r", 0]
    assert ended.last.finish == ("length" if limits is LIMITS else "stop")
    assert ended.tokens
    check_cuts(on_torch, ended, whole, PROMPT)
    check_forks(on_torch, engine, ended, whole, PROMPT, sampling)


# Everything that the model has no part in, on an engine whose tokens tell every KV slot that they read.


texts = st.lists(st.integers(3, 63), min_size=1, max_size=20)


@given(
    prompt=texts,
    suffixes=st.lists(texts | st.just([]), min_size=1, max_size=3),
    max_tokens=st.integers(1, 12),
    stops=st.sets(st.integers(3, 63), max_size=8),
    cut=st.floats(0, 1),
    seed=st.integers(0, (1 << 64) - 1),
)
@examples(60)
def test_any_branch_of_any_tree_goes_on_anywhere(
    prompt: list[int],
    suffixes: list[list[int]],
    max_tokens: int,
    stops: set[int],
    cut: float,
    seed: int,
) -> None:
    """X4, part: forks of forks, cut, continued, forked again: as undisturbed."""
    engine, text, capsule = mocked(), prompt, "p.0"
    sampling = Sampling(1.0, seed=seed, presence_penalty=0.5, logprobs=1)
    limits = Limits(max_tokens, tuple(stops), min_tokens=min(2, max_tokens))
    play(engine, Prefill("p", pack_tokens(prompt)))
    for level, suffix in enumerate(suffixes):
        fork = Fork(f"f{level}", capsule, (b"", pack_tokens(suffix)), limits, sampling)
        ended = play(engine, fork)[f"f{level}", 1]
        text = text + suffix
        whole = Generate("r", pack_tokens(text), limits, sampling, first_branch=1)
        check_cuts(mocked, ended, whole, text, (int(cut * len(ended.tokens)),))
        check_forks(mocked, engine, ended, whole, text)
        assert ended.last.capsule is not None
        text, capsule = text + ended.tokens, ended.last.capsule


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [2, 20])
def test_a_grammar_goes_on_where_its_text_was_cut(max_tokens: int, seed: int) -> None:
    """X4, part, D9: by the tokens that it took in; a text that is complete is refused."""
    for grammar in (CHOICE, ANY):
        sampling = Sampling(1.0, seed=seed)
        whole = Generate("r", pack_tokens(PROMPT_64), Limits(max_tokens), sampling, grammar=grammar)
        engine = mocked()
        ended = play(engine, whole)["r", 0]
        check_cuts(mocked, ended, whole, PROMPT_64)
        check_forks(mocked, engine, ended, whole, PROMPT_64)


def test_a_continuation_that_is_preempted_goes_on_too(make_bench: Callable[..., Any]) -> None:
    """X4, part: its tokens from before count once, however often it is computed again."""
    prompts = [[i + 3] * 9 for i in range(4)]
    sampling = Sampling(1.0, seed=4, frequency_penalty=0.5, repetition_penalty=1.2)
    limits = Limits(30, min_tokens=20)
    roomy, tight = (make_bench(forward=HistoryForward(num)) for num in (256, 22))
    wholes = [
        Generate(f"r{i}", pack_tokens(prompt), limits, structs.replace(sampling, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    roomy.run(*wholes)
    tight.run(
        *(
            structs.replace(
                continuation(whole, prompt, roomy.answers[whole.request, 0].tokens[:7]),
                request=whole.request,
            )
            for whole, prompt in zip(wholes, prompts, strict=True)
        )
    )
    assert tight.engine.stats().sched.num_preemptions > 0
    seen = roomy.forward.seen
    assert all(seen[key] == found for key, found in tight.forward.seen.items())
    for whole in wholes:
        key = whole.request, 0
        assert tight.answers[key].tokens == roomy.answers[key].tokens[7:]


# Refusals


@pytest.mark.parametrize(
    ("command", "param"),
    [
        (Generate("r", pack_tokens([5, 6]), Limits(9), drawn=2), "drawn"),
        (Generate("r", pack_tokens([5, 6]), Limits(9), drawn=-1), "drawn"),
        (Generate("r", pack_tokens([5, 6, 7]), Limits(2), drawn=2), "drawn"),
        (Generate("r", pack_tokens([5, 6, 7]), Limits(9), n=2, drawn=1), "n"),
        (Generate("r", pack_tokens([5, 10]), Limits(9), drawn=1, grammar=CHOICE), "grammar.consumed"),
        (
            Generate("r", pack_tokens([5, 10]), Limits(9), grammar=Grammar("json_object", "", 3)),
            "grammar.consumed",
        ),
        (
            Generate("r", pack_tokens([5, 40, 41]), Limits(9), grammar=structs.replace(CHOICE, consumed=2)),
            "grammar.consumed",
        ),
        (
            Generate("r", pack_tokens([5, 10, 41]), Limits(9), grammar=structs.replace(CHOICE, consumed=2)),
            "tokens",
        ),
        (Generate("r", pack_tokens([5]), Limits(9), grammar=Grammar("inherit")), "grammar"),
        (Prefill("r", pack_tokens([5, 6]), grammar=structs.replace(CHOICE, consumed=1)), "tokens"),
        (Prefill("r", pack_tokens([5, 6]), grammar=Grammar("inherit")), "grammar"),
        (Prefill("r", pack_tokens([5, 6]), grammar=Grammar("lark", "start: ")), "grammar"),
        (Prefill("r", pack_tokens([5, 6]), grammar=Grammar("json_object", "", 3)), "grammar.consumed"),
        (Prefill("r", pack_tokens([5, 6]), grammar=Grammar("json_object", "", -1)), "grammar.consumed"),
        (Prefill("r", pack_tokens([5, 6]), ttl_s=3.0, replaceable=True), "ttl_s"),
        (Prefill("r", pack_tokens([5, 6]), salt="other", capsule="c.0"), "capsule"),
        (Fork("r", "c.0", (b"",), Limits(9), at=0), "at"),
        (Fork("r", "c.0", (b"",), Limits(9), at=-1), "at"),
        (Fork("r", "c.0", (b"",), Limits(9), at=3), "at"),
        (
            Fork("r", "c.0", (b"",), Limits(9), grammar=Grammar("json_object", "", 1)),
            "grammar.consumed",
        ),
    ],
)  # fmt: skip
def test_a_command_that_can_not_be_is_refused_before_anything_changes(
    command: Any, param: str
) -> None:
    """X4, part: the error names the field, the engine is as before, and promises no room."""
    engine = mocked(max_kept_share=0.1)
    play(engine, Prefill("c", pack_tokens([5, 6])))
    before = engine.stats()
    for _ in range(30):  # of 25 blocks that may be kept
        error = play(engine, command)["r", -1].last.error
        assert error is not None
        assert (error[0], error[2]["param"]) == (InvalidParameter.code, param)
    assert engine.stats()._replace(num_steps=0) == before._replace(num_steps=0)
    good = Generate("r", pack_tokens([5, 6, 7, 8]), Limits(9, ignore_eos=True), drawn=3)
    assert len(play(engine, good)["r", 0].tokens) == 6
    assert play(engine, Prefill("s", pack_tokens([9] * 20)))["s", 0].last.capsule == "s.0"


def test_a_continuation_needs_no_more_room_than_its_answer(make_bench: Callable[..., Any]) -> None:
    """X4, part: the limits of a context and of a pool are those of the whole text."""
    bench = make_bench(num_blocks=8, max_model_len=24)
    whole = Generate("r", pack_tokens([5] * 14), Limits(10))
    bench.run(whole)
    tokens = bench.answers["r", 0].tokens
    bench.run(continuation(whole, [5] * 14, tokens[:9]))
    assert bench.answers[AGAIN, 0].tokens == tokens[9:]


# Capsules under ids of their own


def test_an_answers_capsule_counts_as_one_when_it_is_built_again(
    make_bench: Callable[..., Any],
) -> None:
    """X4, part: it pushes out the least recently used, and is no kept one."""
    bench = make_bench(max_answer_capsules=2)
    bench.run(*(Generate(name, pack_tokens([9, 8, 7]), Limits(2)) for name in "ab"))
    rebuild = Prefill("x", pack_tokens([1, 2, 3]), capsule="lost.3", replaceable=True)
    bench.run(rebuild)
    stats = bench.engine.stats().capsules
    assert (stats.kept, stats.replaceable, stats.num_replaced) == (0, 2, 1)
    stored = [e for e in bench.events if isinstance(e, CapsuleStored)][-1]
    assert (stored.capsule, stored.boundary, stored.hashes) == ("lost.3", 3, b"")
    bench.run(Fork("f", "a.0", (b"",), Limits(1)))
    assert bench.answers["f", -1].error.code == "capsule_not_found"


def test_where_answers_leave_nothing_a_rebuilt_one_serves_the_forks_that_wait(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(max_answer_capsules=0)
    rebuild = Prefill("x", pack_tokens([1, 2, 3]), capsule="lost.3", replaceable=True)
    bench.run(rebuild, Fork("f", "lost.3", (b"", pack_tokens([4])), Limits(2), HOT))
    assert bench.answers["x", 0].last.capsule is None
    assert bench.answers["x", 0].last.finish == "stop"
    bench.run(Generate("r", pack_tokens([1, 2, 3]), Limits(2), HOT))
    assert bench.answers["f", 0].tokens == bench.answers["r", 0].tokens
    assert bench.engine.stats().capsules.kept == 0


def test_a_capsule_made_again_takes_the_place_of_the_first(bench: Any) -> None:
    """X4, part: one id, one capsule; what continues the first goes on."""
    text = pack_tokens([1, 2, 3, 4, 5])
    bench.run(Prefill("p", text))
    bench.submit(Fork("f", "p.0", (b"", b""), Limits(9), HOT))
    bench.step()
    bench.run(Prefill("x", text, ttl_s=5.0, capsule="p.0"))
    told = [type(e) for e in bench.events if getattr(e, "capsule", "") == "p.0"]
    assert told == [CapsuleStored, CapsuleStored]
    assert bench.engine.stats().capsules.kept == 1
    bench.run(Fork("g", "p.0", (b"", b""), Limits(9), HOT))
    for i in range(2):
        assert bench.answers["f", i].tokens == bench.answers["g", i].tokens
    bench.now += 6.0
    bench.run()
    assert bench.engine.stats().capsules.kept == 0, "the second one's time to live counts"


def test_an_answers_capsule_may_become_a_kept_one_and_the_other_way(bench: Any) -> None:
    bench.run(Generate("r", pack_tokens([1, 2, 3]), Limits(4)))
    tokens = pack_tokens([1, 2, 3, *bench.answers["r", 0].tokens])
    for number, replaceable in enumerate((False, True, False)):
        again = Prefill(f"x{number}", tokens, capsule="r.0", replaceable=replaceable)
        bench.run(again)
        stats = bench.engine.stats().capsules
        assert (stats.kept, stats.replaceable) == (not replaceable, replaceable)
    bench.run(Release("r.0"))
    left = bench.engine.stats().capsules
    assert (left.kept, left.replaceable, left.nbytes_below, sum(left.num_by_tier)) == (0, 0, 0, 0)


def test_two_rebuildings_of_one_capsule_leave_one(bench: Any) -> None:
    text = pack_tokens([5, 6, 7] * 9)
    bench.submit(Prefill("x", text, capsule="lost.3"), Prefill("y", text, capsule="lost.3"))
    bench.run(Fork("f", "lost.3", (b"",), Limits(2)))
    assert {bench.answers[name, 0].last.capsule for name in "xy"} == {"lost.3"}
    assert len(bench.answers["f", 0].tokens) == 2
    assert bench.engine.stats().capsules.kept == 1


# Boundaries


def test_every_end_tells_its_boundary(make_bench: Callable[..., Any]) -> None:
    """X4, part: with or without a capsule; an error tells none."""
    bench = make_bench(max_answer_capsules=0)
    bench.run(Generate("r", pack_tokens([1, 2, 3]), Limits(5), n=2))
    assert [bench.answers["r", i].last.boundary for i in range(2)] == [8, 8]
    stop = bench.answers["r", 0].tokens[3]
    bench.run(Generate("s", pack_tokens([1, 2, 3]), Limits(5, (stop,))))
    ended = bench.answers["s", 0]
    assert ended.last.finish == "stop"
    assert ended.last.boundary == 3 + len(ended.tokens)
    bench.submit(Generate("c", pack_tokens([1, 2, 3]), Limits(50)))
    for _ in range(4):
        bench.step()
    bench.submit(Cancel("c"), Generate("d", pack_tokens([1] * 50), Limits(9), n=2), Cancel("d"))
    bench.run(Generate("e", pack_tokens([1, 2]), Limits(9), grammar=Grammar("regex", "1")))
    ended = bench.answers["c", 0]
    assert (ended.last.finish, ended.last.boundary) == ("cancelled", 3 + len(ended.tokens))
    assert (bench.answers["d", -1].last.finish, bench.answers["d", -1].last.boundary) == (
        "cancelled",
        50,
    )
    assert bench.answers["e", 0].last.finish == "error"
    assert bench.answers["e", 0].last.boundary == 0
