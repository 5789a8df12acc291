"""The engine over a mocked forward pass whose tokens depend on every KV slot it reads."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.forward import linear_tokens
from bench.mocker.policies import make_order
from mallee.protocol.errors import (
    ContextLengthExceeded,
    DeviceMemoryExhausted,
    InvalidParameter,
    KVBudgetExceeded,
    PoolExhausted,
    QueueFull,
    UnknownCapsule,
    from_wire,
)
from mallee.protocol.events import CapsuleReleased, CapsuleStored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    ReasoningBudget,
    Release,
    RetainSpan,
    Sampling,
    Share,
    pack_tokens,
)
from mallee.worker.forward import Draw, ForwardBatch, Logits

GREEDY = Sampling()
HOT = Sampling(temperature=1.0, seed=11)
PROMPT = list(range(1, 24))  # 5 full blocks of 4 and 3 slots


def expect(bench: Any, prompt: list[int], n: int, sampling: Sampling, branch: int = 0) -> list[int]:
    seed = branch_seed(sampling.seed, branch)
    return linear_tokens(bench.forward.spec, prompt, n, sampling=sampling, seed=seed)


@pytest.mark.parametrize(("n", "sampling"), [(1, GREEDY), (1, HOT), (4, HOT)])
def test_n_branches_cost_one_prefill_and_each_equals_its_own_run(
    bench: Any, n: int, sampling: Sampling
) -> None:
    """F4, D27: one prefill, N continuations; one, too (the real model's part is in tests/worker/model)."""
    bench.run(Generate("r", pack_tokens(PROMPT), Limits(20), sampling, n=n))
    answers = [bench.answers["r", branch] for branch in range(n)]
    for branch, answer in enumerate(answers):
        assert answer.tokens == expect(bench, PROMPT, 20, sampling, branch)
        assert answer.last.finish == "length"
    assert bench.engine.stats().num_prefill_tokens == len(PROMPT)
    assert [answer.last.prefill_tokens for answer in answers] == [23, *[0] * (n - 1)]
    assert [answer.last.cached_tokens for answer in answers] == [0, *[23] * (n - 1)]


def test_a_fork_of_a_capsule_computes_nothing_of_the_capsule(bench: Any) -> None:
    """F4, D19: zero prefill for the shared part; every branch equals a linear rerun.

    Without a suffix its first token is drawn without a pass.
    """
    bench.run(Prefill("p", pack_tokens(PROMPT)))
    assert bench.answers["p", 0].last.capsule == "p.0"
    assert bench.answers["p", 0].last.boundary == 23
    before = bench.forward.num_tokens
    suffixes = [[30 + i, 40] for i in range(5)]
    bench.run(Fork("f", "p.0", tuple(pack_tokens(s) for s in suffixes), Limits(6), HOT))
    for i, suffix in enumerate(suffixes):
        answer = bench.answers["f", i]
        assert answer.tokens == expect(bench, PROMPT + suffix, 6, HOT, i)
        assert (answer.last.cached_tokens, answer.last.prefill_tokens) == (23, 2)
    assert bench.forward.num_tokens - before == 5 * (2 + 5)  # suffix, and all drawn but the last
    passes = bench.forward.num_passes
    bench.submit(Fork("g", "p.0", (b"", b"", b""), Limits(2), HOT))
    bench.step()
    assert bench.forward.num_passes == passes
    assert all(len(bench.answers["g", i].tokens) == 1 for i in range(3))
    bench.run()
    for i in range(3):
        assert bench.answers["g", i].tokens == expect(bench, PROMPT, 2, HOT, i)
        assert bench.answers["g", i].last.prefill_tokens == 0


def test_a_stop_token_ends_the_branch_and_is_not_part_of_it(bench: Any) -> None:
    tokens = expect(bench, PROMPT, 10, GREEDY)
    stop = tokens[4]
    bench.run(Generate("r", pack_tokens(PROMPT), Limits(10, (stop,)), GREEDY))
    answer = bench.answers["r", 0]
    assert answer.tokens == tokens[: tokens.index(stop)]
    assert answer.last.finish == "stop"
    bench.run(Fork("f", answer.last.capsule, (b"",), Limits(1), GREEDY))
    assert bench.answers["f", 0].tokens == [stop]


def test_end_of_sequence_stops_unless_ignored(make_bench: Callable[..., Any]) -> None:
    plain = make_bench()
    tokens = expect(plain, PROMPT, 10, GREEDY)
    bench = make_bench(eos=(tokens[3],))
    bench.run(
        Generate("a", pack_tokens(PROMPT), Limits(10), GREEDY),
        Generate("b", pack_tokens(PROMPT), Limits(10, ignore_eos=True), GREEDY),
    )
    assert bench.answers["a", 0].tokens == tokens[: tokens.index(tokens[3])]
    assert bench.answers["b", 0].tokens == tokens


def test_a_repeated_prompt_is_found_in_the_cache(bench: Any) -> None:
    """I12, part, F7: identical output with a warm cache; a full hit computes the last block's rest only.

    The same tokens under another salt are computed again.
    """
    for name in ("a", "b"):
        bench.run(Generate(name, pack_tokens(PROMPT), Limits(6), HOT))
    assert bench.answers["a", 0].tokens == bench.answers["b", 0].tokens
    assert bench.answers["b", 0].last.cached_tokens == 20
    assert bench.answers["b", 0].last.prefill_tokens == 3
    bench.run(Generate("c", pack_tokens(PROMPT), Limits(2), HOT, salt="another"))
    assert bench.answers["c", 0].last.cached_tokens == 0


def test_answers_capsules_make_room_before_anyone_is_preempted(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(num_blocks=16)
    for i in range(6):
        bench.run(Generate(f"r{i}", pack_tokens([i] * 13), Limits(8), HOT))
        assert bench.answers[f"r{i}", 0].tokens == expect(bench, [i] * 13, 8, HOT)
    stats = bench.engine.stats()
    assert stats.sched.num_preemptions == 0
    assert stats.capsules.num_replaced > 0
    released = {e.capsule for e in bench.events if isinstance(e, CapsuleReleased)}
    assert "r0.0" in released


def test_a_capsule_that_fills_the_pool_fails_others_clearly(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=8)
    bench.run(Prefill("p", pack_tokens(list(range(28)))))
    bench.run(Generate("r", pack_tokens([1, 2, 3]), Limits(12)))
    assert isinstance(bench.answers["r", 0].error, PoolExhausted)
    bench.run(Release("p.0"))
    bench.run(Generate("s", pack_tokens([1, 2, 3]), Limits(12)))
    assert bench.answers["s", 0].tokens == expect(bench, [1, 2, 3], 12, GREEDY)


ONE = Limits(1)


def ask(limits: Limits = ONE, **fields: Any) -> Generate:
    return Generate("r", pack_tokens([1]), limits, **fields)


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (Generate("r", b"", Limits(1)), InvalidParameter, "at least one token"),
        (Generate("r", pack_tokens([64]), Limits(1)), InvalidParameter, "tokens=64"),
        (ask(Limits(0)), InvalidParameter, "max_tokens=0"),
        (ask(Limits(-3)), InvalidParameter, "max_tokens=-3"),
        (ask(n=0), InvalidParameter, "n=0"),
        (ask(Limits(1 << 21)), ContextLengthExceeded, "max_tokens"),
        (ask(sampling=Sampling(temperature=-1.0)), InvalidParameter, "temperature=-1.0"),
        (ask(sampling=Sampling(top_p=0.0)), InvalidParameter, "top_p=0.0"),
        (ask(Limits(3, min_tokens=4)), InvalidParameter, "min_tokens"),
        (ask(Limits(4, reasoning=ReasoningBudget(1, 64))), InvalidParameter, "reasoning"),
        (ask(Limits(4, reasoning=ReasoningBudget(1, 2, -1))), InvalidParameter, "reasoning"),
        (ask(Limits(4, reasoning=ReasoningBudget(-1, 2))), InvalidParameter, "reasoning"),
        (ask(grammar=Grammar("lark", "start: ")), InvalidParameter, "grammar"),
        (ask(grammar=Grammar("inherit")), InvalidParameter, "grammar"),
        (ask(retain=(RetainSpan(8, 20, 1.0), RetainSpan(16, 30, 1.0))), InvalidParameter, "retain"),
        (ask(retain=(RetainSpan(8, 20, 1.0), RetainSpan(4, 20, 1.0))), InvalidParameter, "retain"),
        (ask(retain=(RetainSpan(8, 101, 1.0),)), InvalidParameter, "retain"),
        (ask(retain=(RetainSpan(8, 1, float("inf")),)), InvalidParameter, "retain"),
        (Prefill("r", pack_tokens([1]), ttl_s=-1.0), InvalidParameter, "ttl_s"),
        (Prefill("r", pack_tokens([1]), ttl_s=float("nan")), InvalidParameter, "ttl_s"),
        (Fork("r", "no.0", (b"",), Limits(1)), UnknownCapsule, "no.0"),
        (Release("no.0"), UnknownCapsule, "no.0"),
    ],
)
def test_bad_commands_come_back_as_errors(
    bench: Any, command: Any, error: type[Exception], text: str
) -> None:
    """D9, part: they name the field, and no block was touched."""
    bench.run(command)
    name = command.capsule if isinstance(command, Release) else "r"
    answer = bench.answers[name, -1]
    assert isinstance(answer.error, error)
    assert text in str(answer.error)
    assert bench.engine.stats().pool.num_allocs == 0
    bench.run(Generate("ok", pack_tokens([1]), Limits(1)))
    assert len(bench.answers["ok", 0].tokens) == 1


