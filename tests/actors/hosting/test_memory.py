"""The split of a worker's memory."""

from mallee.actors.hosting.memory import memory_use
from mallee.protocol.events import EngineUse, Load, MemoryUse
from mallee.worker.model.runner import MemoryStats

GIB = 1 << 30


def load(used_blocks: int) -> Load:
    return Load(0, 0, 0, 0, EngineUse(100, 0, 0, 0, 0, 0, 0, 0, 0, 0, used_blocks=used_blocks))


def test_on_a_device_the_rest_is_what_torch_has_taken_besides() -> None:
    """I23, part: KV memory is there from the start."""
    stats = MemoryStats(weights=3 * GIB, kv=2 * GIB, reserved=6 * GIB)
    assert memory_use(stats, None) == MemoryUse(3 * GIB, 2 * GIB, GIB)
    stats = stats._replace(graphs=GIB // 4)
    assert memory_use(stats, None) == MemoryUse(3 * GIB, 2 * GIB, 3 * GIB // 4, GIB // 4)


def test_on_a_host_kv_counts_that_was_ever_used() -> None:
    """I23, part: pages that were never touched are no memory; the rest is resident."""
    stats = MemoryStats(weights=1 << 20, kv=10 << 20, reserved=None)
    fresh, used = memory_use(stats, None), memory_use(stats, load(50))
    assert fresh is not None
    assert used is not None
    assert (fresh.weights, fresh.kv) == (1 << 20, 0)
    assert used.kv == 5 << 20
    assert used.other >= 10 << 20, "Python, numpy and torch"
    assert abs(used.other + used.kv - fresh.other) < 5 << 20
