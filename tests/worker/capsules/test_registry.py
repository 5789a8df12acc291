"""Capsules' share of the pool, and faults of the KV memory."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bench.doubles.forward import MockForward, linear_tokens
from bench.doubles.random_model import random_model
from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.errors import CapsulesFull, CorruptKV, MalleeError
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import (
    Cancel,
    Command,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive, engine_over

LIMITS = Limits(4, ignore_eos=True)


def refusal(bench: Any, request: str) -> MalleeError | None:
    answer = bench.answers.get((request, -1))
    error: MalleeError | None = answer.error if answer else None
    return error


def prefill(bench: Any, name: str, tokens: list[int]) -> None:
    bench.run(Prefill(name, pack_tokens(tokens)))


def test_capsules_may_keep_their_share_of_the_pool_and_no_more(
    make_bench: Callable[..., Any],
) -> None:
    """D37, part, I12, part, I26: refused before anything is computed, with the numbers.

    Others still find room, and whatever passes through the pool evicts none that is kept.
    """
    bench = make_bench(num_blocks=20, max_kept_share=0.5)
    prefill(bench, "a", list(range(20)))
    prefill(bench, "b", list(range(30, 50)))
    computed = bench.forward.num_tokens
    prefill(bench, "c", [60])
    error = refusal(bench, "c")
    assert isinstance(error, CapsulesFull)
    assert "1 KV blocks to keep in a capsule, but 10 of the 10 that capsules may keep" in str(error)
    assert bench.forward.num_tokens == computed
    for i in range(20):
        bench.run(Generate(f"g{i}", pack_tokens([i, *range(30)]), LIMITS))
        assert len(bench.answers[f"g{i}", 0].tokens) == 4
    computed = bench.forward.num_tokens
    bench.run(Fork("f", "a.0", (b"",), Limits(1, ignore_eos=True)))
    assert len(bench.answers["f", 0].tokens) == 1
    assert bench.forward.num_tokens == computed
    bench.run(Release("a.0"))
    prefill(bench, "d", [60])
    assert refusal(bench, "d") is None


def test_what_capsules_share_is_counted_once(make_bench: Callable[..., Any]) -> None:
    """D37, part: ten capsules on one long prefix."""
    bench = make_bench(num_blocks=40, max_kept_share=0.5)
    prefix = list(range(40))
    for i in range(10):
        prefill(bench, f"p{i}", [*prefix, 50 + i])
        assert refusal(bench, f"p{i}") is None
    assert bench.engine.stats().capsules.kept == 10
    prefill(bench, "more", [*prefix, 61])
    assert isinstance(refusal(bench, "more"), CapsulesFull)


def test_what_is_being_computed_for_a_capsule_counts_too(make_bench: Callable[..., Any]) -> None:
    """D37, part: two that fit one by one, but not together; the room of a cancelled one is free again."""
    bench = make_bench(num_blocks=20, max_kept_share=0.5)
    bench.submit(Prefill("a", pack_tokens(list(range(24)))))
    bench.submit(Prefill("b", pack_tokens(list(range(30, 54)))))
    bench.step()
    assert isinstance(refusal(bench, "b"), CapsulesFull)
    bench.run(Cancel("a"))
    prefill(bench, "c", list(range(30, 54)))
    assert refusal(bench, "c") is None


@pytest.mark.parametrize("slot", [(0, 1), (4, 1)], ids=["sealed block", "open block"])
def test_a_fork_of_a_capsule_whose_bytes_changed_is_refused(
    make_bench: Callable[..., Any], slot: tuple[int, int]
) -> None:
    """D20: digests are verified when a capsule is used; never a wrong token."""
    bench = make_bench(kv_checks=KVChecks("digests", sweep_steps=1000))
    prefill(bench, "p", list(range(18)))
    table = bench.engine._tree.table(bench.engine._capsules.get("p.0").node)
    bench.forward.kv[table[4], 3] = 99  # not filled: nobody's
    bench.run(Fork("early", "p.0", (b"",), LIMITS))
    assert refusal(bench, "early") is None
    bench.forward.kv[table[slot[0]], slot[1]] ^= 1
    bench.run(Fork("f", "p.0", (b"",), LIMITS))
    error = refusal(bench, "f")
    assert isinstance(error, CorruptKV)
    assert f"block {table[slot[0]]} changed after it was sealed" in str(error)
    assert error.fields["stories"][0].startswith(f"block {table[slot[0]]}: allocated at step ")


def test_a_forward_that_writes_through_a_stale_table_is_caught_and_named(
    make_bench: Callable[..., Any],
) -> None:
    """D20: planted: the block of a released answer is written to once more; who had it last is named."""
    bench = make_bench(num_blocks=16, max_answer_capsules=0, kv_checks=KVChecks("canaries"))
    bench.run(Generate("old", pack_tokens([1, 2]), Limits(1, ignore_eos=True)))
    bench.forward.kv[0, 1] = 4711
    bench.submit(Generate("new", pack_tokens([3, 4]), LIMITS))
    with pytest.raises(CorruptKV, match="block 0 was written to while it was free") as caught:
        bench.engine.step()
    assert "freed at step 0 by Node(" in str(caught.value)


def test_a_forward_that_runs_over_the_end_of_a_block_is_caught_and_named(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D21: planted: every row writes one token more than it was given room for."""
    bench = make_bench(kv_checks=KVChecks("guards"))
    forward = bench.forward.forward

    def overrun(batch: Any) -> Any:
        logits = forward(batch)
        for row in batch.rows:
            end = row.start + len(row.tokens)
            slots = bench.forward.kv.reshape(-1)
            slots[row.table[(end - 1) // 4] * 4 + (end - 1) % 4 + 1] = 7
        return logits

    monkeypatch.setattr(bench.forward, "forward", overrun)
    bench.submit(Generate("g", pack_tokens([1, 2, 3, 4]), LIMITS))
    with pytest.raises(
        CorruptKV, match="a write ran over the end of block 1, or began before block 3"
    ):
        bench.engine.step()


def test_children_leave_every_byte_of_their_parent_alone() -> None:
    """D2, D3: forks and appends on a real model; the parent's next tokens are what they were."""
    forward = random_model("llama", 1).forward(num_blocks=64, block_size=4)
    engine = engine_over(forward)

    def run(*commands: Command) -> list[int]:
        for command in commands:
            engine.submit(command, "g")
        return [token for tokens, _ in drive(engine).values() for token in tokens]

    run(Prefill("p", pack_tokens(list(range(3, 21)))))
    table = engine._tree.table(engine._capsules.get("p.0").node)

    def parent_bytes() -> list[int]:
        whole = [forward.memory.digest(int(block), 4) for block in table[:-1]]
        return [*whole, forward.memory.digest(int(table[-1]), 2)]

    before, first = parent_bytes(), run(Fork("a", "p.0", (b"",), LIMITS))
    free = engine.stats().pool.free
    engine.submit(Fork("b", "p.0", tuple(pack_tokens([i]) for i in range(3, 9)), LIMITS), "g")
    assert engine.stats().pool.free == free
    run()
    assert parent_bytes() == before
    assert run(Fork("c", "p.0", (b"",), LIMITS)) == first


def test_checks_find_nothing_on_a_real_model_and_flipped_bits_at_once() -> None:
    """D20, D21: canaries, guards and digests over the bytes of a torch model's KV."""
    forward = random_model("llama", 1).forward(num_blocks=9, block_size=4)
    memory = forward.memory
    memory.fill(range(9))
    assert all(memory.is_filled(block) for block in range(9))
    forward._memory[1, 3 * 4 + 2, 0, 0, 0] = 1.0
    assert [block for block in range(9) if not memory.is_filled(block)] == [3]
    whole, part = memory.digest(3, 4), memory.digest(3, 2)
    forward._memory[1, 3 * 4 + 2, 1, 1, 5] += 1.0
    assert memory.digest(3, 4) != whole
    assert memory.digest(3, 2) == part
    assert bool(forward._memory.isfinite().all())  # unfilled slots are read, with weight 0


def test_a_kept_capsule_pays_for_its_logits(make_bench: Callable[..., Any]) -> None:
    """D37, part: a row of logits is charged as the blocks that have as many bytes."""
    bench = make_bench(num_blocks=40, max_kept_share=0.5, row_blocks=3)
    for i in range(5):
        prefill(bench, f"p{i}", [i])  # a block each, and three for its logits
        assert refusal(bench, f"p{i}") is None
    prefill(bench, "more", [9])
    assert isinstance(refusal(bench, "more"), CapsulesFull)
    bench.run(Release("p0.0"))
    prefill(bench, "again", [9])
    assert refusal(bench, "again") is None


def test_an_answer_leaves_no_logits_behind(make_bench: Callable[..., Any]) -> None:
    """D37, part: also one that ended itself; a fork of it computes the row again and draws the same."""
    tokens = list(range(6))
    spec = mock_spec()
    first = linear_tokens(spec, tokens, 1, sampling=Sampling(), seed=0)[0]
    bench = make_bench()
    bench.run(Generate("r", pack_tokens(tokens), Limits(8, stop_token_ids=(first,))))
    assert bench.answers["r", 0].last.finish == "stop"
    (capsule,) = bench.engine._capsules
    assert capsule.logits is None
    bench.run(Fork("f", capsule.id, (b"", b"", pack_tokens([5])), Limits(3)))
    again = linear_tokens(spec, tokens, 3, sampling=Sampling(), seed=0)
    assert bench.answers["f", 0].tokens == bench.answers["f", 1].tokens == again
    other = linear_tokens(spec, [*tokens, 5], 3, sampling=Sampling(), seed=0)
    assert bench.answers["f", 2].tokens == other


def test_a_prompt_that_can_not_fit_leaves_answers_their_capsules(
    make_bench: Callable[..., Any],
) -> None:
    """D37, part: capsules are given up where that makes room, and for nothing else."""
    bench = make_bench(num_blocks=204, max_step_tokens=64)
    for i in range(20):
        bench.run(Generate(f"r{i}", pack_tokens([i] * 6), Limits(3)))
    assert bench.engine.stats().capsules.replaceable == 20
    bench.submit(Generate("runs", pack_tokens([40] * 60), Limits(400)))
    bench.step()
    bench.submit(Generate("large", pack_tokens(list(range(60)) * 13), Limits(1)))
    for _ in range(30):
        bench.step()
        assert bench.engine.stats().capsules.replaceable == 20
    bench.run()
    assert bench.answers["large", 0].last.finish == "length"


# Capsules without a budget: none is kept, every text is computed, and all else is as before

MODEL = mock_spec(vocab_size=64, max_model_len=4096)
NUM_REQUESTS = 60


def requests(seed: int, keep_s: float | None = None) -> list[Generate]:
    """Prompts that share beginnings, of which every third one's answer is to be kept."""
    rng = random.Random(seed)
    texts = [[rng.randrange(64) for _ in range(40)] for _ in range(3)]
    return [
        Generate(
            f"r{i}",
            pack_tokens([*rng.choice(texts)[: rng.randrange(1, 40)], i]),
            Limits(rng.randrange(1, 24)),
            Sampling(rng.choice([0.0, 0.8]), seed=i),
            keep_s=keep_s if i % 3 == 0 else None,
        )
        for i in range(NUM_REQUESTS)
    ]


def run_with(max_kept_share: float, *commands: Command) -> tuple[Engine, list[StepResult]]:
    """All steps of an engine with too few rows and blocks, which gets two commands a step."""
    engine = engine_over(
        MockForward(MODEL, num_blocks=34, block_size=4),
        config=EngineConfig(SchedulerConfig(16, 8), 0, max_kept_share),
    )
    results = []
    for i, command in enumerate(commands):
        engine.submit(command, "g")
        if i % 2:
            results.append(engine.step())
    while engine.has_work:
        results.append(engine.step())
        engine.check()
    return engine, results


def test_a_budget_of_zero_changes_no_byte_of_the_default_path() -> None:
    """F8: frames and events, encoded, are those of the default budget, that nothing asks for."""
    engine, results = run_with(0.0, *requests(1))
    assert engine.stats().tree.num_evicted
    default = run_with(EngineConfig().max_kept_share, *requests(1))[1]
    assert [encode([*each]) for each in results] == [encode([*each]) for each in default]


def test_a_budget_of_zero_keeps_nothing_and_serves_everything_cold() -> None:
    """F8: each refusal is told and counted, and no other field of an update is changed by it."""
    engine, results = run_with(0.0, *requests(2, keep_s=0.0))
    updates = [u for r in results for frame in r.frames.values() for u in frame.updates]
    refused = {update.request for update in updates if update.kept == "refused"}
    assert refused == {f"r{i}" for i in range(0, NUM_REQUESTS, 3)}
    assert not any(update.capsule for update in updates)
    stats = engine.stats().capsules
    assert (stats.kept, stats.num_refused) == (0, len(refused))
    plain = [
        u for r in run_with(0.0, *requests(2))[1] for f in r.frames.values() for u in f.updates
    ]
    assert [msgspec.structs.replace(update, kept="") for update in updates] == plain
    for request in requests(2):
        tokens = [
            t for update in updates if update.request == request.request for t in update.tokens
        ]
        sampling, num = request.sampling, request.limits.max_tokens
        prompt = list(memoryview(request.tokens).cast("I"))
        seed = branch_seed(sampling.seed, 0)
        assert tokens == linear_tokens(MODEL, prompt, num, sampling=sampling, seed=seed)