def test_a_request_id_is_used_once(bench: Any) -> None:
    """Nor by another gateway, nor once its request is over and has left a capsule."""
    bench.submit(Generate("r", pack_tokens(PROMPT), Limits(4), n=2))
    bench.submit(Generate("r", pack_tokens(PROMPT), Limits(4)))
    bench.submit(Generate("r", pack_tokens(PROMPT), Limits(4)), gateway="other")
    bench.run(Prefill("p", pack_tokens(PROMPT)))
    (error,) = bench.untold
    assert isinstance(error, InvalidParameter)
    assert [update.branch for update in bench.gateways["other"]] == [-1]
    assert all(u.branch >= 0 for u in bench.gateways["g"]), "else the request that runs would end"
    assert len(bench.answers["r", 0].tokens) == 4
    for command in (
        Prefill("p", pack_tokens(PROMPT)),
        Generate("r", pack_tokens(PROMPT), Limits(2)),
        Fork("r", "p.0", (b"", b""), Limits(2)),
    ):
        bench.answers.clear()
        bench.run(command)
        assert isinstance(bench.answers[command.request, -1].error, InvalidParameter)
    assert bench.engine.stats().capsules.kept == 1


def test_the_queue_has_a_limit(make_bench: Callable[..., Any]) -> None:
    """F30, part: too many waiting requests are refused with the limit."""
    bench = make_bench(max_waiting=2)
    for i in range(3):
        bench.submit(Generate(f"r{i}", pack_tokens([1]), Limits(1)))
    bench.run()
    assert isinstance(bench.answers["r2", -1].error, QueueFull)
    assert bench.answers["r1", 0].last.finish == "length"


