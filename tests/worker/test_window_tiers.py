"""Models with sliding windows and tiers below: what comes back goes on as if all KV had been kept."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.doubles.random_model import random_model
from mallee.protocol.messages import (
    Demote,
    Fork,
    Generate,
    Release,
    Rewind,
)
from mallee.worker.capsules.capsule import blocks_of
from mallee.worker.engine import MakeTiers
from mallee.worker.kv.sides.group import row_spans
from mallee.worker.transfer.values import DISK, HOST, Ask
from support.driving import drive
from support.lending import holder, lent_by
from support.tier_commands import NUM, SAMPLED, flood, fork, generate, prefill
from support.tiers import DictDisk, make_tiers
from support.whole_kv import answer_of_all_kv

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")

MODEL = random_model("gemma3_text", 3, sliding_window=10)
MakeBench = Callable[..., Any]


@pytest.fixture
def make(make_bench: Callable[..., Any]) -> MakeBench:
    """Engines over 50 blocks of the full group and 20 of the window's; each of these is three rows."""

    def made(below: MakeTiers | None, answers: int = 0) -> Any:
        forward = MODEL.forward(num_blocks=50, block_size=4)
        return make_bench(forward=forward, below=below, max_answer_capsules=answers, max_rows=8)

    return made


_numbers = random.Random(5)


def numbers(n: int) -> list[int]:
    return [_numbers.randrange(128) for _ in range(n)]


def tokens_of(bench: Any, command: Fork | Generate) -> list[int]:
    """The tokens that `command` draws at first."""
    bench.run(command)
    return list(bench.answers[command.request, 0].tokens)


def num_computed(bench: Any) -> int:
    return int(bench.engine.stats().num_prefill_tokens)


def num_fetched(bench: Any) -> int:
    tiers = bench.engine.stats().tiers
    return int(tiers.num_fetched_host + tiers.num_fetched_disk)


def want(text: list[int]) -> list[int]:
    return answer_of_all_kv(MODEL, text, NUM, SAMPLED)


def test_every_byte_of_a_block_is_in_its_rows_and_in_no_others() -> None:
    forward: Any = MODEL.forward(num_blocks=50, block_size=4)
    (span,) = row_spans(forward.spec.groups, 50, 4)
    assert span == (1, 50, 3)
    nbytes = forward.memory.block_nbytes
    made = np.random.default_rng(1).integers(0, 256, (50 + 3 * 20, nbytes), np.uint8)
    forward.memory.write(range(len(made)), made)
    assert made.nbytes == forward.memory_stats().kv
    back = np.zeros_like(made)
    forward.memory.read(range(len(made)), back)
    assert (back == made).all()
    keys = {key for value in range(500) for key in span.keys(value)}
    assert len(keys) == 1500


def test_a_loan_clears_the_slots_that_a_capsule_does_not_fill_in_every_group(
    make: MakeBench,
) -> None:
    bench, other = make(None), make(None)
    here: Any = bench.forward
    there: Any = other.forward
    for memory in here._memories:
        memory.fill_(1)
    bench.run(prefill("p", numbers(18)))
    for memory, copy in zip(here._memories, there._memories, strict=True):
        copy.copy_(memory)
    engine = bench.engine
    loan = lent_by(engine, Ask(holder(engine, 18, "p.0"), (), here.spec.identity), drive)
    rows = np.zeros((loan.num_blocks, loan.block_nbytes), np.uint8)
    loan.read(range(loan.num_blocks), rows)
    loan.close()
    capsule: Any = engine._capsules.peek("p.0")
    blocks = list(blocks_of(engine._tree, capsule.node))
    there.memory.write(blocks, rows)
    last = blocks[4], (blocks[5] - 50) // 3
    for memory, copy, block in zip(here._memories, there._memories, last, strict=True):
        changed = (memory != copy).flatten(2).any(2).all(0).nonzero().flatten().tolist()
        assert changed == [block * 4 + 2, block * 4 + 3]
        assert not copy[:, changed].any()


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("num_tokens", [3, 8, 17, 40, 101])
def test_a_demoted_capsule_comes_back_and_nothing_of_it_is_computed(
    make: MakeBench, num_tokens: int, tier: int
) -> None:
    """F6, part: full blocks and, of the windows, what is read after them; longer than the windows' pool.

    Forks inside of it, and of a capsule of its beginning, are exact too.
    """
    bench = make(make_tiers(80, disk=DictDisk()))
    text = numbers(num_tokens)
    bench.run(prefill("p", text))
    bench.run(Demote("d", "p.0", tier))
    assert bench.engine.usage().live_blocks == 0
    told = bench.engine.snapshot().by_tier[tier]
    assert len(told) == 8 * (num_tokens // 4), "no event tells of rows of windows"
    for at in {max(1, num_tokens * part // 8) for part in (3, 7)}:
        flood(bench)
        assert tokens_of(bench, fork(f"f{at}", "p.0", at=at)) == want(text[:at])
    flood(bench)
    computed = num_computed(bench)
    assert tokens_of(bench, fork("f", "p.0")) == want(text)
    assert num_computed(bench) == computed
    bench.run(Rewind("r", "p.0", max(1, num_tokens // 2)))
    assert tokens_of(bench, fork("g", "r.0")) == want(text[: max(1, num_tokens // 2)])
    bench.run(Release("p.0"), Release("r.0"))
    assert bench.engine.stats().tiers.host_held == 0


def test_answers_survive_where_windows_alone_lack_room(make: MakeBench) -> None:
    """Many short texts fill the windows' pool first."""
    bench = make(make_tiers(400), answers=64)
    texts = [numbers(9) for _ in range(12)]
    answers = [tokens_of(bench, generate(f"a{i}", text)) for i, text in enumerate(texts)]
    assert bench.engine.stats().capsules.num_replaced == 0
    computed = num_computed(bench)
    for i, text in enumerate(texts):
        assert tokens_of(bench, fork(f"f{i}", f"a{i}.0")) == want(text + answers[i])
    assert num_computed(bench) - computed == len(texts)
    assert num_fetched(bench) > 0


@pytest.mark.parametrize("group", [0, 1])
def test_a_row_that_is_lost_below_is_computed_again(make: MakeBench, group: int) -> None:
    """F24, part: a damaged row of any group takes the cold path; no request fails."""
    disk = DictDisk()
    bench = make(make_tiers(0, disk=disk))
    text = numbers(41)
    bench.run(prefill("p", text))
    bench.run(Demote("d", "p.0", DISK))
    flood(bench)
    num_full = -(-len(text) // 4)
    disk.broken.add(disk.named["p.0"][1][4 if group == 0 else num_full + 4])
    for request in ("f", "g"):
        assert tokens_of(bench, fork(request, "p.0")) == want(text)
