"""Deletions of capsules that are durable, or on their way to be."""

from collections.abc import Callable
from typing import Any

from mallee.protocol.errors import MalleeError, StorageFailed, UnknownCapsule, from_wire
from mallee.protocol.messages import (
    Delete,
    Demote,
    Fork,
    Inspect,
    Limits,
    Pin,
    Prefill,
    Release,
    pack_tokens,
)
from mallee.worker.kv.tiers.moves import DISK
from support.tier_commands import move_all
from support.tiers import DictDisk, LateMover, make_tiers

MakeBench = Callable[..., Any]
PROMPT = Prefill("p", pack_tokens(list(range(10))))


class FailingDisk(DictDisk):
    """A disk that can't remove a record while it is `stuck`."""

    stuck = True

    def drop(self, capsule: str) -> bool:
        if self.stuck:
            raise StorageFailed("remove", capsule, 5, "Input/output error")
        return super().drop(capsule)


def make_late(make_bench: MakeBench) -> tuple[Any, DictDisk, LateMover]:
    disk, movers = DictDisk(), list[LateMover]()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk, movers=movers))
    bench.run(PROMPT)
    return bench, disk, movers[0]


def error_of(bench: Any, request: str) -> MalleeError | None:
    wire = bench.replies[request].error
    return None if wire is None else from_wire(wire)


def test_a_deletion_is_answered_when_the_record_is_gone(make_bench: MakeBench) -> None:
    bench, disk, mover = make_late(make_bench)
    bench.run(Demote("d", "p.0", DISK))
    move_all(bench, mover)
    bench.run(Delete("x", "p.0"), Delete("y", "p.0"))
    assert "p.0" in disk.named
    assert not {"x", "y"} & bench.replies.keys()
    move_all(bench, mover)
    assert not disk.named
    assert bench.replies["x"].status.tier == bench.replies["y"].status.tier == "disk"  # as it was
    bench.run(Inspect("i", "p.0"), Delete("z", "p.0"))
    assert isinstance(error_of(bench, "i"), UnknownCapsule)
    assert isinstance(error_of(bench, "z"), UnknownCapsule)


def test_a_deletion_on_the_device_waits_for_no_disk(make_bench: MakeBench) -> None:
    bench, _, mover = make_late(make_bench)
    bench.run(Delete("x", "p.0"))
    assert bench.replies["x"].error is None
    assert not mover.num_under_way


def test_a_deletion_overtakes_no_record_on_its_way_to_disk(make_bench: MakeBench) -> None:
    """Neither a demotion's, nor one that a pin writes anew, nor after a release that nobody answers."""
    bench, disk, mover = make_late(make_bench)
    bench.run(Demote("d", "p.0", DISK), Delete("x", "p.0"))
    assert "x" not in bench.replies
    bench.run(Pin("pin", "p.0", ttl_s=9.0), Demote("d2", "p.0", DISK))
    assert isinstance(error_of(bench, "d2"), UnknownCapsule)
    move_all(bench, mover)
    assert not disk.named
    assert bench.replies["x"].error is None
    bench.run(Prefill("q", PROMPT.tokens, capsule="p.0"))
    bench.run(Demote("d3", "p.0", DISK))
    move_all(bench, mover)
    bench.run(Release("p.0"), Delete("y", "p.0"))
    assert "y" not in bench.replies
    move_all(bench, mover)
    assert isinstance(error_of(bench, "y"), UnknownCapsule)
    assert not disk.named


def test_a_disk_that_fails_leaves_the_capsule_and_says_so(make_bench: MakeBench) -> None:
    disk = FailingDisk()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    bench.run(PROMPT)
    bench.run(Demote("d", "p.0", DISK))
    bench.run(Delete("x", "p.0"))
    assert isinstance(error_of(bench, "x"), StorageFailed)
    bench.run(Fork("f", "p.0", (b"",), Limits(3, ignore_eos=True)))
    assert len(bench.answers["f", 0].tokens) == 3
    disk.stuck = False
    bench.run(Delete("again", "p.0"))
    assert error_of(bench, "again") is None
    assert not disk.named