def test_a_cancelled_branch_ends_at_once_and_frees_its_blocks(bench: Any) -> None:
    """F20, part: cancel takes effect at the next committed boundary; blocks are freed."""
    bench.submit(Generate("r", pack_tokens(PROMPT), Limits(990), HOT, n=3))
    for _ in range(5):
        bench.step()
    bench.submit(Cancel("r", 1))
    bench.step()
    assert bench.answers["r", 1].last.finish == "cancelled"
    bench.submit(Cancel("r"))
    bench.run()
    assert bench.answers["r", 0].last.finish == "cancelled"
    assert bench.engine._tree.num_available == 256
    for branch in range(3):
        tokens = bench.answers["r", branch].tokens
        assert tokens == expect(bench, PROMPT, len(tokens), HOT, branch)


def test_a_lost_gateway_frees_its_branches_and_keeps_its_capsules(bench: Any) -> None:
    bench.run(Prefill("p", pack_tokens(PROMPT)))
    bench.submit(Generate("a", pack_tokens(PROMPT), Limits(100)), gateway="lost")
    bench.submit(Generate("b", pack_tokens(PROMPT), Limits(9)), gateway="other")
    bench.step()
    bench.engine.drop_gateway("lost")
    bench.engine.check()
    bench.run()
    assert "lost" not in bench.gateways or all(u.finish is None for u in bench.gateways["lost"])
    assert bench.answers["b", 0].tokens == expect(bench, PROMPT, 9, GREEDY)
    bench.run(Fork("f", "p.0", (b"",), Limits(1)))
    assert bench.answers["f", 0].last.finish == "length"


def test_a_capsule_with_a_time_to_live_ends_when_it_is_not_used(bench: Any) -> None:
    bench.run(Prefill("p", pack_tokens(PROMPT), ttl_s=10.0))
    bench.now += 9
    bench.run(Fork("f", "p.0", (b"",), Limits(1)))  # a use: the clock starts again
    bench.now += 9
    assert not bench.engine.has_work
    bench.now += 2
    bench.run()
    assert CapsuleReleased("p.0") in bench.events
    bench.run(Fork("g", "p.0", (b"",), Limits(1)))
    assert isinstance(bench.answers["g", -1].error, UnknownCapsule)


