"""K15: what the device evicts is found again in host memory and on disk, and the router hears of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mallee.mocker.replay.fleet.tiers import NOTHING, TierConfig, Tiers
from mallee.protocol.errors import ConfigError
from mallee.protocol.events import (
    EventBatch,
    Lease,
    Removed,
    Snapshot,
    Stored,
    pack_hashes,
    unpack_hashes,
)
from mallee.protocol.ids import WorkerId
from mallee.router.config import CostModel, RouterConfig
from mallee.router.router import Router
from support.examples import examples
from support.index_contents import contents

SIZE = 4
CONFIG = TierConfig(
    host_tokens=12, disk_tokens=8, host_bytes_s=8000.0, disk_bytes_s=1000.0, token_nbytes=200
)


def packed(*values: int) -> bytes:
    return pack_hashes(np.array(values, dtype=np.uint64))


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class Engine:
    """Numbers events as an engine does."""

    def __init__(self) -> None:
        self.next_seq = 0

    def batch(self, *events: Stored | Removed) -> EventBatch:
        batch = EventBatch("w0", 1, self.next_seq, events)
        self.next_seq = batch.next_seq
        return batch


def told(batch: EventBatch | None) -> list[tuple[str, int, list[int]]]:
    assert batch is not None
    return [
        (type(e).__name__, e.tier, unpack_hashes(e.hashes).tolist())
        for e in batch.events
        if isinstance(e, Stored | Removed)
    ]


def test_what_is_evicted_sinks_from_tier_to_tier_and_is_announced() -> None:
    """K15, part: each move publishes events with its tier, in one numbering."""
    engine, tiers = Engine(), Tiers(CONFIG, block_size=SIZE)
    first = tiers.extend(engine.batch(Stored(packed(1, 2, 3, 4))))
    assert told(first) == [("Stored", 0, [1, 2, 3, 4])]
    second = tiers.extend(engine.batch(Removed(packed(4, 3)), Stored(packed(5))))
    assert told(second) == [
        ("Removed", 0, [4, 3]),
        ("Stored", 1, [4, 3]),
        ("Stored", 0, [5]),
    ]
    third = tiers.extend(engine.batch(Removed(packed(2, 1))))
    assert told(third) == [
        ("Removed", 0, [2, 1]),
        ("Stored", 1, [2, 1]),
        ("Removed", 1, [4]),
        ("Stored", 2, [4]),
    ]
    fourth = tiers.extend(engine.batch(Stored(packed(6)), Removed(packed(6, 5))))
    assert told(fourth)[-4:] == [
        ("Stored", 1, [6, 5]),
        ("Removed", 1, [3, 2]),
        ("Stored", 2, [3, 2]),
        ("Removed", 2, [4]),
    ]
    assert [b.first_seq for b in (first, second, third, fourth) if b] == [0, 1, 4, 8]
    assert tiers.next_seq == 14
    assert tiers.extend(None) is None
    tiers.check()


def test_a_prompt_brings_back_what_is_below_the_device_and_pays_in_bytes() -> None:
    """K15, part, X6, part: seconds are bytes over bandwidth; a gap ends it; fetched blocks count as used."""
    engine, tiers = Engine(), Tiers(CONFIG, block_size=SIZE)
    tiers.extend(engine.batch(Stored(packed(1, 2, 3, 4, 5)), Removed(packed(5, 4, 3, 2))))
    assert tiers.submitting(hashes(1, 9), 1) == NOTHING
    supply = tiers.submitting(hashes(1, 2, 3, 9, 4), 1)  # two blocks of host memory, then a gap
    assert supply.num_tokens == 3 * SIZE - 1
    assert supply.seconds_per_token * 2 * SIZE == pytest.approx(2 * 0.1)
    supply = tiers.submitting(hashes(1, 2, 3, 4, 5), 1)  # and one of disk behind them
    assert supply.num_tokens == 5 * SIZE - 1
    assert supply.seconds_per_token * 4 * SIZE == pytest.approx(3 * 0.1 + 0.8)
    stats = tiers.stats()
    assert (stats.num_fetched_host, stats.num_fetched_disk) == (5, 1)
    assert stats.fetched_nbytes == 6 * 800
    # 2 was used last, as the first of its text: 4 goes first when the next one comes.
    tiers.extend(engine.batch(Stored(packed(8)), Removed(packed(8))))
    assert tiers.submitting(hashes(1, 2, 3), 1).num_tokens == 3 * SIZE - 1


def test_without_a_host_tier_nothing_is_kept() -> None:
    engine, tiers = Engine(), Tiers(TierConfig(), block_size=SIZE)
    batch = tiers.extend(engine.batch(Stored(packed(1)), Removed(packed(1))))
    assert told(batch) == [("Stored", 0, [1]), ("Removed", 0, [1])]
    assert tiers.submitting(hashes(1), 0) == NOTHING


def test_a_disk_alone_takes_what_the_device_lets_go() -> None:
    engine, tiers = Engine(), Tiers(TierConfig(disk_tokens=4), block_size=SIZE)
    batch = tiers.extend(engine.batch(Stored(packed(1, 2)), Removed(packed(2, 1))))
    assert told(batch)[2:] == [("Stored", 2, [2, 1]), ("Removed", 2, [2])]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (TierConfig(host_tokens=-1), "host_tokens=-1"),
        (TierConfig(host_bytes_s=0), "host_bytes_s=0"),
        (TierConfig(token_nbytes=0), "token_nbytes=0"),
    ],
)
def test_impossible_tiers_are_refused(config: TierConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tiers(config, block_size=SIZE)


def routed(config: TierConfig) -> Router:
    """A router that knows the worker."""
    cost = CostModel(host_block_s=config.host_block_s(SIZE), disk_block_s=config.disk_block_s(SIZE))
    router = Router(RouterConfig(block_size=SIZE, cost=cost, lease_s=1e9), clock=lambda: 1.0)
    router.on_lease(Lease("w0", 1, "a", "m", "f", SIZE, 64, 8, 4096, 0))
    return router


@examples(50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60), st.integers(0, 3))
def test_a_router_that_hears_all_events_knows_the_tiers_to_the_block(
    moves: list[tuple[bool, int]], disk_blocks: int
) -> None:
    """K15, part: lists of what is where, the router's index, and a snapshot agree."""
    config = TierConfig(host_tokens=3 * SIZE, disk_tokens=disk_blocks * SIZE)
    engine, tiers, router = Engine(), Tiers(config, block_size=SIZE), routed(config)
    device: list[int] = []
    host: list[int] = []
    disk: list[int] = []
    for is_stored, block in moves:
        if is_stored and block not in device:
            device.append(block)
            batch = engine.batch(Stored(packed(block)))
        elif not is_stored and block in device:
            device.remove(block)
            batch = engine.batch(Removed(packed(block)))
            if block in host:
                host.remove(block)
            host.append(block)
            for gone in host[:-3]:
                disk[:] = [*(b for b in disk if b != gone), gone][-disk_blocks or 99 :]
            host = host[-3:]
        else:
            continue
        grown = tiers.extend(batch)
        assert grown is not None
        assert not router.on_events(grown)
        tiers.check()
    found = contents(router._fleet.index)[0]
    assert found == [set(device), set(host), set(disk)]
    fresh = routed(config)
    snapshot = tiers.snapshot(Snapshot("w0", 1, engine.next_seq, packed(*device), ()))
    assert not fresh.on_snapshot(snapshot, asked_at=1.0)
    while fresh.work():
        pass
    assert fresh.digest(WorkerId("w0")) == router.digest(WorkerId("w0"))
