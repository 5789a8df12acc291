"""Capsules and prefixes below the device: parked, evicted, brought back, exactly."""

from collections.abc import Callable
from typing import Any

import pytest

from mallee.protocol.messages import (
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Promote,
    Release,
    Sampling,
    pack_tokens,
)
from mallee.testing.forward import linear_tokens
from mallee.worker.kv.tiers.moves import DISK, HOST
from support.tiers import DictDisk, LateMover, make_tiers

SAMPLED = Sampling(temperature=1.0, seed=7)
MakeBench = Callable[..., Any]


def prefill(request: str, tokens: list[int]) -> Prefill:
    return Prefill(request, pack_tokens(tokens))


def generate(request: str, tokens: list[int], max_tokens: int = 8) -> Generate:
    return Generate(request, pack_tokens(tokens), Limits(max_tokens), SAMPLED)


def fork(request: str, capsule: str, n: int = 1, at: int | None = None) -> Fork:
    return Fork(request, capsule, (b"",) * n, Limits(8), SAMPLED, at=at)


def text(n: int, first: int = 3) -> list[int]:
    return [first + i % 29 for i in range(n)]


def evict_all(bench: Any, name: str = "flood") -> None:
    """Nothing that is only cache stays on the device."""
    size = bench.engine.stats().pool.total * bench.forward.block_size
    bench.run(generate(name, [2] * (size - bench.forward.block_size), 1))


def want(bench: Any, prompt: list[int]) -> list[int]:
    return linear_tokens(bench.forward.spec, prompt, 8, sampling=SAMPLED, seed=7)


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("num_tokens", [3, 8, 17, 40])
def test_a_demoted_capsule_comes_back_and_nothing_of_it_is_computed(
    make_bench: MakeBench, num_tokens: int, tier: int
) -> None:
    """F6, part: everything but a GPU."""
    bench = make_bench(num_blocks=24, below=make_tiers(64, disk=DictDisk()), max_answer_capsules=0)
    prompt = text(num_tokens)
    bench.run(prefill("p", prompt))
    bench.run(Demote("d", "p.0", tier))
    assert bench.replies["d"].status.tier == ("", "host", "disk")[tier]
    assert bench.engine.usage().live_blocks == 0
    evict_all(bench)
    computed = bench.forward.num_tokens
    bench.run(fork("f", "p.0", n=2))
    assert bench.answers["f", 0].tokens == want(bench, prompt)
    assert bench.forward.num_tokens - computed == 2 * 7  # the answers alone
    bench.run(Release("p.0"))
    tiers = bench.engine.stats().tiers
    assert (tiers.host_held, tiers.host_room) == (0, 64)
    assert tiers.disk_limit_nbytes == DictDisk().budget_nbytes


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


def test_what_the_device_evicts_is_found_in_host_memory(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64), max_answer_capsules=0)
    prompt = text(40)
    bench.run(generate("a", prompt))
    evict_all(bench)
    computed = bench.forward.num_tokens
    bench.run(generate("b", prompt))
    assert bench.answers["b", 0].tokens == bench.answers["a", 0].tokens == want(bench, prompt)
    assert bench.answers["b", 0].last.cached_tokens == 36  # the last block runs for its logits
    assert bench.forward.num_tokens - computed == 4 + 7


def test_an_answers_capsule_survives_its_eviction(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64))
    prompt = text(21)
    bench.run(generate("a", prompt))
    evict_all(bench)
    assert bench.engine.stats().capsules.num_replaced == 0
    whole = prompt + bench.answers["a", 0].tokens
    computed = bench.forward.num_tokens
    bench.run(fork("f", "a.0"))
    assert bench.answers["f", 0].tokens == want(bench, whole)
    assert bench.forward.num_tokens - computed == 1 + 7  # the token that was drawn last


def test_what_is_lost_below_is_computed_again(make_bench: MakeBench) -> None:
    """F24, part: a damaged block takes the cold path; no request fails."""
    disk = DictDisk()
    bench = make_bench(num_blocks=24, below=make_tiers(0, disk=disk), max_answer_capsules=0)
    prompt = text(41)
    bench.run(prefill("p", prompt), Demote("d", "p.0", DISK))
    bench.run(Demote("d2", "p.0", DISK))
    evict_all(bench)
    disk.broken.add(disk.named["p.0"][1][4])
    computed = bench.forward.num_tokens
    bench.run(fork("f", "p.0"))
    assert bench.answers["f", 0].tokens == want(bench, prompt)
    assert bench.forward.num_tokens - computed == (41 - 16) + 7


def test_siblings_wait_for_one_fetch(make_bench: MakeBench) -> None:
    movers: list[LateMover] = []
    bench = make_bench(num_blocks=40, below=make_tiers(64, movers=movers), max_answer_capsules=0)
    prompt = text(60)
    bench.run(generate("a", prompt))
    evict_all(bench)
    bench.submit(*(generate(f"s{i}", prompt) for i in range(4)))
    for _ in range(8):
        bench.step()
    assert not bench.engine.has_work  # until a block has moved
    assert movers[0].num_under_way == 1
    movers[0].advance()
    bench.run()
    assert all(bench.answers[f"s{i}", 0].tokens == want(bench, prompt) for i in range(4))
    assert bench.engine.stats().tiers.num_fetched_host == 13  # once, not four times


def test_a_durable_capsule_outlives_its_engine(make_bench: MakeBench) -> None:
    """F24, part: a warm start after a restart."""
    disk = DictDisk()
    first = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    prompt = text(26)
    first.run(prefill("p", prompt))
    first.run(Demote("d", "p.0", DISK))
    again = make_bench(num_blocks=24, below=make_tiers(0, disk=disk))
    again.run(Promote("up", "p.0"))
    assert again.replies["up"].status.tier == "device"
    again.run(fork("f", "p.0"))
    assert again.answers["f", 0].tokens == want(again, prompt)
    assert again.forward.num_tokens == 7
    again.run(Release("p.0"))
    assert not disk.named


def test_a_fork_inside_a_demoted_capsule_computes_at_most_a_block(make_bench: MakeBench) -> None:
    bench = make_bench(num_blocks=24, below=make_tiers(64), max_answer_capsules=0)
    prompt = text(40)
    bench.run(prefill("p", prompt))
    bench.run(Demote("d", "p.0", HOST))
    evict_all(bench)
    computed = bench.forward.num_tokens
    bench.run(fork("f", "p.0", at=23))
    assert bench.answers["f", 0].tokens == want(bench, prompt[:23])
    assert bench.forward.num_tokens - computed <= 4 + 7


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
