"""Capsules without a budget: none is kept, every text is computed, and all else is as before."""

import random

import msgspec

from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Command, Generate, Limits, Sampling, pack_tokens
from mallee.testing.forward import MockForward, linear_tokens
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import engine_over

SPEC = mock_spec(vocab_size=64, max_model_len=4096)
NUM = 60


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
        for i in range(NUM)
    ]


def run(max_kept_share: float, *commands: Command) -> tuple[Engine, list[StepResult]]:
    """All steps of an engine with too few rows and blocks, which gets two commands a step."""
    engine = engine_over(
        MockForward(SPEC, num_blocks=34, block_size=4),
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
    engine, results = run(0.0, *requests(1))
    assert engine.stats().tree.num_evicted
    default = run(EngineConfig().max_kept_share, *requests(1))[1]
    assert [encode([*each]) for each in results] == [encode([*each]) for each in default]


def test_a_budget_of_zero_keeps_nothing_and_serves_everything_cold() -> None:
    """F8: each refusal is told and counted, and no other field of an update is changed by it."""
    engine, results = run(0.0, *requests(2, keep_s=0.0))
    updates = [u for r in results for frame in r.frames.values() for u in frame.updates]
    refused = {update.request for update in updates if update.kept == "refused"}
    assert refused == {f"r{i}" for i in range(0, NUM, 3)}
    assert not any(update.capsule for update in updates)
    stats = engine.stats().capsules
    assert (stats.kept, stats.num_refused) == (0, len(refused))
    plain = [u for r in run(0.0, *requests(2))[1] for f in r.frames.values() for u in f.updates]
    assert [msgspec.structs.replace(update, kept="") for update in updates] == plain
    for request in requests(2):
        tokens = [
            t for update in updates if update.request == request.request for t in update.tokens
        ]
        sampling, num = request.sampling, request.limits.max_tokens
        prompt = list(memoryview(request.tokens).cast("I"))
        seed = branch_seed(sampling.seed, 0)
        assert tokens == linear_tokens(SPEC, prompt, num, sampling=sampling, seed=seed)
