"""A program whose engines demote capsules to disk until they are killed at a random system call.

    python crashing_engine.py FOLDER FIRST_SEED NUM

Engine i has the volume FOLDER/i, a thread of its own, and threads that copy. What it was told (capsules that
are durable, and those that are deleted), and those that it is about to release, it writes to FOLDER/i.said, a
line each, without buffers. It gets SIGKILL before, or in the middle of, a call of `os` that changes files,
drawn by the seed.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from mallee.actors.hosting.engine import EngineThread
from mallee.protocol.messages import (
    CapsuleReply,
    Command,
    Delete,
    Demote,
    Fork,
    Limits,
    Prefill,
    Promote,
    Release,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.protocol.model import ModelSpec
from mallee.testing.forward import MockForward
from mallee.worker.engine import Engine, MakeTiers
from mallee.worker.records import EngineConfig, StepResult
from mallee.worker.storage.volume import VolumeConfig
from mallee.worker.transfer.values import DISK, HOST
from support.live_fleet import make_engine
from support.volumes import volume_tiers

SAMPLED = Sampling(temperature=1.0, seed=7)
SPEC = ModelSpec(
    name="mock",
    fingerprint="f" * 16,
    vocab_size=64,
    max_model_len=512,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    dtype_nbytes=4,
    eos_token_ids=(),
)
ROOMY = VolumeConfig(1 << 30, run_nbytes=256)
CHANGING = ("writev", "rename", "fsync", "fdatasync", "open", "unlink")  # calls of `os`


def prompt(seed: int, number: int) -> list[int]:
    """Tokens of capsule `number`: some begin like others."""
    rng = random.Random(seed * 1000 + number)
    shared = random.Random(seed).choices(range(64), k=24)[: rng.choice([0, 8, 24])]
    return shared + rng.choices(range(64), k=rng.randrange(1, 30))


def tiers(folder: Path) -> MakeTiers:
    return volume_tiers(folder, host_blocks=64, config=ROOMY)


def engine(folder: Path, life: int) -> Engine:
    forward = MockForward(SPEC, num_blocks=48, block_size=4)
    config = EngineConfig(max_answer_capsules=0)
    return make_engine(forward, "w0", life, config, below=tiers(folder))


class Answers:
    """The `Results` of an engine's thread: ends and replies by request."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Update | CapsuleReply]] = {}

    async def ask(self, thread: EngineThread, command: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._waiting[command.request] = answer
        await thread.submit("g", [command])
        return await answer

    def deliver(self, result: StepResult, next_seq: int) -> None:
        for frame in result.frames.values():
            for update in frame.updates:
                if update.finish is not None:
                    self._waiting.pop(update.request).set_result(update)
            for reply in frame.replies:
                self._waiting.pop(reply.request).set_result(reply)

    def dropped(self, gateway: str) -> None:
        raise AssertionError("no gateway leaves")

    def fail(self, reason: str) -> None:
        os.write(2, f"{reason}\n".encode())
        os._exit(3)


def die_at(call: int, rng: random.Random) -> None:
    """SIGKILL at the call with that number; a write then wrote a part first."""
    calls = 0

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                if name == "writev":
                    data = b"".join(args[1])
                    os.write(args[0], data[: rng.randrange(len(data))])
                elif rng.random() < 0.5:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return run

    for name in CHANGING:
        setattr(os, name, wrapped(name, getattr(os, name)))


async def work(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    said = os.open(f"{folder}.said", os.O_WRONLY | os.O_CREAT, 0o600)
    made = engine(folder, 1)
    answers = Answers()
    thread = EngineThread(made, answers, clock=time.monotonic)
    thread.start()
    die_at(rng.randrange(1, 120), rng)
    names = count()

    async def life(number: int) -> None:
        """A capsule is made, demoted, perhaps promoted, forked and released."""
        name = f"p{number}"
        await answers.ask(thread, Prefill(name, pack_tokens(prompt(seed, number))))
        capsule = f"{name}.0"
        for tier in ([HOST, DISK], [DISK], [DISK, HOST])[rng.randrange(3)]:
            reply = await answers.ask(thread, Demote(f"d{next(names)}", capsule, tier))
            assert reply.error is None, reply
            if tier == DISK:
                assert reply.status.tier == "disk"
                os.write(said, f"durable {number}\n".encode())
        if rng.random() < 0.3:
            await answers.ask(thread, Promote(f"u{next(names)}", capsule))
        if rng.random() < 0.3:
            await answers.ask(thread, Fork(f"f{next(names)}", capsule, (b"",), Limits(4), SAMPLED))
        if rng.random() < 0.4:
            os.write(said, f"releasing {number}\n".encode())
            reply = await answers.ask(thread, Delete(f"x{next(names)}", capsule))
            assert reply.error is None, reply
            os.write(said, f"deleted {number}\n".encode())
        elif rng.random() < 0.2:
            os.write(said, f"releasing {number}\n".encode())
            released: list[Command] = [Release(capsule)]
            await thread.submit("g", released)

    for first in range(0, 300, 3):
        await asyncio.gather(*map(life, range(first, first + 3)))


def main() -> int:
    """Have a child work in a folder of its own for each seed, until it kills itself.

    The exit status: 0 if all were killed.
    """
    folder, first, num = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + num):
        child = os.fork()
        if child == 0:
            asyncio.run(work(folder / str(seed), seed))
            os._exit(1)  # it should not come so far
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
