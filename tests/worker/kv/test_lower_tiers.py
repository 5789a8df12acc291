"""Books of the tiers below the device."""

from mallee.mocker.passes import mock_spec
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.testing.forward import MockForward
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.tiers.host import HostSlots
from mallee.worker.kv.tiers.lower import LowerTiers
from mallee.worker.kv.tiers.moves import DISK, Moved
from support.tiers import DictDisk, LateMover, make_tiers


def settle(lower: LowerTiers, mover: LateMover) -> None:
    while mover.num_under_way:
        mover.advance()
        lower.settle()


def test_blocks_that_are_on_disk_too_give_way_first() -> None:
    host = HostSlots(4)
    for key in (1, 2, 3, 4):
        host.put(key)
    host.hold((1, 2))
    host.release((1, 2), are_oldest=True)
    assert host.oldest(4) == [1, 2, 3, 4]
    host.hold((1,))
    host.release((1,))
    assert host.oldest(4) == [2, 3, 4, 1]


def test_a_snapshot_has_blocks_on_disk_that_are_copied_to_host_memory() -> None:
    movers: list[LateMover] = []
    forward = MockForward(mock_spec(), num_blocks=4, block_size=4)
    lower = make_tiers(4, disk=DictDisk(), movers=movers)(Journal(), forward)

    def ended(moved: Moved) -> None:
        assert moved.error is None

    lower.commit("c", b"", (7, 8), (0, 1), ended, num_untold=0)
    settle(lower, movers[0])
    lower.park((7, 8), (0, 1), ended, num_untold=0)
    assert lower.keys(DISK) == [7, 8]


def test_what_a_spill_writes_and_evicts_is_not_told_to_be_there() -> None:
    movers: list[LateMover] = []
    journal, disk = Journal(), DictDisk(max_blocks=16)
    forward = MockForward(mock_spec(), num_blocks=64, block_size=4)
    lower = make_tiers(48, disk=disk, movers=movers)(journal, forward)
    for i in range(44):
        lower.offload((100 + i,), (i,))
    settle(lower, movers[0])
    assert disk.blocks
    held: set[int] = set()
    for event in journal.drain():
        match event:
            case Stored(tier=2):
                held.update(unpack_hashes(event.hashes).tolist())
            case Removed(tier=2):
                held.difference_update(unpack_hashes(event.hashes).tolist())
    assert held == set(disk.blocks) == set(lower.keys(DISK))
