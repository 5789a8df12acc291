"""Capsules that go down to host memory and to a real disk and come back, beside the engine's thread."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    Sampling,
    pack_tokens,
)
from mallee.testing.random_model import random_model
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.paths import flatten_windows
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import DISK, HOST, Copier, ThreadedMover
from mallee.worker.kv.tiers.prices import MeasuredPrices
from mallee.worker.kv.watch import KVChecks, KVMemory
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume, VolumeConfig

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")

NUM = 64
PROMPT = [3 + i * 7 % 100 for i in range(77)]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(1.0, seed=11)}
LIMITS = Limits(NUM, ignore_eos=True)


def engine_over(forward: TorchForward, folder: Path, life: int = 1) -> Engine:
    """An engine with 40 blocks of host memory and a disk in `folder`, both moved by threads."""

    def below(journal: Journal, memory: KVMemory) -> LowerTiers:
        volume = Volume.open(
            Directory(folder), {"fingerprint": "f"}, memory.block_nbytes, VolumeConfig(1 << 30)
        )
        arena = np.zeros((40, memory.block_nbytes), np.uint8)
        copier = Copier(memory, arena, volume, time.monotonic)
        prices = MeasuredPrices(memory.block_nbytes)
        mover = ThreadedMover(copier, "w0")
        return LowerTiers(journal, copier, prices=prices, mover=mover, always_fetches=True)

    return Engine(
        forward,
        config=EngineConfig(SchedulerConfig(16, 32), 0, kv_checks=KVChecks("guards")),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(life),
        structures=MockStructures(128, (2,)),
        below=below,
    )


def run(engine: Engine, *commands: Command) -> dict[str, list[int]]:
    """Tokens by request, once nothing is left to do or under way."""
    tokens: dict[str, list[int]] = {}
    for command in commands:
        engine.submit(command, "g")
    deadline = time.monotonic() + 30
    assert engine._lower is not None
    while (engine.has_work or engine._lower.num_moving) and time.monotonic() < deadline:
        if not engine.has_work:
            time.sleep(1e-4)
            continue
        for frame in engine.step().frames.values():
            assert all(reply.error is None for reply in frame.replies), frame.replies
            for update in frame.updates:
                assert update.error is None, update.error
                tokens.setdefault(update.request, []).extend(update.tokens)
    engine.check()
    return tokens


def kv_bytes(engine: Engine, forward: TorchForward) -> bytes:
    """The bytes of the KV of capsule p.0: of its tokens' slots alone, in windows of those that are read."""
    capsule = engine._capsules.peek("p.0")
    assert capsule is not None
    assert capsule.node is not None
    tables = (engine._tree.table(capsule.node), *flatten_windows(capsule.node, forward.block_size))
    windows = [None, *(group.window for group in forward.spec.windows)]
    found = []
    for table, window, memory in zip(tables, windows, forward._memories, strict=True):
        begin = 0 if window is None else max(0, len(PROMPT) - window + 1)
        size = forward.block_size
        slots = [int(table[i // size]) * size + i % size for i in range(begin, len(PROMPT))]
        found.append(memory.view(torch.uint8)[:, slots].numpy().tobytes())
    return b"".join(found)


def flood(engine: Engine, name: str) -> None:
    """Overwrite every block that is only cache."""
    size = engine.stats().pool.total * 4 - 8
    run(engine, Generate(name, pack_tokens([3 + i % 90 for i in range(size)]), Limits(2)))


@pytest.mark.parametrize("way", SAMPLINGS)
@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    [
        ("llama", "float32", "auto"),
        ("llama", "bfloat16", "auto"),
        ("llama", "float32", "fp8"),
        ("qwen3", "float32", "auto"),
        ("qwen3", "bfloat16", "fp8"),
        ("gemma3_text", "float32", "auto"),
        ("gemma3_text", "bfloat16", "fp8"),
    ],
)
def test_a_capsule_goes_to_every_tier_and_back_bit_by_bit(
    kind: str, dtype: str, kv_dtype: str, way: str, tmp_path: Path
) -> None:
    """F14, F6, part, F24, part, S8, part: fp32, bf16 and FP8 KV; the fork draws what a whole run draws."""
    sampling = SAMPLINGS[way]

    def forward() -> TorchForward:
        changes = {"sliding_window": 10} if kind == "gemma3_text" else {}
        return random_model(kind, 5, **changes).forward(
            num_blocks=121, block_size=4, dtype=dtype, kv_dtype=kv_dtype
        )

    def forked(engine: Engine, name: str) -> list[int]:
        return run(engine, Fork(name, "p.0", (b"",), LIMITS, sampling))[name]

    first = forward()
    engine = engine_over(first, tmp_path)
    run(engine, Prefill("p", pack_tokens(PROMPT)))
    whole = forked(engine, "f0")
    before = kv_bytes(engine, first)
    for i, tier in enumerate((HOST, DISK)):
        run(engine, Demote(f"d{i}", "p.0", tier))
        assert engine.usage().live_blocks == 0
        flood(engine, f"flood{i}")
        computed = engine.stats().num_prefill_tokens
        run(engine, Promote(f"u{i}", "p.0"))
        assert kv_bytes(engine, first) == before
        assert engine.stats().num_prefill_tokens == computed
        assert forked(engine, f"f{i + 1}") == whole
    engine.close()
    fresh = forward()
    again = engine_over(fresh, tmp_path, life=2)
    run(again, Promote("u", "p.0"))
    assert kv_bytes(again, fresh) == before
    assert again.stats().num_prefill_tokens == 0
    assert forked(again, "f") == whole
    again.close()
