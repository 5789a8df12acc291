"""Models with sliding windows and tiers below: what comes back goes on as if all KV had been kept."""

import random
from typing import Any

import numpy as np
import pytest

from mallee.protocol.messages import (
    Command,
    Demote,
    Fork,
    Generate,
    Limits,
    Prefill,
    Release,
    Rewind,
    Sampling,
    pack_tokens,
)
from mallee.testing.random_model import random_model
from mallee.worker.capsules.capsule import copy_of
from mallee.worker.engine import Engine, MakeTiers
from mallee.worker.forward import Forward
from mallee.worker.kv.tiers.moves import DISK, HOST
from mallee.worker.kv.tiers.peers import Ask
from mallee.worker.kv.tiers.window_rows import row_spans
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.driving import drive, engine_over
from support.lending import holder, lent_by
from support.tiers import DictDisk, make_tiers
from support.whole_kv import answer_of_all_kv

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")

WINDOW = 10
MODEL = random_model("gemma3_text", 3, sliding_window=WINDOW)
SAMPLED = Sampling(1.0, seed=7)
NUM = 12


class Bench:
    """An engine over 50 blocks of the full group and 20 of the window's; each of these is three rows."""

    def __init__(self, below: MakeTiers | None, *, answers: int = 0) -> None:
        self.forward: Forward = MODEL.forward(num_blocks=50, block_size=4)
        self.engine = self.over(self.forward, below, answers)
        self.num = 0

    def over(self, forward: Forward, below: MakeTiers | None, answers: int) -> Engine:
        return engine_over(
            forward, config=EngineConfig(SchedulerConfig(16, 8), answers), below=below
        )

    def run(self, *commands: Command) -> list[int]:
        """The tokens of the last one's first branch."""
        for command in commands:
            self.engine.submit(command, "g")
        answers = drive(self.engine)
        self.engine.check()
        if commands and isinstance(commands[-1], Generate | Fork):
            return answers[commands[-1].request, 0][0]
        return []

    def generate(self, text: list[int]) -> list[int]:
        self.num += 1
        return self.run(generate(f"g{self.num}", text))

    def fork(self, capsule: str, at: int | None = None) -> list[int]:
        self.num += 1
        name, limits = f"f{self.num}", Limits(NUM, ignore_eos=True)
        return self.run(Fork(name, capsule, (b"",), limits, SAMPLED, at=at))

    def flood(self) -> None:
        """Nothing that is only cache stays on the device."""
        self.num += 1
        limits = Limits(1, ignore_eos=True)
        self.run(Generate(f"flood{self.num}", pack_tokens(numbers(180)), limits))

    @property
    def num_computed(self) -> int:
        return self.engine.stats().num_prefill_tokens

    @property
    def num_fetched(self) -> int:
        tiers = self.engine.stats().tiers
        assert tiers is not None
        return tiers.num_fetched_host + tiers.num_fetched_disk


_numbers = random.Random(5)


def numbers(n: int) -> list[int]:
    return [_numbers.randrange(128) for _ in range(n)]


def generate(name: str, text: list[int]) -> Generate:
    return Generate(name, pack_tokens(text), Limits(NUM, ignore_eos=True), SAMPLED)


def want(text: list[int]) -> list[int]:
    return answer_of_all_kv(MODEL, text, NUM, SAMPLED)


def test_every_byte_of_a_block_is_in_its_rows_and_in_no_others() -> None:
    forward: Any = MODEL.forward(num_blocks=50, block_size=4)
    (span,) = row_spans(forward.spec.groups, 50, 4)
    assert span == (1, 50, 3)
    nbytes = forward.memory.block_nbytes
    made = np.random.default_rng(1).integers(0, 256, (50 + 3 * 20, nbytes), np.uint8)
    forward.memory.write(range(len(made)), made)
    assert made.nbytes == forward.stats().kv_nbytes
    back = np.zeros_like(made)
    forward.memory.read(range(len(made)), back)
    assert (back == made).all()
    keys = {key for value in range(500) for key in span.keys(value)}
    assert len(keys) == 1500


def test_a_loan_clears_the_slots_that_a_capsule_does_not_fill_in_every_group() -> None:
    bench, other = Bench(None), Bench(None)
    here: Any = bench.forward
    there: Any = other.forward
    for memory in here._memories:
        memory.fill_(1)
    bench.run(Prefill("p", pack_tokens(numbers(18))))
    for memory, copy in zip(here._memories, there._memories, strict=True):
        copy.copy_(memory)
    engine = bench.engine
    loan = lent_by(engine, Ask(holder(engine, 18, "p.0"), (), here.spec.identity), drive)
    rows = list(np.zeros((loan.num_blocks, loan.block_nbytes), np.uint8))
    loan.read(range(loan.num_blocks), rows)
    loan.close()
    capsule: Any = engine._capsules.peek("p.0")
    blocks = copy_of(engine._tree, capsule.node).blocks
    there.memory.write(blocks, rows)
    last = blocks[4], (blocks[5] - 50) // 3
    for memory, copy, block in zip(here._memories, there._memories, last, strict=True):
        changed = (memory != copy).flatten(2).any(2).all(0).nonzero().flatten().tolist()
        assert changed == [block * 4 + 2, block * 4 + 3]
        assert not copy[:, changed].any()


@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("num_tokens", [3, 8, 17, 40, 101])
def test_a_demoted_capsule_comes_back_and_nothing_of_it_is_computed(
    num_tokens: int, tier: int
) -> None:
    """F6, part: full blocks and, of the windows, what is read after them; longer than the windows' pool.

    Forks inside of it, and of a capsule of its beginning, are exact too.
    """
    bench = Bench(make_tiers(80, disk=DictDisk()))
    text = numbers(num_tokens)
    bench.run(Prefill("p", pack_tokens(text)))
    bench.run(Demote("d", "p.0", tier))
    assert bench.engine.usage().live_blocks == 0
    told = bench.engine.snapshot().by_tier[tier]
    assert len(told) == 8 * (num_tokens // 4), "no event tells of rows of windows"
    bench.flood()
    computed = bench.num_computed
    assert bench.fork("p.0") == want(text)
    assert bench.num_computed == computed
    for at in {max(1, num_tokens * part // 8) for part in (3, 7)}:
        assert bench.fork("p.0", at) == want(text[:at])
    bench.run(Rewind("r", "p.0", max(1, num_tokens // 2)))
    assert bench.fork("r.0") == want(text[: max(1, num_tokens // 2)])
    bench.run(Release("p.0"), Release("r.0"))
    tiers = bench.engine.stats().tiers
    assert tiers is not None
    assert tiers.host_held == 0


def test_answers_survive_where_windows_alone_lack_room() -> None:
    """Many short texts fill the windows' pool first."""
    bench = Bench(make_tiers(400), answers=64)
    texts = [numbers(9) for _ in range(12)]
    answers = [bench.run(generate(f"a{i}", text)) for i, text in enumerate(texts)]
    assert bench.engine.stats().capsules.num_replaced == 0
    computed = bench.num_computed
    for i, text in enumerate(texts):
        assert bench.fork(f"a{i}.0") == want(text + answers[i])
    assert bench.num_computed - computed == len(texts)
    assert bench.num_fetched > 0


def test_a_prompt_goes_on_from_what_the_device_evicted() -> None:
    bench = Bench(make_tiers(200))
    text = numbers(40)
    answer = bench.generate(text)
    bench.flood()
    computed = bench.num_computed
    longer = text + answer + numbers(5)
    assert bench.generate(longer) == want(longer)
    assert bench.num_fetched > 0
    assert bench.num_computed - computed <= 12
