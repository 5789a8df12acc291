"""Capsules that come back, and those that are pinned, pushed off the device or deleted while they move."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.errors import (
    BlocksMissing,
    MalleeError,
    PoolExhausted,
    StorageFailed,
    UnknownCapsule,
    from_wire,
)
from mallee.protocol.messages import (
    Cancel,
    Cut,
    Delete,
    Demote,
    Fork,
    Generate,
    Inspect,
    Limits,
    Pin,
    Prefill,
    Promote,
    Release,
    pack_tokens,
)
from mallee.worker.transfer.values import DISK, HOST, TIER_NAMES
from support.tier_commands import flood, fork, generate, move_all, prefill, text, want
from support.tiers import DictDisk, LateMover, ShortMemory, make_tiers

MakeBench = Callable[..., Any]
TEXT = text(18)


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_capsule_that_loses_the_device_on_its_way_down_is_where_the_answer_says(
    make_bench: MakeBench, tier: int
) -> None:
    """F6, part: its blocks are what is copied; the text that is left of it becomes the whole capsule."""
    movers: list[LateMover] = []
    below = make_tiers(64, disk=DictDisk(), movers=movers)
    bench = make_bench(num_blocks=24, below=below)
    bench.run(generate("a", TEXT))
    bench.run(Demote("d", "a.0", tier))
    bench.run(generate("b", [5] * 30))
    bench.run(generate("c", [6] * 50))  # for which a gives up its place first, and then b
    assert bench.engine._capsules.peek("a.0").node is None
    move_all(bench, movers[0])
    assert bench.replies["d"].status.tier == TIER_NAMES[tier]
    held = bench.engine._capsules.peek("a.0").parked
    assert (held.is_held, held.is_durable) == (tier == HOST, tier == DISK)


def test_of_two_demotions_at_once_the_lower_one_counts(make_bench: MakeBench) -> None:
    """F6, part: whichever copy comes first, both answers name the disk once it is there."""
    for tiers in ((HOST, DISK), (DISK, HOST)):
        movers: list[LateMover] = []
        disk = DictDisk()
        bench = make_bench(num_blocks=24, below=make_tiers(64, disk=disk, movers=movers))
        bench.run(Prefill("p", pack_tokens(TEXT)))
        bench.run(*(Demote(f"d{tier}", "p.0", tier) for tier in tiers))
        move_all(bench, movers[0])
        assert bench.replies[f"d{DISK}"].status.tier == "disk"
        assert bench.replies[f"d{tiers[1]}"].status.tier == "disk"
        assert "p.0" in disk.named
        assert bench.engine.stats().tiers.host_held == 0


def test_an_answer_whose_blocks_went_on_says_where_they_are(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(16, disk=DictDisk()))

    def tier_after(*prompts: list[int]) -> str:
        for tokens in prompts:
            command = Generate(str(tokens), pack_tokens(tokens), Limits(1, ignore_eos=True))
            bench.run(command)
        bench.run(Inspect("i", "a.0"))
        return str(bench.replies["i"].status.tier)

    bench.run(Generate("a", pack_tokens(TEXT), Limits(4, ignore_eos=True)))
    assert tier_after([2] * 92) == "host"
    # Its blocks are pushed out of host memory, to disk.
    assert tier_after(*([7 + i] * 40 for i in range(6))) == "disk"
    keys = bench.engine._capsules.peek("a.0").parked.kv.all_keys
    assert {bench.engine._lower.tier(key) for key in keys} == {HOST, DISK}
    bench.engine._lower._disk.clear()
    assert tier_after() == "none"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_acknowledged_of_a_pin_is_what_a_restart_finds(
    make_bench: MakeBench, seed: int
) -> None:
    """F8, part: killed at any time; with every answer, and no change under way, the record says it all."""
    rng, disk, movers = random.Random(seed), DictDisk(), list[LateMover]()
    below = make_tiers(64, disk=disk, movers=movers)
    bench = make_bench(num_blocks=40, below=below)
    bench.run(Prefill("p", pack_tokens(TEXT)))
    said: tuple[bool, float | None] = (True, None)
    durable = False
    asked: dict[str, Any] = {}
    for i in range(60):
        if rng.random() < 0.5:
            command: Any = Demote(f"c{i}", "p.0", rng.choice([HOST, DISK, DISK]))
            if rng.random() < 0.6:
                command = Pin(f"c{i}", "p.0", rng.random() < 0.6, rng.choice([0.0, 50.0, 90.0]))
            asked[command.request] = command
            bench.submit(command)
        if rng.random() < 0.6:
            movers[0].advance()
        for _ in range(rng.randint(0, 2)):
            bench.step()
        possible = {said}  # acknowledged last, or asked for since
        for request in [request for request in asked if request in bench.replies]:
            command, reply = asked.pop(request), bench.replies[request]
            if isinstance(command, Demote):
                durable = durable or (command.tier == DISK and reply.error is None)
            else:
                assert reply.error is None
                said = pinned(command)
                possible = {said}
        possible |= {pinned(each) for each in asked.values() if isinstance(each, Pin)}
        if not durable:
            continue
        again = make_bench(num_blocks=40, below=make_tiers(64, disk=disk))
        again.run(Inspect("i", "p.0"))
        status = again.replies["i"].status
        assert (status.is_pinned, status.ttl_s) in possible
    assert durable or seed


def pinned(command: Pin) -> tuple[bool, float | None]:
    """The state that `command` asks for: whether it is pinned, and its time to live."""
    return command.is_pinned, (command.ttl_s or None) if command.is_pinned else None


def test_a_pin_that_can_not_be_recorded_says_so(make_bench: MakeBench) -> None:
    disk = DictDisk()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    bench.run(Prefill("p", pack_tokens(TEXT)))
    bench.run(Demote("d", "p.0", DISK))
    disk.broken.add(disk.named["p.0"][1][1])
    flood(bench)
    bench.run(Prefill("q", pack_tokens(TEXT)))  # reads it, and finds it damaged
    bench.run(Pin("pin", "p.0", ttl_s=9.0))
    error = from_wire(bench.replies["pin"].error)
    assert isinstance(error, BlocksMissing)


def test_a_text_cut_while_its_record_is_written_is_recorded_as_cut(make_bench: MakeBench) -> None:
    """F6, part: the same KV, but fewer tokens after it; the answer comes when the disk has that."""
    disk, movers = DictDisk(), list[LateMover]()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk, movers=movers))
    bench.run(generate("a", TEXT))
    bench.run(Demote("d", "a.0", DISK))
    end = bench.engine._capsules.peek("a.0").num_computed
    bench.run(Cut("a", 0, end))
    movers[0].advance()
    bench.run()
    assert "d" not in bench.replies
    move_all(bench, movers[0])
    assert bench.replies["d"].status.tier == "disk"
    again = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    again.run(Inspect("i", "a.0"))
    assert again.replies["i"].status.boundary == end


# Deletions of capsules that are durable, or on their way to be

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


# Capsules that come back


def park(bench: Any, mover: LateMover, tier: int = HOST, num: int = 18) -> list[int]:
    """A capsule `p.0` that lies in `tier` alone; its text."""
    tokens = text(num)
    bench.run(prefill("p", tokens))
    bench.run(Demote("d", "p.0", tier))
    move_all(bench, mover)
    return tokens


def make_parked(make_bench: MakeBench, **more: Any) -> tuple[Any, LateMover, list[int]]:
    disk, tier, num = more.pop("disk", None), more.pop("tier", HOST), more.pop("num", 18)
    movers = list[LateMover]()
    host_blocks = 0 if tier == DISK else 600
    bench = make_bench(below=make_tiers(host_blocks, disk=disk, movers=movers), **more)
    tokens = park(bench, movers[0], tier, num)
    flood(bench)
    move_all(bench, movers[0])
    return bench, movers[0], tokens


def test_a_capsule_comes_back_by_one_transfer_for_all_that_wait_for_it(
    make_bench: MakeBench,
) -> None:
    """F3, part, F6, part: no request runs for it, and its forks and its reply come with its blocks."""
    bench, mover, tokens = make_parked(make_bench, num_blocks=300, num=1050, max_answer_capsules=0)
    computed = bench.forward.num_tokens
    bench.submit(Promote("u", "p.0"), Promote("v", "p.0"))
    bench.submit(fork("f", "p.0", 2), fork("at", "p.0", at=9))
    bench.run()
    assert mover.num_under_way == 1
    assert bench.engine.stats().jobs == 2
    bench.submit(Cancel("at"))
    move_all(bench, mover)
    assert {bench.replies[name].status.tier for name in "uv"} == {"device"}
    assert bench.answers["f", 0].tokens == want(bench, tokens)
    assert bench.forward.num_tokens - computed == 2 * 7
    assert bench.engine.stats().tiers.num_fetched_host == 263


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_capsule_that_cannot_be_read_is_computed_and_restored(
    make_bench: MakeBench, tier: int
) -> None:
    """F6, part: a block that went bad, or a copy without memory: no fork and no reply fails for it."""
    disk, short = DictDisk(), ShortMemory()
    movers = list[LateMover]()
    below = make_tiers(64 if tier == HOST else 0, disk=disk, movers=movers, short=short)
    bench = make_bench(num_blocks=24, below=below, max_answer_capsules=0)
    tokens = park(bench, movers[0], tier)
    flood(bench, movers[0])
    if tier == DISK:
        disk.broken.add(disk.named["p.0"][1][3])
    bench.submit(Promote("u", "p.0"), fork("f", "p.0", 2))
    bench.run()
    short.num_failing = tier == HOST
    move_all(bench, movers[0])
    assert bench.replies["u"].status.tier == "device"
    assert bench.answers["f", 0].tokens == want(bench, tokens)
    assert bench.engine.stats().tiers.num_failed == (tier == HOST)
    bench.run(fork("again", "p.0"))
    assert bench.answers["again", 0].tokens == want(bench, tokens)


def test_a_capsule_waits_for_room_beside_what_runs_and_is_not_overtaken_for_ever(
    make_bench: MakeBench,
) -> None:
    """F6, part: what runs goes on to its end; after `ageing_steps` no branch is admitted before it."""
    bench, mover, tokens = make_parked(
        make_bench, num_blocks=24, num=40, max_answer_capsules=0, sched={"ageing_steps": 8}
    )
    long = Generate("long", pack_tokens(text(40, first=9)), Limits(30, ignore_eos=True))
    bench.submit(long)
    while ("long", 0) not in bench.answers:
        bench.step()
        mover.advance()
    bench.submit(Promote("u", "p.0"), fork("f", "p.0"))
    num_late = 0
    while "u" not in bench.replies:
        if bench.engine.has_work:
            bench.step()
        mover.advance()
        bench.submit(generate(f"late{num_late}", [num_late + 1] * 9))
        num_late += 1
        assert num_late < 60, "overtaken for ever"
    assert bench.answers["long", 0].last.finish == "length"
    move_all(bench, mover)
    assert bench.answers["f", 0].tokens == want(bench, tokens)


def test_a_capsule_that_needs_no_room_any_more_keeps_no_branch_out(make_bench: MakeBench) -> None:
    """F6, part: what it waited for is over, too, when a prompt has brought its text to the device."""
    sched = {"ageing_steps": 4}
    bench, mover, tokens = make_parked(
        make_bench, num_blocks=32, num=40, max_answer_capsules=0, sched=sched
    )
    bench.submit(Generate("long", pack_tokens(text(60, first=9)), Limits(50, ignore_eos=True)))
    while ("long", 0) not in bench.answers:
        bench.step()
        mover.advance()
    bench.submit(Generate("twin", pack_tokens([*tokens, 1]), Limits(5, ignore_eos=True)))
    bench.step()
    bench.submit(Promote("u", "p.0"))
    for _ in range(8):
        bench.step()
    assert bench.engine._moves.waiting, "it found room"
    while "u" not in bench.replies:
        mover.advance()
        bench.step()
    bench.submit(generate("late", [1] * 9))
    while ("late", 0) not in bench.answers:
        bench.step()
        mover.advance()
    assert bench.answers["long", 0].last.finish is None


def test_a_capsule_that_nobody_waits_for_takes_no_room(make_bench: MakeBench) -> None:
    """F6, part: its fork was cancelled, while it waited for room before all that came later."""
    bench, mover, tokens = make_parked(
        make_bench, num_blocks=24, num=40, max_answer_capsules=0, sched={"ageing_steps": 4}
    )
    bench.submit(Generate("long", pack_tokens(text(60, first=9)), Limits(30, ignore_eos=True)))
    while ("long", 0) not in bench.answers:
        bench.step()
        mover.advance()
    bench.submit(fork("f", "p.0", 2))
    for _ in range(8):
        bench.step()
        mover.advance()
    bench.submit(Cancel("f"), generate("late", [5] * 9))
    for _ in range(4):
        bench.step()
        mover.advance()
    assert ("late", 0) in bench.answers
    assert bench.answers["long", 0].last.finish is None
    bench.run(fork("again", "p.0"))
    move_all(bench, mover)
    assert bench.answers["again", 0].tokens == want(bench, tokens)
    assert bench.engine.stats().tiers.num_fetched_host == 10


def test_a_capsule_without_any_room_says_so_to_all_that_wait_for_it(make_bench: MakeBench) -> None:
    bench, mover, _ = make_parked(make_bench, num_blocks=24, num=40, max_kept_share=1.0)
    bench.run(*(prefill(f"k{i}", text(30, first=9 + i)) for i in range(2)))
    bench.submit(Promote("u", "p.0"), fork("f", "p.0"))
    move_all(bench, mover)
    assert isinstance(error_of(bench, "u"), PoolExhausted)
    assert isinstance(bench.answers["f", 0].error, PoolExhausted)
    bench.run(Release("k0.0"), Promote("again", "p.0"))
    move_all(bench, mover)
    assert bench.replies["again"].status.tier == "device"


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_capsule_that_ends_on_its_way_back_leaves_its_forks_what_came(
    make_bench: MakeBench, *, is_made_anew: bool
) -> None:
    """F6, part: it is released, or another text takes its id, which the reply then tells of."""
    bench, mover, tokens = make_parked(
        make_bench, num_blocks=24, tier=DISK, disk=DictDisk(), max_answer_capsules=0
    )
    bench.submit(Promote("u", "p.0"), fork("f", "p.0"))
    bench.run()
    bench.run(prefill("q", [7] * 9, capsule="p.0") if is_made_anew else Release("p.0"))
    move_all(bench, mover)
    if is_made_anew:
        assert bench.replies["u"].status.boundary == 9
    else:
        assert isinstance(error_of(bench, "u"), UnknownCapsule)
    assert bench.answers["f", 0].tokens == want(bench, tokens)
    bench.engine.check()
