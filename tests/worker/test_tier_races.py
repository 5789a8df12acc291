"""Capsules and blocks that end, change or are asked for again while they move between tiers."""

from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.messages import (
    Cut,
    Demote,
    Fork,
    Generate,
    Limits,
    Pin,
    Prefill,
    Promote,
    Release,
    Rewind,
    Sampling,
    pack_tokens,
)
from mallee.testing.forward import linear_tokens
from mallee.worker.kv.tiers.moves import DISK, HOST
from support.tiers import DictDisk, LateMover, make_tiers

SAMPLED = Sampling(temperature=1.0, seed=7)
MakeBench = Callable[..., Any]


def text(n: int) -> list[int]:
    return [3 + i % 29 for i in range(n)]


def prefill(request: str, tokens: list[int], **more: Any) -> Prefill:
    return Prefill(request, pack_tokens(tokens), **more)


def fork(request: str, capsule: str, n: int = 1) -> Fork:
    return Fork(request, capsule, (b"",) * n, Limits(8), SAMPLED)


def evict_all(bench: Any) -> None:
    """Nothing that was cached stays on the device."""
    size = (bench.engine.stats().pool.total - 1) * bench.forward.block_size
    for token in (1, 2):
        flood = pack_tokens([token] * size)
        bench.run(Generate(f"flood{token}", flood, Limits(1), SAMPLED))


def move_all(bench: Any, mover: LateMover) -> None:
    bench.run()
    while mover.num_under_way:
        mover.advance()
        bench.run()


def want(bench: Any, prompt: list[int]) -> list[int]:
    return linear_tokens(bench.forward.spec, prompt, 8, sampling=SAMPLED, seed=7)


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("num_tokens", [16, 17])
def test_a_fork_outlives_the_release_of_its_capsule_on_the_way_up(
    make_bench: MakeBench, num_tokens: int, tier: int
) -> None:
    movers: list[LateMover] = []
    bench = make_bench(
        num_blocks=24, below=make_tiers(64, disk=DictDisk(), movers=movers), max_answer_capsules=0
    )
    bench.run(prefill("p", text(num_tokens)))
    bench.run(Demote("d", "p.0", tier))
    move_all(bench, movers[0])
    assert bench.replies["d"].status.tier == ("", "host", "disk")[tier]
    evict_all(bench)
    bench.submit(fork("f", "p.0"))
    bench.step()
    bench.submit(Release("p.0"))
    num_passes = bench.forward.num_passes
    move_all(bench, movers[0])
    assert bench.answers["f", 0].tokens == want(bench, text(num_tokens))
    assert bench.forward.num_passes - num_passes == 7  # none over nothing


def test_the_first_tokens_of_a_capsule_below_are_a_capsule_that_can_be_promoted(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64), max_answer_capsules=0)
    bench.run(prefill("p", text(10)))
    bench.run(Demote("d", "p.0", HOST))
    bench.run(Rewind("r", "p.0", 3))
    bench.run(Promote("up", "r.0"))
    assert bench.replies["up"].status.boundary == 3
    bench.run(fork("f", "r.0"))
    assert bench.answers["f", 0].tokens == want(bench, text(3))


def test_a_promotion_is_answered_though_its_capsule_is_made_anew_meanwhile(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64), max_answer_capsules=0)
    bench.run(prefill("p", text(10)))
    bench.run(Demote("d", "p.0", HOST))
    bench.run(prefill("q", text(10), capsule="p.0"), Promote("up", "p.0"))
    assert bench.replies["up"].status.tier == "device"


def test_a_fork_of_fewer_tokens_than_a_block_needs_no_tiers(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.run(prefill("p", text(10)), Rewind("r", "p.0", 3))
    bench.run(Rewind("r2", "p.0", 3))
    bench.run(fork("f", "r2.0", n=2))
    assert bench.answers["f", 0].tokens == want(bench, text(3))


def test_an_answer_cut_while_its_blocks_are_fetched_leaves_what_its_client_saw(
    make_bench: MakeBench,
) -> None:
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=24, below=make_tiers(64, movers=movers))
    bench.run(prefill("p", text(40), replaceable=True))
    evict_all(bench)
    bench.submit(Generate("g", pack_tokens(text(40)), Limits(8), SAMPLED))
    bench.step()
    assert movers[0].num_under_way
    bench.submit(Cut("g", 0, 40, b""))
    bench.step()
    move_all(bench, movers[0])
    bench.run(fork("f", "g.0"))
    assert bench.answers["f", 0].tokens == want(bench, text(40))


def test_a_capsule_made_anew_while_its_record_is_written_keeps_its_own(
    make_bench: MakeBench,
) -> None:
    disk, movers = DictDisk(), list[LateMover]()
    below = make_tiers(0, disk=disk, movers=movers)
    bench = make_bench(num_blocks=24, below=below, max_answer_capsules=0)
    bench.run(prefill("p", text(10)))
    bench.run(Demote("d1", "p.0", DISK))
    bench.run(prefill("q", text(10), capsule="p.0"))
    bench.run(Demote("d2", "p.0", DISK))
    move_all(bench, movers[0])
    assert bench.replies["d2"].status.tier == "disk"
    again = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    again.run(fork("f", "p.0"))
    assert again.answers["f", 0].tokens == want(again, text(10))


def test_logits_of_a_capsule_below_go_with_its_pin(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64))
    bench.run(prefill("p", text(16)))
    bench.run(Demote("d", "p.0", HOST))
    bench.run(Pin("u", "p.0", is_pinned=False))
    bench.run(fork("f", "p.0"))
    assert bench.answers["f", 0].tokens == want(bench, text(16))


def test_a_record_that_cannot_be_read_keeps_no_worker_from_its_start(make_bench: MakeBench) -> None:
    disk = DictDisk()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    bench.run(prefill("p", text(10)), prefill("q", text(9)))
    bench.run(Demote("d", "p.0", DISK), Demote("e", "q.0", DISK))
    disk.named["p.0"] = (b"\x91\x00", disk.named["p.0"][1])
    again = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    again.run(fork("f", "q.0"))
    assert again.answers["f", 0].tokens == want(again, text(9))
    again.run(fork("g", "p.0"))
    assert again.answers["g", -1].error.code == "capsule_not_found"
