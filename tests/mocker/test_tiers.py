"""K15: the tiers below a mocked device: books without bytes, and moves that take time alone."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mallee.mocker.tiers import DiskBooks, TierConfig, TimedMover
from mallee.protocol.errors import TierFull
from mallee.protocol.hashing import block_hashes
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
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.transfer.movers import Carrier
from mallee.worker.transfer.values import DEVICE, DISK, HOST, Forget, Place, Transfer
from support.asking import SIZE
from support.conforming import Time, make_mocked
from support.examples import examples

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
CONFIG = TierConfig(
    host_tokens=64,
    disk_tokens=64,
    host_bytes_s=8000.0,  # 0.1 s a block
    disk_bytes_s=1000.0,  # 0.8 s
    host_latency_s=0.05,
    disk_latency_s=0.5,
    token_nbytes=200,
)


class Memory:
    """Blocks of no bytes, as a mocked device has them."""

    block_nbytes = 0
    num_blocks = 8

    def read(self, blocks: Any, rows: Any, after: object = None) -> None: ...
    def write(self, blocks: Any, rows: Any, after: object = None) -> None: ...
    def new_rows(self, num: int) -> Any:
        return np.empty((num, 0), np.uint8)


def test_moves_of_a_tier_take_turns_and_the_tiers_do_not_wait_for_each_other() -> None:
    """K15, part: each takes its latency and its bytes' time, and ends by the clock."""
    time = Time()
    carrier = Carrier(Memory(), np.empty((16, 0), np.uint8), DiskBooks(16), time)  # type: ignore[arg-type]
    late = TimedMover(carrier, CONFIG, SIZE)
    late.start(Transfer(0, Place(DEVICE, (0, 1)), Place(DISK, (1, 2))))
    late.start(Transfer(1, Place(DEVICE, (0, 1)), Place(HOST, (0, 1))))
    late.start(Transfer(2, Place(HOST, (0,)), Place(DEVICE, (2,))))
    late.start(Transfer(3, Place(DISK, (1, 2, 3)), Place(DEVICE, (3, 4, 5))))
    late.start(Forget(4, "c"))
    ended = []
    while (due := late.next_due) < inf:
        time.now = due - 1e-9
        assert not late.has_done
        assert not late.done()
        time.now = due
        ended += [(round(due, 9), m.move.number, m.num_blocks, m.seconds) for m in late.done()]
    assert ended == [
        (0.25, 1, 2, pytest.approx(0.25)),
        (0.4, 2, 1, pytest.approx(0.15)),
        (2.1, 0, 2, pytest.approx(2.1)),
        (5.0, 3, 2, pytest.approx(2.9)),  # the third block is not on disk
        (5.5, 4, 0, pytest.approx(0.5)),
    ]


