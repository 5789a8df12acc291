"""A program that works on volumes, each until it is killed at a random system call.

    python crashing.py FOLDER FIRST_SEED NUM

Volume i is FOLDER/i. Its process gets SIGKILL before, or in the middle of, a call of `os` that changes
files, drawn by the seed. What it was told (a commit's or a drop's return, losses), and what it is about to
remove, it writes to FOLDER/i.said, a line each, without buffers, before it goes on. Volumes of even seeds are
so small that they evict, those of odd ones never do.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mallee.worker.storage.files import Directory
from mallee.worker.storage.volume import Volume, VolumeConfig

BLOCK = 512
IDENTITY = {"weights": "abc"}
CHANGING = ("writev", "rename", "fsync", "fdatasync", "open")
ROOMY = VolumeConfig(1 << 30, run_nbytes=4 * BLOCK)
SMALL = VolumeConfig(64 * BLOCK, owner_nbytes=24 * BLOCK, run_nbytes=4 * BLOCK)


def row(key: int) -> bytes:
    return random.Random(key).randbytes(BLOCK)


def payload(capsule: str, version: int) -> bytes:
    return f"{capsule} {version} ".encode() * 50


def die_at(call: int, rng: random.Random, said: int) -> None:
    """SIGKILL at the call with that number; a write then wrote a part first."""
    calls = 0

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if name == "unlink":
                os.write(said, f"removing {args[0]}\n".encode())
            if calls == call:
                if name == "writev":
                    data = b"".join(args[1])
                    os.write(args[0], data[: rng.randrange(len(data))])
                elif rng.random() < 0.5:
                    real(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return run

    for name in (*CHANGING, "unlink"):
        setattr(os, name, wrapped(name, getattr(os, name)))


def work(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    said = os.open(f"{folder}.said", os.O_WRONLY | os.O_CREAT, 0o600)
    die_at(rng.randrange(1, 200), rng, said)
    volume = Volume.open(Directory(folder), IDENTITY, BLOCK, SMALL if seed % 2 == 0 else ROOMY)

    def say(*words: object) -> None:
        for capsule in volume.take_lost().capsules:
            os.write(said, f"lost {capsule}\n".encode())
        os.write(said, (" ".join(map(str, words)) + "\n").encode())

    for version in range(1000):
        capsule = f"c{rng.randrange(6)}"
        first = rng.randrange(40)
        keys = list(range(first, first + rng.randrange(1, 9)))
        if rng.random() < 0.2:
            say("dropping", capsule)
            volume.drop(capsule)
            say("dropped", capsule)
            continue
        volume.put(keys, [row(key) for key in keys])
        say("committing", capsule, version, *keys)
        volume.commit(capsule, payload(capsule, version), keys, owner=capsule[1], is_kept=False)
        say("committed", capsule, version, *keys)


def kill_each(work: Callable[[Path, int], object]) -> int:
    """Have a child do `work` in a folder of its own for each seed, until it kills itself.

    As the program's arguments say: folder, first seed, number. The exit status: 0 if all were killed.
    """
    folder, first, num = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for seed in range(first, first + num):
        child = os.fork()
        if child == 0:
            work(folder / str(seed), seed)
            os._exit(1)  # it should not come so far
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(kill_each(work))
