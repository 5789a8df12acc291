"""Steps that fail, steps that are repeated, and what a tight pool costs."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError, KVBudgetExceeded, PoolExhausted
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Cancel, Fork, Generate, Limits, Prefill, Sampling, Share
from mallee.protocol.messages import pack_tokens as pack
from mallee.testing.forward import MockForward, linear_tokens
from mallee.worker.forward import Draw, ForwardBatch, Logits

POLICIES = ["fair", "fcfs", "prefill_first", "decode_round_robin"]


class Broken(Exception):
    """The forward failed, as the test wants."""


class FlakyForward:
    """Wraps a forward; fails in `forward` (before or after the work) or in `sample` when told to."""

    def __init__(self, inner: MockForward) -> None:
        self._inner = inner
        self.fails = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        if self.fails == "before":
            raise Broken
        logits = self._inner.forward(batch)
        if self.fails == "after":
            raise Broken
        return logits

    @property
    def row_nbytes(self) -> int:
        return self._inner.row_nbytes

    def keep(self, logits: Logits) -> Logits:
        if self.fails == "keep":
            raise Broken
        return self._inner.keep(logits)

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        if self.fails == "sample":
            raise Broken
        return self._inner.sample(draws)


def expect(bench: Any, prompt: list[int], n: int, sampling: Sampling, branch: int) -> list[int]:
    seed = branch_seed(sampling.seed, branch)
    return linear_tokens(bench.forward.spec, prompt, n, sampling=sampling, seed=seed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_step_that_fails_changes_nothing(make_bench: Callable[..., Any], data: Any) -> None:
    """I18, I26: whatever raised, invariants hold, and every answer is what it would have been."""
    bench = make_bench(num_blocks=data.draw(st.sampled_from([14, 64])), max_rows=6)
    flaky = FlakyForward(bench.forward)
    engine = bench.engine
    engine._forward = engine._sampler._forward = engine._passes._forward = flaky
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    plan = {}
    bench.submit(Prefill("p", pack([1, 2, 3, 4, 5, 6])))
    for i in range(6):
        sampling = Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 30))
        tokens = [rng.randrange(5) for _ in range(rng.randint(1, 20))]
        n = rng.randint(1, 3)
        if i % 2:
            suffixes = [tokens[: rng.randint(0, 6)] for _ in range(n)]
            bench.submit(Fork(f"r{i}", "p.0", tuple(map(pack, suffixes)), Limits(6), sampling))
            texts = [[1, 2, 3, 4, 5, 6, *suffix] for suffix in suffixes]
        else:
            bench.submit(Generate(f"r{i}", pack(tokens), Limits(6), sampling, n))
            texts = [tokens] * n
        plan |= {(f"r{i}", branch): (text, sampling) for branch, text in enumerate(texts)}
        for _ in range(rng.randint(0, 6)):
            flaky.fails = rng.choice(["", "", "before", "after", "sample", "keep"])
            try:
                bench.step()
            except Broken:
                bench.engine.check()
        if rng.random() < 0.2:
            bench.submit(Cancel(f"r{rng.randrange(6)}", rng.choice([None, 0])))
        flaky.fails = ""
    bench.run()
    for key, (text, sampling) in plan.items():
        answer = bench.answers.get(key)
        if answer is not None and answer.last.finish == "length":
            assert answer.tokens == expect(bench, text, 6, sampling, key[1]), key
        elif answer is not None:
            assert answer.last.finish == "cancelled" or isinstance(answer.error, PoolExhausted)
    assert bench.engine.stats().jobs == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_commands_between_equal_steps_give_equal_events(
    make_bench: Callable[..., Any], policy: str
) -> None:
    """I18: same seed and queue, same log; with sessions, priorities and preemption."""
    logs = []
    for _ in range(2):
        rng = random.Random(7)
        sched = {"policy": policy, "ageing_steps": 12}
        bench = make_bench(num_blocks=24, max_rows=5, sched=sched)
        for i in range(30):
            share = Share(rng.choice("abc"), rng.choice([0.5, 2.0]), rng.randint(0, 2))
            tokens = pack([rng.randrange(4) for _ in range(rng.randint(1, 30))])
            sampling = Sampling(temperature=1.0, seed=i)
            bench.submit(
                Generate(f"r{i}", tokens, Limits(8), sampling, rng.randint(1, 3), share=share)
            )
            bench.step()
        bench.run()
        assert bench.engine.stats().sched.num_preemptions > 0
        logs.append((bench.gateways, bench.events))
    assert logs[0] == logs[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gang", [True, False])
def test_no_policy_changes_an_answer(
    make_bench: Callable[..., Any], policy: str, gang: bool
) -> None:
    """I20: on and off, the same tokens; also uncut, static and with few decodes a step."""
    prompts = [[(i * 7 + j) % 60 for j in range(5 + 3 * i)] for i in range(8)]
    for more in (
        {},
        {"chunked": False},
        {"continuous": False},
        {"max_decodes": 2, "max_chunks": 1},
    ):
        bench = make_bench(
            num_blocks=40,
            max_step_tokens=64,
            max_model_len=64,
            sched={"policy": policy, "gang": gang, "watermark": 0.0, **more},
        )
        sampling = Sampling(temperature=1.0, seed=3)
        bench.run(
            *(
                Generate(f"r{i}", pack(p), Limits(9), sampling, 2, share=Share(f"s{i % 3}", 1.0, i))
                for i, p in enumerate(prompts)
            )
        )
        for i, prompt in enumerate(prompts):
            for branch in range(2):
                tokens = bench.answers[f"r{i}", branch].tokens
                assert tokens == expect(bench, prompt, 9, sampling, branch)


def test_contradicting_settings_are_refused_with_the_remedy(make_bench: Callable[..., Any]) -> None:
    """I20: when the engine is made."""
    for sched, text in (
        ({"chunked": False}, "max_step_tokens=16"),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"max_decodes": 0}, "max_decodes=0"),
        ({"ageing_steps": -1}, "ageing_steps=-1"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_bench(max_model_len=1000, sched=sched)


@pytest.mark.parametrize(("watermark", "most"), [(0.0, 200), (0.05, 60)])
def test_the_watermark_keeps_admitted_branches_running(
    make_bench: Callable[..., Any], watermark: float, most: int
) -> None:
    """D37, part: on a tight pool; everybody gets an answer all the same."""
    bench = make_bench(num_blocks=200, max_rows=64, sched={"watermark": watermark})
    bench.engine.check = lambda: None
    for i in range(80):
        bench.submit(Generate(f"r{i}", pack([i % 60] * (20 + i % 7)), Limits(24)))
    bench.run()
    assert all(len(answer.tokens) == 24 for answer in bench.answers.values())
    assert bench.engine.stats().sched.num_preemptions <= most


def test_what_can_never_fit_is_refused_with_all_the_numbers(make_bench: Callable[..., Any]) -> None:
    """S3, part: prefix, longest branch and headroom, before any block is taken."""
    bench = make_bench(num_blocks=12, max_model_len=1000, sched={"headroom_tokens": 8})
    bench.run(Prefill("p", pack([1] * 21)))
    allocated = bench.engine.stats().pool.num_allocs
    bench.run(Fork("f", "p.0", (b"", pack([2] * 10)), Limits(7)))
    error = bench.answers["f", -1].error
    assert isinstance(error, KVBudgetExceeded)
    assert error.fields["needed"] == 13  # 21 + 10 + 6 + 8 tokens, and a copy of a block
    assert "prefix 31 + branch 7 + headroom 8 = 46 tokens" in str(error)
    assert bench.engine.stats().pool.num_allocs == allocated
    bench.run(Fork("h", "p.0", (b"", pack([2] * 2)), Limits(7)))
    assert len(bench.answers["h", 1].tokens) == 7


def test_the_engine_tells_what_a_sequence_takes_up(bench: Any) -> None:
    """S9: asked from the engine; equal to what it takes from the pool."""
    spec = bench.forward.spec
    for i, n in enumerate((1, 4, 5, 63)):
        before = bench.engine.stats().pool
        bench.run(Prefill(f"p{i}", pack([i * 7 + 1] + [i] * (n - 1))))
        blocks = bench.engine.stats().pool.num_allocs - before.num_allocs
        assert bench.engine.kv_bytes(n) == blocks * 4 * spec.kv_bytes_per_token
