"""Steps that fail, steps that are repeated, and what a tight pool costs."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.errors import KVBudgetExceeded
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, Share
from mallee.protocol.messages import pack_tokens as pack

POLICIES = ["fair", "fcfs", "prefill_first", "decode_round_robin"]


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
