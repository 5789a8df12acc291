"""Capsules that go to host memory, to a real disk and to another worker, beside the engine's thread."""

from pathlib import Path

import pytest

from bench.doubles.structures import MockStructures
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
from mallee.worker.engine import Engine, MakeTiers
from mallee.worker.kv.sides.states import StateGroup
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
from support.lending import Neighbours, holder
from support.run_out import run_out
from support.tiers import make_tiers
from support.volumes import volume_tiers

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


def engine_in(forward: TorchForward, folder: Path, life: int = 1) -> Engine:
    """An engine with some blocks of host memory and a disk in `folder`, both moved by threads.

    There all capsules of a test have room, and little more.
    """
    num = 60 + 4 * forward.spec.side_rows(forward.spec.max_model_len, forward.block_size)
    return make_engine(forward, volume_tiers(folder, host_blocks=num), life)


def make_engine(forward: TorchForward, below: MakeTiers, life: int = 1) -> Engine:
    return engine_over(
        forward,
        config=EngineConfig(SchedulerConfig(16, 32), 0, kv_checks=KVChecks("guards")),
        incarnation=Incarnation(life),
        structures=MockStructures(128, (2,)),
        below=below,
    )


def run(engine: Engine, *commands: Command) -> dict[str, list[int]]:
    """Tokens by request, once nothing is left to do or under way."""
    tokens, replies = run_out(engine, *commands)
    assert all(reply.error is None for reply in replies), replies
    return tokens


def flood(engine: Engine, forward: TorchForward, name: str) -> None:
    """Overwrite every block that is only cache, and every state that is nobody's."""
    size = engine.stats().pool.total * 4 - 8
    run(engine, Generate(name, pack_tokens([3 + i % 90 for i in range(size)]), Limits(2)))
    for group, memory in zip(engine._tree.sides, forward._memories[1:], strict=True):
        if isinstance(group, StateGroup):
            memory[sorted({*range(group.pool.num_blocks)} - group.pool.used_blocks())] = 0xFF


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "kv_dtype", "way"), CASES)
def test_a_capsule_goes_to_every_tier_and_back_bit_by_bit(
    kind: str, dtype: str, kv_dtype: str, way: str, tmp_path: Path
) -> None:
    """F1, part, F11, F14, F6, part, F24, part, S8, part: a prompt's capsule, and a running branch's.

    In fp32, bf16 and FP8 KV, with windows and with states; at last another worker fetches them. The fork and
    the branch that goes on draw what the whole run drew.
    """
    sampling, grammar = WAYS[way]
    capsules = ("p.0", *(f"c{cut}.0" for cut in CUTS))

    def forward() -> TorchForward:
        return tiny_forward(kind, dtype, kv_dtype, num_blocks=181, block_size=4)

    def go_on(engine: Engine, name: str) -> None:
        """Draw the whole again from the prompt's capsule, and its rest from each other one.

        Side by side where that can't change a token: products in bfloat16 round by their number of rows.
        """
        expected = {name: whole}
        forks = [Fork(name, "p.0", (b"",), LIMITS, sampling, grammar=grammar)]
        for capsule in capsules[1:]:
            found = engine._capsules.peek(CapsuleId(capsule))
            assert found is not None
            expected[name + capsule] = whole[found.boundary - len(PROMPT) :]
            forks.append(Fork(name + capsule, capsule, (b"",), Limits(0), resumes=True))
        batches = [forks] if dtype == "float32" else [[fork] for fork in forks]
        found_tokens = {}
        for batch in batches:
            found_tokens |= run(engine, *batch)
        assert found_tokens == expected

    first = forward()
    engine = engine_in(first, tmp_path)
    whole = drawn_with_captures(engine, way)
    run(engine, Prefill("p", pack_tokens(PROMPT)))
    before = {name: kv_bytes(engine, first, name) for name in capsules}
    for i, tier in enumerate((HOST, DISK)):
        run(engine, *(Demote(f"d{i}{name}", name, tier) for name in capsules))
        assert engine.usage().live_blocks == 0
        flood(engine, first, f"flood{i}")
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
    run(again, *(Promote(f"v{name}", name) for name in capsules))
    lent = {name: kv_bytes(again, fresh, name) for name in capsules}
    there = forward()
    lender = Neighbours()
    lender.engines["w0"] = again
    other = make_engine(there, make_tiers(peers=lender))
    for name in capsules:
        held = again._capsules.peek(CapsuleId(name))
        assert held is not None
        text = [*PROMPT, *whole][: held.boundary]
        holders = (holder(again, len(text), name),)
        run(other, Prefill(f"m{name}", pack_tokens(text), capsule=name, holders=holders))
    assert {name: kv_bytes(other, there, name) for name in capsules} == lent
    assert other.stats().num_prefill_tokens == 0
    go_on(other, "m")
    for each in (again, other):
        each.check()
        each.close()
