"""A worker whose device shares the host's memory: a host tier there is more KV, and nothing is copied."""

import time
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.random_model import random_model
from bench.doubles.structures import MockStructures
from mallee.actors.build import tiers_below
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    pack_tokens,
)
from mallee.runtime.config import AppConfig
from mallee.worker.engine import Engine
from mallee.worker.memory.budget import GIB, DeviceMemory, Room
from mallee.worker.model.runner import TorchForward, load
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.values import DISK, HOST
from support.exact_capsules import kv_bytes
from support.run_out import run_out

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 4  # tokens of a block
BLOCK_NBYTES = SIZE * 2 * 2 * 2 * 16 * 4
NUM_GIVEN, NUM_HOST = 40, 60
HOST_GIB = NUM_HOST * BLOCK_NBYTES / GIB
UNIFIED = DeviceMemory("NVIDIA GB10", 2 * GIB, 2 * GIB, is_unified=True)
WORKER = WorkerId("w0")


def forward_in(folder: Path, device: DeviceMemory = UNIFIED) -> TorchForward:
    if not folder.exists():
        random_model().save(folder)
    room = Room(lambda _: device, host_tier=int(HOST_GIB * GIB))
    return load(folder, num_blocks=NUM_GIVEN, block_size=SIZE, room=room)


def engine_over(forward: TorchForward, model: Path, life: int = 1, **settings: Any) -> Engine:
    given = {"host_gib": HOST_GIB, "block_size": SIZE, **settings}
    config = AppConfig.model_validate({"model": str(model), "engine": given})
    return Engine(
        forward,
        config=EngineConfig(SchedulerConfig(16, 32), 0),
        clock=time.monotonic,
        worker=WORKER,
        incarnation=Incarnation(life),
        structures=MockStructures(128, (2,)),
        below=tiers_below(config, forward, WORKER),
    )


def text(i: int, num: int = 48) -> list[int]:
    return [3 + (i * 31 + j * 7) % 120 for j in range(num)]


def generate(i: int, num: int = 48, name: str | None = None) -> Generate:
    limits = Limits(8, ignore_eos=True)
    return Generate(name or f"r{i}", pack_tokens(text(i, num)), limits)


def test_what_a_device_alone_had_evicted_is_found_again_without_a_copy(tmp_path: Path) -> None:
    """X29, part: six texts of 14 blocks where 40 were given: each is there again, and no block was moved.

    A device with memory of its own has what was given, and a tier.
    """
    model = tmp_path / "model"
    unified, own = forward_in(model), forward_in(model, UNIFIED._replace(is_unified=False))
    assert (unified.num_blocks, own.num_blocks) == (NUM_GIVEN + NUM_HOST, NUM_GIVEN)
    unified.check()
    tiered = engine_over(own, model)
    stats = tiered.stats().tiers
    assert stats is not None
    assert stats.host_room == NUM_HOST
    tiered.close()
    engine = engine_over(unified, model, disk_path=str(tmp_path / "disk"))
    first = [run_out(engine, generate(i))[0][f"r{i}"] for i in range(6)]
    computed = engine.stats().num_prefill_tokens
    again = [run_out(engine, generate(i, name=f"a{i}"))[0][f"a{i}"] for i in range(6)]
    assert again == first
    assert engine.stats().num_prefill_tokens - computed <= 6 * SIZE  # the last block of each
    tiers = engine.stats().tiers
    assert tiers is not None
    assert tiers.host_room == tiers.host_blocks == tiers.disk_blocks == 0
    assert tiers.num_offloaded == tiers.num_parked == tiers.num_spilled == 0
    assert tiers.num_fetched_host == tiers.num_fetched_disk == 0
    engine.close()


def test_a_disk_is_directly_below_and_outlives_the_worker(tmp_path: Path) -> None:
    """X29, part, F14, part: byte by byte after a demotion, and in the worker's next life.

    A demotion to host memory is refused with the reason.
    """
    model, disk = tmp_path / "model", str(tmp_path / "disk")
    forward = forward_in(model)
    engine = engine_over(forward, model, disk_path=disk)
    run_out(engine, Prefill("p", pack_tokens(text(1, 77))))
    before = kv_bytes(engine, forward, "p.0")
    fork = Fork("f", "p.0", (b"",), Limits(16, ignore_eos=True))
    whole = run_out(engine, fork)[0]["f"]
    _, (refused,) = run_out(engine, Demote("h", "p.0", HOST))
    assert "not on unified memory, where that is KV" in str(refused.error)
    assert run_out(engine, fork)[0]["f"] == whole
    _, replies = run_out(engine, Demote("d", "p.0", DISK))
    assert [reply.error for reply in replies] == [None]
    run_out(engine, generate(9, 4 * 90))  # overwrites every block that is only cache
    run_out(engine, Promote("u", "p.0"))
    assert kv_bytes(engine, forward, "p.0") == before
    engine.close()
    fresh = forward_in(model)
    again = engine_over(fresh, model, 2, disk_path=disk)
    run_out(again, Promote("u", "p.0"))
    assert kv_bytes(again, fresh, "p.0") == before
    assert again.stats().num_prefill_tokens == 0
    assert run_out(again, fork)[0]["f"] == whole
    again.close()