def test_events_and_snapshot_tell_what_is_held(bench: Any) -> None:
    """K16, part: stored runs and capsules, numbered from 0 in each incarnation."""
    bench.run(Prefill("p", pack_tokens(PROMPT)))
    hashes = block_hashes(PROMPT, 4, salt=bench.forward.spec.salt())
    (capsule,) = [e for e in bench.events if isinstance(e, CapsuleStored)]
    assert capsule.boundary == 23
    assert unpack_hashes(capsule.hashes).tolist() == hashes.tolist()
    snapshot = bench.engine.snapshot()
    assert set(unpack_hashes(snapshot.hashes).tolist()) == set(hashes.tolist())
    assert snapshot.capsules == (capsule,)
    assert snapshot.next_seq == bench.engine.next_seq == len(bench.events)


def test_siblings_of_a_cancelled_prefill_go_on_without_it(bench: Any) -> None:
    """X2, part: bounded damage if the one that computes for all goes away."""
    prefix = [i % 60 for i in range(100)]
    for i in range(3):
        bench.submit(Generate(f"r{i}", pack_tokens([*prefix, i]), Limits(4), HOT))
    bench.step()
    bench.step()
    assert bench.engine.stats().sched.waiting == 2
    bench.run(Cancel("r0"))
    for i in (1, 2):
        assert bench.answers[f"r{i}", 0].tokens == expect(bench, [*prefix, i], 4, HOT)
    assert bench.engine.stats().num_prefill_tokens < 2 * len(prefix)


def test_other_prompts_overtake_those_that_wait_for_a_sibling(bench: Any) -> None:
    prefix = [i % 60 for i in range(100)]
    for i in range(2):
        bench.submit(Generate(f"r{i}", pack_tokens([*prefix, i]), Limits(4), HOT))
    bench.submit(Generate("other", pack_tokens([5, 6]), Limits(1), HOT))
    for _ in range(8):
        bench.step()
    assert bench.answers["other", 0].last.finish == "length"


