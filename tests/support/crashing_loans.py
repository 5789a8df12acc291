"""A program of pairs of processes that lend and borrow, one of which is killed in the midst.

    python crashing_loans.py FIRST_SEED NUM

Of even seeds the lender gets SIGKILL, of odd ones the borrower: before, or in the middle of, a message that
it sends or receives, drawn by the seed. The other goes on; the last line tells what happened, as JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mallee.actors.hosting.engine import EngineThread, _Item
from mallee.actors.lending.borrower import Borrower
from mallee.actors.lending.messages import HEAD
from mallee.actors.lending.server import LendingServer
from mallee.actors.lending.stream import Stream
from mallee.actors.transport.address import Address
from mallee.actors.transport.greeting import Secret
from mallee.protocol.messages import Fork, Generate, Holder, Limits, Prefill, Release, pack_tokens
from mallee.testing.forward import MockForward, linear_tokens
from mallee.worker.engine import Engine
from mallee.worker.kv.tiers.peers import Ask
from mallee.worker.records import EngineConfig
from support.crashing_engine import SAMPLED, SPEC, Answers
from support.lent_blocks import nothing_left
from support.live_fleet import make_engine
from support.run_out import run_out
from support.volumes import volume_tiers
from support.waiting import until

SECRET = Secret(b"the secret of these tests")
NUM_TEXTS = 8
WAIT_S = 20.0


def text(seed: int, number: int) -> list[int]:
    rng = random.Random(seed * 1000 + number)
    return rng.choices(range(64), k=rng.randrange(20, 250))


def engine(name: str, num_blocks: int, peers: Borrower | None) -> Engine:
    forward = MockForward(SPEC, num_blocks=num_blocks, block_size=4)
    config = EngineConfig(max_answer_capsules=0)
    below = None if peers is None else volume_tiers(None, peers=peers)
    return make_engine(forward, name, 1, config, below=below)


def die_at(call: int, rng: random.Random) -> None:
    """SIGKILL at the message, or part of one, with that number; of one that is sent some goes out first."""
    calls = 0

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Stream, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                if name == "send":
                    body = b"".join(bytes(part) for part in args[1:])
                    data = HEAD.pack(len(body), args[0]) + body
                    self._sock.send(data[: rng.randrange(len(data))])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *args)

        return run

    for name in ("send", "fill"):
        setattr(Stream, name, wrapped(name, getattr(Stream, name)))


class Lending:
    """An engine in a thread, with texts in its cache and each second one a capsule, that lends them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.engine = engine("w0", 1024, None)
        self.answers = Answers()
        self.thread = EngineThread(self.engine, self.answers, clock=time.monotonic)
        self.server = LendingServer(self.thread, SECRET, node="here")

    async def start(self, seed: int) -> None:
        self.thread.start()
        for number in range(NUM_TEXTS):
            command = Prefill(f"p{number}", pack_tokens(text(seed, number)))
            await self.answers.ask(self.thread, command)
        self.server.listen_unix(f"{self.path}.new")
        os.rename(f"{self.path}.new", self.path)

    async def on_engine(self, call: Callable[[], Any]) -> Any:
        """The outcome of `call`, made by the engine's thread."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def take() -> None:
            outcome = call()
            loop.call_soon_threadsafe(answer.set_result, outcome)

        self.thread._put(_Item(after_step=take))
        return await answer


async def lend(path: str, seed: int, borrower: int) -> dict[str, int]:
    """Lend until process `borrower` is dead; nothing of it is left, and another gets everything."""
    lending = Lending(path)
    await lending.start(seed)
    assert os.waitstatus_to_exitcode(await asyncio.to_thread(_wait, borrower)) == -signal.SIGKILL
    await until(lambda: not lending.server.num_connections)
    assert not (await lending.on_engine(lending.engine.stats)).lending.open
    await lending.on_engine(lending.engine.check)
    use = lending.server.counts.use
    assert use.num_open == 0
    again = Borrower("again", SECRET, node="here")
    num = await asyncio.to_thread(read_all, again, path, seed)
    assert num == sum(-(-len(text(seed, i)) // 4) for i in range(NUM_TEXTS))
    again.close()
    assert lending.server.failure is None
    await asyncio.to_thread(lending.server.close)
    for number in range(NUM_TEXTS):
        await lending.thread.submit("g", [Release(f"p{number}.0")])
    await lending.on_engine(lending.engine.check)
    assert (await lending.on_engine(lending.engine.usage)).live_blocks == 0
    await lending.thread.stop(RuntimeError("the test is over"))
    await asyncio.get_running_loop().shutdown_default_executor()
    return {"moved": use.nbytes, "failed": use.num_failed}


def _wait(child: int) -> int:
    return os.waitpid(child, 0)[1]


def holder(path: str, seed: int, number: int) -> Holder:
    capsule = f"p{number}.0" if number % 2 else ""
    return Holder("w0", 1, str(Address("here", path)), len(text(seed, number)), capsule)


def read_all(borrower: Borrower, path: str, seed: int) -> int:
    """Read every capsule from the first to the last block; their number."""
    num = 0
    for number in range(NUM_TEXTS):
        asked = holder(path, seed, number)
        held = Holder(asked.worker, 1, asked.address, asked.num_tokens, f"p{number}.0")
        loan = borrower.lend(Ask(held, (), SPEC.identity))
        forward = MockForward(SPEC, num_blocks=1, block_size=4)
        rows = [forward.kv[0].copy().view("u1") for _ in range(loan.num_blocks)]
        loan.read(range(loan.num_blocks), rows)
        num += loan.num_blocks
        loan.close()
    return num


def borrow(path: str, seed: int) -> dict[str, int]:
    """Answer each text, with the lender as its holder: right, whatever becomes of that; nothing leaks."""
    while not Path(path).exists():
        time.sleep(0.002)
    peers = Borrower("w1", SECRET, node="here")
    made = engine("w1", 96, peers)
    rng = random.Random(seed)
    for number in rng.sample(range(NUM_TEXTS), NUM_TEXTS):
        tokens, held = text(seed, number), holder(path, seed, number)
        want = linear_tokens(SPEC, tokens, 6, sampling=SAMPLED, seed=7)
        packed, name = pack_tokens(tokens), f"r{number}"
        if held.capsule:
            made.submit(Prefill(name, packed, holders=(held,)), "g")
            run_out(made, within_s=WAIT_S)
            made.submit(Fork(f"f{number}", f"{name}.0", (b"",), Limits(6), SAMPLED), "g")
        else:
            made.submit(Generate(name, packed, Limits(6), SAMPLED, holders=(held,)), "g")
        (got,) = run_out(made, within_s=WAIT_S).tokens.values()
        assert got == want, (seed, number, got, want)
        if held.capsule:
            made.submit(Release(f"{name}.0"), "g")
            run_out(made, within_s=WAIT_S)
        made.check()
    assert made.usage().live_blocks == 0
    tiers = made.stats().tiers
    assert tiers is not None
    made.close()
    assert peers.counts.use.num_open == 0
    peers.close()
    return {"moved": peers.counts.use.nbytes, "failed": peers.counts.use.num_failed}


async def lend_until_killed(path: str, seed: int) -> None:
    lending = Lending(path)
    await lending.start(seed)
    await asyncio.sleep(WAIT_S)


def story(folder: str, seed: int) -> dict[str, int]:
    path, rng = f"{folder}/{seed}.sock", random.Random(seed)
    child = os.fork()
    if child == 0:
        die_at(rng.randrange(1, 130), rng)
        if seed % 2:
            borrow(path, seed)
            os.kill(os.getpid(), signal.SIGKILL)  # all was over before its call came
        asyncio.run(lend_until_killed(path, seed))
        os._exit(1)
    if seed % 2:
        return asyncio.run(lend(path, seed, child))
    outcome = borrow(path, seed)
    os.kill(child, signal.SIGKILL)  # if its call never came
    assert os.waitstatus_to_exitcode(_wait(child)) == -signal.SIGKILL
    return outcome


def main() -> int:
    first, num = int(sys.argv[1]), int(sys.argv[2])
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + num):
            with nothing_left():
                outcomes.append(story(folder, seed))
    sys.stdout.write(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