class DiskModel:
    """Blocks by their last use; those of records stay."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.records: dict[str, list[int]] = {}

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self.pinned:
                self.blocks.move_to_end(key)

    def drop(self, name: str) -> None:
        self.use(self.records.pop(name, ()))

    @property
    def pinned(self) -> set[int]:
        return {key for keys in self.records.values() for key in keys}

    def put(self, keys: list[int]) -> list[int] | None:
        """The blocks that give way; None if there is no room."""
        new = [key for key in keys if key not in self.blocks]
        can_go = [k for k in self.blocks if k not in self.pinned and k not in keys]
        if len(new) > self.size - len(self.blocks) + len(can_go):
            self.use(key for key in keys if key not in new)
            return None
        gone = can_go[: max(0, len(self.blocks) + len(new) - self.size)]
        for key in gone:
            del self.blocks[key]
        self.blocks.update(dict.fromkeys(new))
        self.use(key for key in keys if key not in new)
        self.use(keys)
        return gone


@examples(100)
@given(st.data())
def test_the_books_of_a_disk_are_those_of_a_model(data: st.DataObject) -> None:
    """K15, part: the block used longest ago that no record names goes; a full disk takes nothing."""
    disk, model = DiskBooks(6), DiskModel(6)
    texts = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True)
    for _ in range(data.draw(st.integers(1, 25))):
        verb, keys = data.draw(st.sampled_from("pppgcd")), data.draw(texts)
        name = data.draw(st.sampled_from("ab"))
        if verb == "p":
            before = set(disk.keys())
            expected = model.put(keys)
            if expected is None:
                with pytest.raises(TierFull):
                    disk.put(keys, ())
                assert set(disk.keys()) == before
            else:
                disk.put(keys, ())
                assert set(disk.take_lost()[0]) == set(expected)
        elif verb == "g":
            num = next((i for i, k in enumerate(keys) if k not in model.blocks), len(keys))
            assert disk.get(keys, ())[0] == num
            model.use(reversed(keys[:num]))
        elif verb == "c" and set(keys) <= set(model.blocks):
            disk.commit(name, b"", keys, owner="", is_kept=True)
            model.drop(name)
            model.records[name] = keys
        elif verb == "d":
            disk.drop(name)
            model.drop(name)
        assert set(disk.keys()) == set(model.blocks)
        assert set(disk.capsules()) == set(model.records)


@settings(examples(40), phases=QUICK)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=40),
    st.integers(8, 20),
    st.integers(2, 24),
)
def test_below_the_device_too_no_block_outlives_the_one_before_it(
    paths: list[list[int]], num_blocks: int, host_blocks: int
) -> None:
    """K15, part: with a block on the device or in host memory, all before it are in one of the two."""
    time = Time()
    tiers = TierConfig(host_tokens=host_blocks * SIZE, token_nbytes=1)
    mocked = make_mocked(
        time, EngineConfig(max_answer_capsules=0), num_blocks=num_blocks, tiers=tiers
    )
    engine = mocked.engine
    before: dict[int, int] = {}
    for i, path in enumerate(paths):
        tokens = [1 + path[k // SIZE] for k in range(len(path) * SIZE)] + [9]
        hashes = block_hashes(tokens, SIZE).tolist()
        before |= dict(pairwise(hashes))
        mocked.submit(Generate(f"r{i}", pack_tokens(tokens), Limits(1, ignore_eos=True)))
        while (end := mocked.start(time.now)) is not None or mocked.next_due < inf:
            time.now = mocked.next_due if end is None else end
            if end is not None:
                mocked.finish_raw()
        held = {*engine._tree.held_hashes().tolist(), *engine._lower.keys(HOST)}
        assert all(before[each] in held for each in held if each in before)


# A turn after a tool call, during which others took the memory: its first token is as early as at once

PROMPT = list(range(1200))
RESULT = list(range(5000, 5016))  # of the tool
TIERS = TierConfig(host_tokens=8192, host_bytes_s=4e9, host_latency_s=1e-3, token_nbytes=1 << 16)


class Worker:
    """A mocked engine in virtual time, with memory for two prompts."""

    def __init__(self, tiers: TierConfig | None = None) -> None:
        self.time = Time()
        config = EngineConfig(SchedulerConfig(max_step_tokens=512), 0, max_retained_share=0.9)
        self.mocked = make_mocked(self.time, config, num_blocks=620, tiers=tiers)

    def first_news_s(self, command: Command) -> float:
        """Seconds until the first token of a request, or the reply to it; then it runs to its end."""
        request: Any = command
        begun, found = self.time.now, math.inf
        self.mocked.submit(command)
        while True:
            end = self.mocked.start(self.time.now)
            if end is not None:
                self.time.now = end
                frames = self.mocked.finish_raw().frames.values()
                news = [each for frame in frames for each in (*frame.updates, *frame.replies)]
                assert not any(each.error for each in news)
                if any(each.request == request.request for each in news):
                    found = min(found, self.time.now - begun)
            elif self.mocked.next_due < math.inf:
                self.time.now = self.mocked.next_due
            else:
                return found

    def fork_s(self, name: str) -> float:
        fork = Fork(name, "p.0", (pack_tokens(RESULT),), Limits(8, ignore_eos=True))
        return self.first_news_s(fork)

    def call_tool(self) -> None:
        """Others' prompts take all memory that is to be had meanwhile."""
        for i in range(4):
            other = [10_000 * (i + 1) + j for j in range(1100)]
            limits = Limits(8, ignore_eos=True)
            self.first_news_s(Generate(f"other{i}", pack_tokens(other), limits))


def test_a_promoted_capsule_resumes_as_early_as_one_that_never_left() -> None:
    """X17: demoted for the time of the tool call; the fork of one still below waits for its fetch."""
    found = {}
    for name in ("resident", "promoted", "below"):
        worker = Worker(TIERS)
        worker.first_news_s(Prefill("p", pack_tokens(PROMPT)))
        if name != "resident":
            worker.first_news_s(Demote("down", "p.0", 1))
            worker.call_tool()
        if name == "promoted":
            worker.first_news_s(Promote("up", "p.0"))
        found[name] = worker.fork_s("next")
    assert found["promoted"] <= 1.1 * found["resident"]
    assert found["below"] > 1.5 * found["resident"]