def test_forks_do_not_starve_a_request_that_has_to_compute(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_rows=8)
    bench.run(Prefill("p", pack_tokens(PROMPT)))
    bench.submit(Generate("cold", pack_tokens([5] * 30), Limits(2), HOT))
    for i in range(40):
        bench.submit(Fork(f"f{i}", "p.0", (b"",) * 8, Limits(4), HOT))
        bench.step()
        last = bench.answers.get(("cold", 0))
        if last is not None and last.last.finish == "length":
            break
    else:
        raise AssertionError("starved for 40 steps")
    bench.run()
    assert bench.answers["f0", 7].tokens == expect(bench, PROMPT, 4, HOT, 7)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"sampling": Sampling(temperature=-1.0)}, {"sampling": Sampling()}),
        ({"sampling": Sampling(logit_bias=((1 << 30, 1.0),))}, {"sampling": Sampling()}),
        ({"share": Share(weight=-1.0)}, {"share": Share()}),
    ],
)
def test_what_is_wrong_is_refused_every_time(
    make_bench: Callable[..., Any], wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    """The check is skipped for the very same object, unless that is wrong; twice, too."""
    bench = make_bench()
    for i, options in enumerate([wrong, wrong, right, right, wrong, right]):
        bench.run(Generate(f"r{i}", pack_tokens(PROMPT), Limits(3), **options))
        answer = bench.answers.get((f"r{i}", -1))
        is_refused = answer is not None and isinstance(answer.error, InvalidParameter)
        assert is_refused == (options is wrong)


# Equal steps, and what a tight pool costs


@pytest.mark.parametrize("policy", ["fair", "fcfs", "prefill_first", "decode_round_robin"])
def test_equal_commands_between_equal_steps_give_equal_events(
    make_bench: Callable[..., Any], policy: str
) -> None:
    """I18: same seed and queue, same log; with sessions, priorities and preemption."""
    logs = []
    for _ in range(2):
        rng = random.Random(7)
        sched = {"order": make_order(policy), "ageing_steps": 12}
        bench = make_bench(num_blocks=24, max_rows=5, sched=sched)
        for i in range(30):
            share = Share(rng.choice("abc"), rng.choice([0.5, 2.0]), rng.randint(0, 2))
            tokens = pack_tokens([rng.randrange(4) for _ in range(rng.randint(1, 30))])
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
        bench.submit(Generate(f"r{i}", pack_tokens([i % 60] * (20 + i % 7)), Limits(24)))
    bench.run()
    assert all(len(answer.tokens) == 24 for answer in bench.answers.values())
    assert bench.engine.stats().sched.num_preemptions <= most


def test_what_can_never_fit_is_refused_with_all_the_numbers(make_bench: Callable[..., Any]) -> None:
    """S3, part: prefix, longest branch and headroom, before any block is taken."""
    bench = make_bench(num_blocks=12, max_model_len=1000, sched={"headroom_tokens": 8})
    bench.run(Prefill("p", pack_tokens([1] * 21)))
    allocated = bench.engine.stats().pool.num_allocs
    bench.run(Fork("f", "p.0", (b"", pack_tokens([2] * 10)), Limits(7)))
    error = bench.answers["f", -1].error
    assert isinstance(error, KVBudgetExceeded)
    assert error.fields["needed"] == 13  # 21 + 10 + 6 + 8 tokens, and a copy of a block
    assert "prefix 31 + branch 7 + headroom 8 = 46 tokens" in str(error)
    assert bench.engine.stats().pool.num_allocs == allocated
    bench.run(Fork("h", "p.0", (b"", pack_tokens([2] * 2)), Limits(7)))
    assert len(bench.answers["h", 1].tokens) == 7


def test_the_engine_tells_what_a_sequence_takes_up(bench: Any) -> None:
    """S9: asked from the engine; equal to what it takes from the pool."""
    spec = bench.forward.spec
    for i, n in enumerate((1, 4, 5, 63)):
        before = bench.engine.stats().pool
        bench.run(Prefill(f"p{i}", pack_tokens([i * 7 + 1] + [i] * (n - 1))))
        blocks = bench.engine.stats().pool.num_allocs - before.num_allocs
        assert bench.engine.kv_bytes(n) == blocks * 4 * spec.kv_bytes_per_token


# Steps that the device has too little memory for


def tighten(bench: Any, *, tokens: int, draws: int) -> None:
    """Have the forward of `bench` refuse larger steps, before or after it wrote some of their KV."""
    forward, sample = bench.forward.forward, bench.forward.sample

    def tight(batch: ForwardBatch) -> Sequence[Logits]:
        num = sum(len(row.tokens) for row in batch.rows)
        if num > tokens:
            forward(batch._replace(rows=batch.rows[:1]))  # a part of it was computed
            raise DeviceMemoryExhausted(f"Tried to allocate {num} GiB")
        return forward(batch)

    def tight_sample(given: Sequence[Draw]) -> list[int]:
        if len(given) > draws:
            raise DeviceMemoryExhausted("Tried to allocate")
        return sample(given)

    bench.forward.forward, bench.forward.sample = tight, tight_sample


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12),
    children=st.integers(1, 3),
    tokens=st.integers(1, 24),
    draws=st.integers(1, 8),
    num_blocks=st.integers(20, 60),  # room for the largest prompt with its children by itself
)
def test_every_answer_is_whole_and_right_or_ends_with_the_error(
    make_bench: Callable[..., Any],
    prompts: list[list[int]],
    children: int,
    tokens: int,
    draws: int,
    num_blocks: int,
) -> None:
    """I26, part: shared prefixes, siblings, preemption; all invariants hold after every step."""
    bench = make_bench(num_blocks=num_blocks, max_rows=8, max_step_tokens=24)
    tighten(bench, tokens=tokens, draws=draws)
    for i, prompt in enumerate(prompts):
        bench.submit(Generate(f"r{i}", pack_tokens(prompt), Limits(6), HOT, children))
        if i % 3 == 0:
            bench.step()
    bench.run(max_steps=3000)
    assert bench.engine.stats().jobs == 0
    for i, prompt in enumerate(prompts):
        for branch in range(children):
            key = (f"r{i}", branch)
            answer = bench.answers[key if key in bench.answers else (f"r{i}", -1)]  # all at once
            whole = expect(bench, prompt, 6, HOT, branch)
            assert answer.tokens == whole[: len(answer.tokens)]
            if answer.last.error is None:
                assert answer.tokens == whole
            else:
                error = from_wire(answer.last.error)
                assert isinstance(error, DeviceMemoryExhausted)
                assert error.status == 503
                assert "lower scheduler.max_step_tokens" in str(error)
                assert error.client_message.endswith("with this request; send it again")
