"""Trees of forks in an engine over each model family and over float8 KV equal linear reruns."""

import random
from typing import Any

import pytest

from mallee.protocol.ids import branch_seed
from mallee.protocol.messages import Fork, Generate, Limits, Prefill, Sampling, pack_tokens
from mallee.testing.random_model import RandomModel, random_model
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive, engine_over

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "qwen3": (random_model("qwen3", 3), "auto"),
    "gemma3": (random_model("gemma3_text", 3), "auto"),
    "llama-fp8": (random_model("llama", 3), "fp8"),
    "gemma3-fp8": (random_model("gemma3_text", 3), "fp8"),
}


def make_engine(model: RandomModel, kv_dtype: str, chunk: int) -> Engine:
    return engine_over(
        model.forward(num_blocks=120, block_size=4, kv_dtype=kv_dtype),
        config=EngineConfig(SchedulerConfig(chunk, 32), 32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_branch_equals_a_linear_rerun_beyond_the_window(
    kind: str, temperature: float
) -> None:
    """D19, D31, part, I1: prompts in chunks, forks in mid-block, three levels deep; greedy and sampled."""
    model, kv_dtype = KINDS[kind]
    rng = random.Random(kind)
    engine = make_engine(model, kv_dtype, chunk=16)
    text = [rng.randrange(128) for _ in range(37)]
    engine.submit(Prefill("p", pack_tokens(text)), "g")
    drive(engine)
    capsule = "p.0"
    for level in range(3):
        suffixes = [[rng.randrange(128) for _ in range(n)] for n in (0, 1, 5)]
        seed = rng.randrange(1 << 64)
        packed = tuple(pack_tokens(suffix) for suffix in suffixes)
        limits, drawn = Limits(9, ignore_eos=True), Sampling(temperature, seed=seed)
        engine.submit(Fork(f"f{level}", capsule, packed, limits, drawn), "g")
        answers = drive(engine)
        for i, suffix in enumerate(suffixes):
            alone = make_engine(model, kv_dtype, chunk=512)
            own = Sampling(temperature, seed=branch_seed(seed, i))
            alone.submit(Generate("r", pack_tokens(text + suffix), limits, own), "g")
            assert answers[f"f{level}", i][0] == drive(alone)["r", 0][0]
        tokens, last = answers[f"f{level}", 2]
        text, capsule = text + suffixes[2] + tokens, last.capsule
    assert len(text) == 37 + 3 * (5 + 9)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_bytes_that_an_engine_counts_are_those_that_are_allocated(kv_dtype: str) -> None:
    """S9, I22, D31, part: 2 x layers x kv heads x head_dim x tokens x bytes, for whole blocks."""
    engine = make_engine(KINDS["gemma3"][0], kv_dtype, chunk=16)
    forward: Any = engine._forward
    assert engine.kv_bytes(120 * 4) == forward.stats().kv_nbytes
    assert engine.kv_bytes(5) == 8 * 2 * 4 * 2 * 16 * (1 if kv_dtype == "fp8" else 4)
