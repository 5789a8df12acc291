"""The block pool, and checks of the KV memory: whoever writes where it must not is found and named."""

import random
import threading
import time
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.errors import ConfigError, CorruptKV, PoolExhausted
from mallee.protocol.hashing import block_hashes
from mallee.worker.kv.audit import find_leaks
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool, runs
from mallee.worker.kv.tree import BranchTree
from mallee.worker.kv.watch import BlockWatch, CheckLevel, KVChecks

SIZE = 4


class Memory:
    """A KV memory of one number a slot."""

    PATTERN = 7777

    def __init__(self, num_blocks: int) -> None:
        self.slots = np.zeros((num_blocks, SIZE), dtype=np.int64)

    def are_numbers(self, blocks: Any, rows: Any) -> bool:
        return True

    def clear(self, row: Any, num_slots: int, group: int = 0, part: int = 0) -> None:
        raise AssertionError("no rows are read")

    def fill(self, blocks: Any) -> None:
        self.slots[list(blocks)] = self.PATTERN

    def is_filled(self, block: int) -> bool:
        return bool((self.slots[block] == self.PATTERN).all())

    def digest(self, block: int, num_slots: int) -> int:
        return hash(self.slots[block, :num_slots].tobytes())


class Bench:
    """A tree whose tokens are really written to a memory."""

    def __init__(
        self,
        level: CheckLevel,
        *,
        num_blocks: int = 32,
        on_fault: Literal["log", "raise"] = "raise",
        sweep_steps: int = 4,
    ) -> None:
        self.memory = Memory(num_blocks)
        self.faults: list[CorruptKV] = []
        checks = KVChecks(level, on_fault, sweep_steps)
        self.watch = BlockWatch(checks, self.memory, num_blocks, self.faults.append)
        self.tree = BranchTree(BlockPool(num_blocks, self.watch), SIZE, Journal())

    def begin(self, tokens: list[int]) -> Node:
        usable = (len(tokens) - 1) // SIZE * SIZE
        node = self.tree.attach(block_hashes(tokens[:usable], SIZE, salt=""), "")
        return self.grow(node, tokens[node.end :])

    def grow(self, node: Node, tokens: list[int]) -> Node:
        node, copy = self.tree.reserve(node, len(tokens))
        if copy is not None:
            self.memory.slots[copy.dst, : copy.num_slots] = self.memory.slots[
                copy.src, : copy.num_slots
            ]
        table = self.tree.table(node)
        for i, token in enumerate(tokens, start=node.end):
            self.memory.slots[table[i // SIZE], i % SIZE] = token
        self.tree.commit(node, tokens)
        return node


def test_guards_halve_the_pool_and_are_never_handed_out() -> None:
    """D21: with n blocks of memory (n - 1) // 2 are left."""
    bench = Bench("guards", num_blocks=9)
    pool = bench.tree.pool
    assert pool.num_blocks == pool.num_free == 4
    assert sorted(pool.alloc(4)) == [1, 3, 5, 7]
    assert pool.used_blocks() == {1, 3, 5, 7}
    with pytest.raises(ConfigError, match="num_blocks >= 3, not 2"):
        Bench("guards", num_blocks=2)


def test_the_sweep_finds_a_changed_block_within_its_period() -> None:
    """D20: every digest is verified once in `sweep_steps` steps, an equal share in each."""
    bench = Bench("digests", sweep_steps=4)
    node = bench.begin(list(range(33)))
    before = bench.watch.stats().num_verified
    for _ in range(4):
        bench.watch.end_step()
    assert bench.watch.stats().num_verified - before == 8
    bench.memory.slots[node.blocks[5], 0] ^= 1
    bench.watch.end_step()  # two digests a step: blocks 0 and 1, 2 and 3, 4 and 5
    bench.watch.end_step()
    with pytest.raises(CorruptKV, match=f"block {node.blocks[5]} changed"):
        bench.watch.end_step()


def test_faults_can_be_reported_and_counted_instead() -> None:
    """D36, part: mode "log" tells each fault once and goes on."""
    bench = Bench("digests", on_fault="log")
    node = bench.begin([1, 2, 3, 4, 5])
    bench.memory.slots[node.blocks[0], 0] = 9
    bench.tree.verify(node)
    bench.tree.verify(node)
    assert bench.watch.stats().num_faults == 1
    assert ["changed after it was sealed" in str(fault) for fault in bench.faults] == [True]


def test_a_double_free_tells_who_had_the_block() -> None:
    """I9: owner tracking; without a watch only the block is named."""
    told = " .*allocated at step 0 by the first owner"
    for pool, story in ((Bench("digests").tree.pool, told), (BlockPool(4), "")):
        (block,) = pool.alloc(1, "the first owner")
        pool.free([block], "the first owner")
        with pytest.raises(AssertionError, match=f"block {block} freed twice{story}"):
            pool.free([block])


def test_the_audit_names_blocks_without_an_owner_and_holds_nobody_has() -> None:
    """I9: empty after a normal life, else each leak with its story."""
    bench = Bench("digests")
    node = bench.begin(list(range(6)))
    assert find_leaks(bench.tree, {node: 1}) == []
    bench.tree.release(node)
    assert find_leaks(bench.tree, {}) == []
    bench.tree.hold(node)
    assert "1 unknown holders of Node(0..4" in find_leaks(bench.tree, {})[0].why
    (lost,) = bench.tree.pool.alloc(1, "a careless caller")
    leaks = find_leaks(bench.tree, {node: 1})
    assert [leak.block for leak in leaks] == [lost]
    assert "allocated at step 0 by a careless caller" in leaks[0].why


def test_a_second_thread_is_noticed() -> None:
    """D29, part: one thread owns a tree; with checks on, another one that moves blocks is found out."""
    bench = Bench("digests")
    bench.tree.pool.alloc(1)
    found: list[str] = []

    def misuse() -> None:
        try:
            bench.tree.pool.alloc(1)
        except AssertionError as error:
            found.append(str(error))

    thread = threading.Thread(target=misuse)
    thread.start()
    thread.join()
    assert found == ["the pool is used by two threads"]


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        (KVChecks("some"), "level='some'"),  # type: ignore[arg-type]
        (KVChecks("digests", "ignore"), "on_fault='ignore'"),  # type: ignore[arg-type]
        (KVChecks("digests", sweep_steps=0), "sweep_steps=0"),
    ],
)
def test_unknown_checks_are_refused(checks: KVChecks, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checks.validate()


# The pool itself


def test_alloc_more_than_free_takes_nothing_and_names_the_numbers() -> None:
    pool = BlockPool(4)
    pool.alloc(3)
    with pytest.raises(PoolExhausted, match="2 KV blocks needed, 1 of 4 free"):
        pool.alloc(2)
    assert pool.num_free == 1


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockPool(0)


@given(st.lists(st.integers(-5, 5), max_size=60))
def test_blocks_are_handed_out_once_until_they_come_back(moves: list[int]) -> None:
    pool = BlockPool(16)
    held: list[int] = []
    for move in moves:
        if move >= 0 and move <= pool.num_free:
            taken = pool.alloc(move)
            assert not set(taken) & set(held)
            held += taken
        elif move < 0:
            back, held = held[:-move], held[-move:]
            pool.free(back)
        pool.check()
        assert pool.num_free == 16 - len(held)


def test_many_random_operations_leak_nothing() -> None:
    """D14, I9: batches of every size, in any order; at the end every block is free."""
    rng = random.Random(7)
    pool = BlockPool(4096)
    held: list[list[int]] = []
    for _ in range(100_000):
        if rng.random() < 0.5 and pool.num_free > 8:
            held.append(pool.alloc(1 + int(8 * rng.random())))
        elif held:
            i = int(len(held) * rng.random())
            held[i], held[-1] = held[-1], held[i]
            pool.free(held.pop())
    pool.check()
    for batch in held:
        pool.free(batch)
    pool.check()
    assert pool.used_blocks() == set()
    stats = pool.stats()
    assert stats.free == 4096
    assert stats.num_allocs == stats.num_frees > 100_000


def test_an_operation_takes_as_long_in_a_large_pool_as_in_a_small_one() -> None:
    """D14: constant time; the fastest of many runs, in processor time, a thousand times as many blocks."""

    def fastest(num_blocks: int) -> float:
        pool = BlockPool(num_blocks)
        held = pool.alloc(num_blocks // 2)
        times = []
        for _ in range(30):
            begin = time.process_time()
            for _ in range(300):
                pool.free(pool.alloc(4))
            times.append(time.process_time() - begin)
        pool.free(held)
        return min(times)

    assert fastest(256 << 10) < 3 * fastest(256)


def test_runs_are_the_longest_that_count_up_and_no_longer_than_asked() -> None:
    ids = [4, 5, 6, 7, 9, 8, 7, 8]
    assert [ids[part] for part in runs(ids)] == [[4, 5, 6, 7], [9], [8], [7, 8]]
    assert [ids[part] for part in runs(ids, 3)] == [[4, 5, 6], [7], [9], [8], [7, 8]]
    assert list(runs([])) == []
