"""Capsules and prefixes below the device: parked, evicted, brought back, exactly."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest

from bench.doubles.forward import MockForward
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import CodecError, DeviceMemoryExhausted
from mallee.protocol.messages import (
    Cut,
    Demote,
    Fork,
    Generate,
    Limits,
    Pin,
    Promote,
    Rewind,
    pack_tokens,
)
from mallee.worker.transfer.values import DISK, HOST
from support.tier_commands import SAMPLED, flood, fork, generate, move_all, prefill, text, want
from support.tiers import DictDisk, LateMover, make_tiers

MakeBench = Callable[..., Any]


def test_moves_give_way_while_answers_are_drawn_and_only_then(make_bench: MakeBench) -> None:
    """The bound on their bandwidth holds beside decodes; an engine without any copies at full speed."""
    movers: list[LateMover] = []
    paused: list[int] = []
    below = make_tiers(64, movers=movers, pause=paused.append)
    bench = make_bench(num_blocks=64, below=below, max_answer_capsules=0)
    bench.run(prefill("p", text(17)))
    bench.submit(Demote("d", "p.0", HOST))
    bench.step()
    movers[0].advance()
    bench.run()
    assert bench.replies["d"].status.tier == "host"
    assert not paused
    bench.run(prefill("q", text(17, first=9)))
    bench.submit(generate("r", text(5)))
    for _ in range(3):
        bench.step()
    bench.submit(Demote("e", "q.0", HOST))
    bench.step()
    movers[0].advance()
    bench.run()
    assert sum(paused) == 5 * bench.forward.block_nbytes


def test_siblings_wait_for_one_fetch(make_bench: MakeBench) -> None:
    """Blocks that the device evicted are found in host memory; the last one runs for its logits."""
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=40, below=make_tiers(64, movers=movers), max_answer_capsules=0)
    prompt = text(60)
    bench.run(generate("a", prompt))
    flood(bench, *movers)
    bench.submit(*(generate(f"s{i}", prompt) for i in range(4)))
    for _ in range(8):
        bench.step()
    assert not bench.engine.has_work  # until a block has moved
    assert movers[0].num_under_way == 1
    move_all(bench, *movers)
    assert all(bench.answers[f"s{i}", 0].tokens == want(bench, prompt) for i in range(4))
    assert bench.answers["s0", 0].last.cached_tokens == 56
    assert bench.engine.stats().tiers.num_fetched_host == 14  # once, not four times


def test_sessions_of_four_times_the_device_take_turns_and_compute_nothing_twice(
    make_bench: MakeBench,
) -> None:
    """F26, part: round robin; every turn goes on from the answer before, which host memory has."""
    num_sessions, num_turns, own = 8, 5, 5
    bench = make_bench(num_blocks=24, below=make_tiers(320))  # of 4 tokens
    texts = {f"s{i}": text(20, first=3 + i) for i in range(num_sessions)}
    lasts: dict[str, str] = {}
    for name, tokens in texts.items():
        bench.run(generate(f"{name}.0", tokens))
    computed = bench.forward.num_tokens
    for turn in range(num_turns):
        for name, tokens in texts.items():
            tokens += bench.answers[lasts.get(name, f"{name}.0"), 0].tokens
            suffix = text(own, first=9 + turn)
            last, request = lasts.get(name, f"{name}.0"), f"{name}.{turn + 1}"
            bench.run(Fork(request, f"{last}.0", (pack_tokens(suffix),), Limits(8), SAMPLED))
            tokens += suffix
            assert bench.answers[request, 0].tokens == want(bench, tokens)
            lasts[name] = request
    assert sum(-(-len(tokens) // 4) for tokens in texts.values()) > 4 * 24
    turns = num_sessions * num_turns
    assert bench.forward.num_tokens - computed == turns * (
        1 + own + 7
    )  # a drawn token, and its own


def test_a_prompt_waits_for_what_is_leaving_and_no_branch_gives_way(make_bench: MakeBench) -> None:
    """Blocks that are on their way to host memory are not free yet: others draw on meanwhile."""
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=24, below=make_tiers(64, movers=movers), max_answer_capsules=0)
    old, prompt, other = text(60, first=9), text(40), text(4, first=20)
    bench.run(generate("old", old))
    bench.submit(generate("d", other))
    bench.step()
    bench.submit(generate("p", prompt))
    for _ in range(20):
        if bench.engine.has_work:
            bench.step()
    assert bench.answers["d", 0].tokens == want(bench, other)
    assert ("p", 0) not in bench.answers
    assert movers[0].num_under_way
    assert bench.engine.stats().sched.num_preemptions == 0
    move_all(bench, *movers)
    assert bench.answers["p", 0].tokens == want(bench, prompt)
    assert bench.engine.stats().sched.num_preemptions == 0
    before = bench.forward.num_tokens
    bench.submit(generate("again", old))
    move_all(bench, *movers)
    assert bench.answers["again", 0].tokens == want(bench, old)
    assert bench.forward.num_tokens - before < 60  # what left came back


# Capsules and blocks that end, change or are asked for again while they move between tiers


def test_the_first_tokens_of_a_capsule_below_are_a_capsule_that_can_be_promoted(
    make_bench: MakeBench,
) -> None:
    """Of fewer tokens than a block has; they can be forked where there are no tiers, too."""
    bench = make_bench(num_blocks=24, below=make_tiers(64), max_answer_capsules=0)
    bench.run(prefill("p", text(10)))
    bench.run(Demote("d", "p.0", HOST))
    bench.run(Rewind("r", "p.0", 3))
    bench.run(Promote("up", "r.0"))
    assert bench.replies["up"].status.boundary == 3
    plain = make_bench()
    plain.run(prefill("p", text(10)), Rewind("r", "p.0", 3))
    plain.run(Rewind("r2", "p.0", 3))
    for each, capsule in ((bench, "r.0"), (plain, "r2.0")):
        each.run(fork("f", capsule, n=2))
        assert each.answers["f", 0].tokens == want(each, text(3))


def test_an_answer_cut_while_its_blocks_are_fetched_leaves_what_its_client_saw(
    make_bench: MakeBench,
) -> None:
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=24, below=make_tiers(64, movers=movers))
    bench.run(prefill("p", text(40), replaceable=True))
    flood(bench, *movers)
    bench.submit(Generate("g", pack_tokens(text(40)), Limits(8), SAMPLED))
    bench.step()
    assert movers[0].num_under_way
    bench.submit(Cut("g", 0, 40, b""))
    bench.step()
    move_all(bench, movers[0])
    bench.submit(fork("f", "g.0"))
    move_all(bench, movers[0])
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


def test_logits_that_cannot_be_read_keep_no_worker_from_its_start(make_bench: MakeBench) -> None:
    """The device has no room for them, or they are of another length: their last token is computed again."""
    disk = DictDisk()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    bench.run(prefill("p", text(10)))
    bench.run(Demote("d", "p.0", DISK))
    for error in (DeviceMemoryExhausted("tried to allocate 2 MiB"), CodecError("6 bytes")):
        forward = MockForward(mock_spec(), num_blocks=24, block_size=4)
        forward.undump = Mock(side_effect=error)  # type: ignore[method-assign]
        again = make_bench(forward=forward, below=make_tiers(0, disk=disk))
        forward.undump.assert_called_once()
        again.run(fork("f", "p.0"))
        assert again.answers["f", 0].tokens == want(again, text(10))


def test_a_step_that_raises_has_begun_its_fetch_once(make_bench: MakeBench) -> None:
    """Its caller calls again: what fetches goes on fetching, what computes is computed."""
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=40, below=make_tiers(64, movers=movers), max_answer_capsules=0)
    bench.run(generate("a", text(60)))
    flood(bench, *movers)
    move_all(bench, movers[0])
    bench.submit(generate("f", text(60)), generate("c", text(5, first=20)))
    with (
        patch.object(bench.forward, "forward", side_effect=RuntimeError("the pass failed")),
        pytest.raises(RuntimeError, match="the pass failed"),
    ):
        bench.step()
    bench.step()
    assert movers[0].num_under_way == 1
    move_all(bench, movers[0])
    assert bench.answers["f", 0].tokens == want(bench, text(60))
    assert bench.answers["c", 0].tokens == want(bench, text(5, first=20))
    assert bench.engine.stats().tiers.num_fetched_host == 14
