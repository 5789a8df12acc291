"""Kernels: compiled once for all processes, and none after the router was made."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SOURCE = """
from mallee.protocol.jit import Jit

kernel = Jit(__file__).kernel
"""
KERNELS = """
from decorators import kernel


@kernel
def twice(x: int) -> int:
    return 2 * x
"""
USE = """
from numbers_ import twice

twice(3)
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()), twice(21))
"""


def use(folder: Path) -> tuple[int, ...]:
    """(cache hits, misses, what the kernel gives) in a process of its own."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(folder / "kernels")))}
    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, check=True, env=environ
    )
    return tuple(map(int, done.stdout.split()))


def test_the_next_process_reads_what_one_has_compiled(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "decorators.py").write_text(SOURCE)
    (tmp_path / "kernels" / "numbers_.py").write_text(KERNELS)
    assert use(tmp_path) == (0, 1, 42)
    assert use(tmp_path) == (1, 0, 42)
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 1
    (tmp_path / "kernels" / "others.py").write_text("from decorators import kernel\n")
    assert use(tmp_path) == (0, 1, 42)
    assert len(list((tmp_path / "__pycache__").glob("kernels-*"))) == 2


COMPILED = """
    import importlib, pkgutil
    import numba
    import numpy as np
    import mallee.router as package
    from mallee.protocol.hashing import NO_HASHES
    from mallee.router.config import RouterConfig, SpillModel, CostModel
    from mallee.router.index.index import PrefixIndex
    from mallee.router.load.kernels import match_prompt
    from mallee.router.load.paths import STRIDE
    from mallee.router.load.predictions import Predictions
    from mallee.router.load.prompts import EarlierPrompts
    from mallee.router.load.slots import SlotTracker
    from mallee.router.placement.pricing import Demand, Offers, Pricer
    from mallee.router.placement.fanout_pricing import RowGroup, SplitPlanner, Workers
    from mallee.router.router import Router

    modules = [importlib.import_module(m.name)
               for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    kernels = {(f.__module__, f.__name__): f for m in modules for f in vars(m).values()
               if isinstance(f, numba.core.dispatcher.Dispatcher)}
    assert len(kernels) > 50
    def compiled():
        return {name: list(map(str, f.signatures)) for name, f in kernels.items()}

    router = Router(RouterConfig(max_workers=70), clock=lambda: 0.0)
    index = PrefixIndex(70, max_nbytes=8 << 20)
    slots = SlotTracker(70)
    predictions = Predictions(70, ttl_s=1.0)
    prompts = EarlierPrompts(16)
    pricer = Pricer(RouterConfig(max_workers=70), slots.loads, lambda: 0.5)
    planner = SplitPlanner(CostModel(), SpillModel(), block_size=16)
    before = compiled()
    rng = np.random.default_rng(0)
    active = np.zeros(70, dtype=np.int32)
    for step in range(120):
        keys = rng.integers(1, 1 << 64, 4000, dtype=np.uint64)
        if step % 2:
            keys = np.frombuffer(keys.tobytes(), dtype="<u8")
        worker = step % 70
        index.store(worker, keys)
        index.store(worker, keys[5:90], step % 3)
        for other in range(8):
            index.store((worker * 7 + other) % 70, keys[other : other + 70])
        index.remove(worker, keys[50:99], step % 3)
        index.repair(worker, keys[:3])
        index.set_prefix_closed(worker, bool(step % 4))
        index.set_loading(worker, bool(step % 2))
        index.match(keys)
        index.match(keys[:20], 1)
        index.digest(worker)
        if step % 5 == 0:
            index.clear(worker)
        if step % 30 > 20:
            index.work()
        if step == 100:
            for each in range(70):
                index.clear(each)
            while index.work():
                pass
        slots.book(str(step), worker, keys, num_blocks=STRIDE * 4000, own_blocks=1, prefill_tokens=9,
                   rows=1, now=float(step))
        slots.paths.match_into(keys, STRIDE * 4000, active)
        if step % 2:
            slots.prefill_done(str(step), float(step))
        if step > 5:
            slots.free(str(step - 5), float(step))
        slots.work()
        predictions.add(worker, keys, STRIDE * 4000, capacity=10**6, now=float(step))
        predictions.match_into(keys, 8 * 4000, active)
        predictions.expire(float(step - 3))
        predictions.work()
        held = np.zeros((1 + 2 * (step % 2), 70), dtype=np.int32)
        pricer.choose(Demand(100, 6, 1, 7, 1, 10), Offers(NO_HASHES, held, active), now=float(step),
                      width=70, prefers_new=True)
        used = slots.paths.address if step % 3 else 0
        for path in (keys, np.frombuffer(keys.tobytes(), dtype="<u8")):
            waypoints = np.empty(250, dtype=np.uint64)
            match_prompt(index.address, used, prompts.address, path, waypoints, held, active,
                         slots.loads, 70)
        ones = np.ones(9, dtype=np.int64)
        workers = Workers(ones / 9, ones / 8, ones, ones * 9, ones * 64, ones * 4000, ones / 7,
                          ones * step % 2 > 0, ones / 5)
        planner.plan(RowGroup(200, 900, step, 64), workers, 3, max_parts=8, can_recompute=True)
    assert index.stats().evicted and index.stats().num_sets
    after = compiled()
    print([(k, before[k], after[k]) for k in before if before[k] != after[k]])
"""


def test_no_kernel_is_compiled_after_construction() -> None:
    """K3: whatever is asked of it and however its arrays came, in a fresh process."""
    command = [sys.executable, "-c", textwrap.dedent(COMPILED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
