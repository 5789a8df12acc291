"""Capsules that go down to host memory and to a real disk and come back, beside the engine's thread."""

from pathlib import Path

import pytest

from mallee.protocol.ids import CapsuleId, Incarnation
from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    pack_tokens,
)
from mallee.testing.structures import MockStructures
from mallee.worker.engine import Engine
from mallee.worker.kv.watch import KVChecks
from mallee.worker.model.runner import TorchForward
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.values import DISK, HOST
from support.driving import engine_over
from support.exact_capsules import (
    CASES,
    CUTS,
    LIMITS,
    PROMPT,
    WAYS,
    drawn_with_captures,
    kv_bytes,
    tiny_forward,
)
from support.run_out import run_out
from support.volumes import volume_tiers

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


def engine_in(forward: TorchForward, folder: Path, life: int = 1) -> Engine:
    """An engine with 60 blocks of host memory and a disk in `folder`, both moved by threads."""
    return engine_over(
        forward,
        config=EngineConfig(SchedulerConfig(16, 32), 0, kv_checks=KVChecks("guards")),
        incarnation=Incarnation(life),
        structures=MockStructures(128, (2,)),
        below=volume_tiers(folder, host_blocks=60),
    )


def run(engine: Engine, *commands: Command) -> dict[str, list[int]]:
    """Tokens by request, once nothing is left to do or under way."""
    tokens, replies = run_out(engine, *commands)
    assert all(reply.error is None for reply in replies), replies
    return tokens


def flood(engine: Engine, name: str) -> None:
    """Overwrite every block that is only cache."""
    size = engine.stats().pool.total * 4 - 8
    run(engine, Generate(name, pack_tokens([3 + i % 90 for i in range(size)]), Limits(2)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "kv_dtype", "way"), CASES)
def test_a_capsule_goes_to_every_tier_and_back_bit_by_bit(
    kind: str, dtype: str, kv_dtype: str, way: str, tmp_path: Path
) -> None:
    """F14, F6, part, F24, part, S8, part: fp32, bf16 and FP8 KV; a prompt's capsule, and a running branch's.

    The fork and the branch that goes on draw what the whole run drew.
    """
    sampling, grammar = WAYS[way]
    capsules = ("p.0", *(f"c{cut}.0" for cut in CUTS))

    def forward() -> TorchForward:
        return tiny_forward(kind, dtype, kv_dtype, num_blocks=181, block_size=4)

    def go_on(engine: Engine, name: str) -> None:
        """Draw the whole again from the prompt's capsule, and its rest from each other one."""
        fork = Fork(name, "p.0", (b"",), LIMITS, sampling, grammar=grammar)
        assert run(engine, fork)[name] == whole
        for capsule in capsules[1:]:
            found = engine._capsules.peek(CapsuleId(capsule))
            assert found is not None
            rest = whole[found.boundary - len(PROMPT) :]
            resume = Fork(name + capsule, capsule, (b"",), Limits(0), resumes=True)
            assert run(engine, resume)[name + capsule] == rest

    first = forward()
    engine = engine_in(first, tmp_path)
    whole = drawn_with_captures(engine, way)
    run(engine, Prefill("p", pack_tokens(PROMPT)))
    before = {name: kv_bytes(engine, first, name) for name in capsules}
    for i, tier in enumerate((HOST, DISK)):
        run(engine, *(Demote(f"d{i}{name}", name, tier) for name in capsules))
        assert engine.usage().live_blocks == 0
        flood(engine, f"flood{i}")
        computed = engine.stats().num_prefill_tokens
        run(engine, *(Promote(f"u{i}{name}", name) for name in capsules))
        assert {name: kv_bytes(engine, first, name) for name in capsules} == before
        assert engine.stats().num_prefill_tokens == computed
        go_on(engine, f"f{i}")
    engine.close()
    fresh = forward()
    again = engine_in(fresh, tmp_path, life=2)
    run(again, *(Promote(f"u{name}", name) for name in capsules))
    assert {name: kv_bytes(again, fresh, name) for name in capsules} == before
    assert again.stats().num_prefill_tokens == 0
    go_on(again, "f")
    again.close()
