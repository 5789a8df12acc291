"""Capsules of real engines that go as files to engines that never saw them."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.doubles.structures import MockStructures
from mallee.gateway.capsules.files.record import identity_of
from mallee.protocol.errors import CorruptExport
from mallee.protocol.ids import Incarnation, Scope, WorkerId, private_part
from mallee.protocol.messages import (
    Capture,
    Command,
    Generate,
    Grammar,
    Prefill,
    Sampling,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.watch import KVMemory
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from mallee.worker.storage.export import ExportReader, write_export
from mallee.worker.transfer.lower import LowerTiers
from mallee.worker.transfer.movers import Carrier, ThreadedMover
from mallee.worker.transfer.prices import MeasuredPrices
from mallee.worker.transfer.values import Lender
from support.capturing import Course, course, resume
from support.exact_capsules import CASES, LIMITS, NUM, PROMPT, tiny_forward
from support.files import BLOCK_SIZE, Desk
from support.fold_forward import FoldForward
from support.lending import Neighbours, holder
from support.waiting import until

CUT = 19
PATHS = [[10 + (i * j) % 50 for j in range(1, 100)] for i in range(1, 4)]
CHOICE = Grammar("choice", json.dumps(PATHS))
WAYS: dict[str, tuple[Sampling, Grammar | None]] = {
    "greedy": (Sampling(), None),
    "sampled": (Sampling(1.0, seed=11, repetition_penalty=1.2, presence_penalty=0.5), None),
    "constrained": (Sampling(1.0, seed=5), CHOICE),
}


pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


def engine_over(forward: Any, peers: Lender, life: int = 1) -> Engine:
    def below(journal: Journal, memory: KVMemory) -> LowerTiers:
        arena = memory.new_rows(0)
        carrier = Carrier(memory, arena, None, time.monotonic, peers=peers)
        prices = MeasuredPrices(memory.block_nbytes)
        mover = ThreadedMover(carrier, "w0")
        return LowerTiers(journal, carrier, prices=prices, mover=mover, always_fetches=True)

    return Engine(
        forward,
        config=EngineConfig(SchedulerConfig(16, 32), 32),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(life),
        structures=MockStructures(128, (2,)),
        below=below,
    )


async def run(engine: Engine, *commands: Command, later: Any = None) -> Course:
    """Until nothing is left to do or under way."""
    found = course(engine, *commands, later=later)
    lower = engine._lower
    assert lower is not None
    while lower.under_way:
        await until(lambda: engine.has_work or not lower.under_way)
        more = course(engine)
        for key, tokens in more.tokens.items():
            found.tokens.setdefault(key, []).extend(tokens)
        found.last.update(more.last)
    return found


class Side(Desk):
    """An engine, and the files that come from it and go to it."""

    def __init__(self, forward: Any, folder: Path) -> None:
        own = Neighbours()
        super().__init__(folder, model=forward.spec, max_spool_nbytes=1 << 30, lender=own)
        self.engine = own.engines["w0"] = engine_over(forward, self.lender)

    def close(self) -> None:
        self.engine.check()
        self.engine.close()
        self.pool.shutdown()

    async def file_of(self, capsule: str) -> bytes:
        return await self.sent(holder(self.engine, capsule=capsule))

    async def taken(self, name: str, data: bytes) -> Course:
        """Import `data` as capsule NAME.0."""
        incoming = await self.imports.begin(self.model, BLOCK_SIZE)
        await incoming.feed(data)
        found = await incoming.finish()
        record = found.record
        command = Prefill(
            name,
            record.tokens,
            private_part(Scope("mine"), found.holder.capsule),
            60.0,
            grammar=record.grammar,
            continuation=record.continuation,
            holders=(found.holder,),
        )
        course_of = await run(self.engine, command)
        incoming.close()
        return course_of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "kv_dtype", "way"), CASES)
async def test_a_file_goes_on_elsewhere_as_the_very_branch_bit_by_bit(
    kind: str, dtype: str, kv_dtype: str, way: str, tmp_path: Path
) -> None:
    """F1, part, S8, part: 64 tokens are an uninterrupted run's; exported again it is the same file."""
    num = {"num_blocks": 121, "block_size": BLOCK_SIZE}
    sides = [Side(tiny_forward(kind, dtype, kv_dtype, **num), tmp_path) for _ in range(2)]
    await goes_on(*sides, *WAYS[way])


async def test_a_file_has_the_state_of_recurrent_layers(tmp_path: Path) -> None:
    """F1, part, F11, part: of a toy, which looks at its state in each pass."""

    def side() -> Side:
        forward = FoldForward(num_blocks=121, block_size=BLOCK_SIZE, vocab_size=128)
        return Side(forward, tmp_path)

    await goes_on(side(), side(), *WAYS["sampled"])


@pytest.mark.parametrize("num_lost", [1, 38])
async def test_a_file_without_all_of_a_state_is_refused_by_name(
    num_lost: int, tmp_path: Path
) -> None:
    """F1, part, F11, part: of 38 rows of the size of a block the last few have the convolutions' inputs."""
    forward = tiny_forward("qwen3_5_text", "float32", "auto", num_blocks=64, block_size=BLOCK_SIZE)
    side = Side(forward, tmp_path)
    await run(side.engine, Prefill("c", pack_tokens(PROMPT)))
    whole = await side.file_of("c.0")
    identity, nbytes = identity_of(side.model, BLOCK_SIZE), side.model.block_nbytes(BLOCK_SIZE)
    reader = ExportReader(identity, nbytes, max_payload_nbytes=1 << 20, max_blocks=1 << 10)
    blocks = reader.feed(whole)[:-num_lost]
    rows = np.array([np.frombuffer(block.data, np.uint8) for block in blocks])
    keys = [block.key for block in blocks]
    pieces = write_export(
        identity, nbytes, capsule="exported", payload=reader.payload, keys=keys, rows=[rows]
    )
    with pytest.raises(CorruptExport, match=f"{58 - num_lost} blocks, where 77 tokens have 58"):
        await side.taken("i", b"".join(bytes(piece) for piece in pieces))
    side.close()


async def goes_on(here: Side, there: Side, sampling: Sampling, grammar: Grammar | None) -> None:
    command = Generate("r", pack_tokens(PROMPT), LIMITS, sampling, grammar=grammar)
    first = -(-len(PROMPT) // 16)  # steps until it draws
    whole = await run(here.engine, command, later={first + CUT - 1: [Capture("c", "r")]})
    tokens = whole.tokens["r", 0]
    assert len(tokens) == NUM
    data = await here.file_of("c.0")
    came = await there.taken("i", data)
    last = came.last["i", 0]
    num = last.boundary
    assert len(PROMPT) < num < len(PROMPT) + NUM
    assert last.cached_tokens == num - 1  # all that had KV
    assert there.engine.stats().num_prefill_tokens == 0
    assert await there.file_of("i.0") == data
    again = await run(there.engine, resume("again", "i.0"))
    assert again.tokens["again", 0] == tokens[num - len(PROMPT) :]
    for side in (here, there):
        side.close()
