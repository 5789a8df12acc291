"""Inputs for the router's benches: chains of block hashes, cache events, and prompts that branch.

A chain hash is as good as random, so random numbers stand for it. Deterministic for a seed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mallee.protocol.events import EventBatch, Lease, Removed, Stored, pack_hashes
from mallee.protocol.hashing import Hashes

BLOCK_SIZE = 16


class Prompt(NamedTuple):
    """A request to route."""

    request: str
    hashes: Hashes
    num_tokens: int


def chain(rng: np.random.Generator, num_blocks: int) -> Hashes:
    """Hashes that nothing else has."""
    return rng.integers(1, 1 << 64, num_blocks, dtype=np.uint64)


def name(worker: int) -> str:
    return f"w{worker}"


def lease(worker: int) -> Lease:
    """A big idle worker."""
    return Lease(
        worker=name(worker),
        incarnation=1,
        address=f"actor-{worker}",
        model="m",
        fingerprint="f",
        block_size=BLOCK_SIZE,
        num_blocks=100_000,
        max_rows=256,
        max_model_len=1 << 20,
        next_seq=0,
    )


def batches(
    runs: dict[int, list[Hashes]],
    *,
    run_blocks: int,
    runs_per_batch: int,
    kind: type[Stored] | type[Removed] = Stored,
    first_seq: int = 0,
) -> Iterator[EventBatch]:
    """Every worker's chains as events of `run_blocks` blocks from `first_seq` on, the workers in turn."""
    events: dict[int, list[Stored | Removed]] = {
        worker: [
            kind(pack_hashes(hashes[at : at + run_blocks]))
            for hashes in chains
            for at in range(0, len(hashes), run_blocks)
        ]
        for worker, chains in runs.items()
    }
    longest = max(map(len, events.values()))
    for at in range(0, longest, runs_per_batch):
        for worker, own in events.items():
            part = tuple(own[at : at + runs_per_batch])
            if part:
                yield EventBatch(name(worker), 1, first_seq + at, part)


class Fleet:
    """Blocks that `num_workers` workers hold, and prompts that match them as agents' prompts do.

    Each worker holds some of 24 system prompts of 8 to 64 blocks (the first on all workers, the last
    on few) and sessions that go on from them, about `blocks_per_worker` in all.
    """

    def __init__(self, seed: int, *, num_workers: int, blocks_per_worker: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._count = 0
        rng = self._rng
        systems = [chain(rng, int(n)) for n in rng.choice([8, 16, 32, 64], 24)]
        self.held: dict[int, list[Hashes]] = {}
        self._sessions: list[Hashes] = []  # whole prompts, from the root
        for worker in range(num_workers):
            own = [s for k, s in enumerate(systems) if rng.random() < 1 / (1 + k / 3)]
            chains: list[Hashes] = list(own)
            room = blocks_per_worker - sum(map(len, own))
            while room > 0:
                more = chain(rng, min(room, int(rng.integers(32, 257))))
                self._sessions.append(np.concatenate([own[int(rng.integers(len(own)))], more]))
                chains.append(more)
                room -= len(more)
            self.held[worker] = chains

    def prompts(self, count: int, num_blocks: int) -> list[Prompt]:
        """The next turn of a session each, no two the same: the last 2 to 64 blocks are new."""
        rng, found = self._rng, []
        for _ in range(count):
            session = self._sessions[int(rng.integers(len(self._sessions)))]
            known = min(len(session), num_blocks - int(rng.integers(2, min(65, num_blocks))))
            hashes = np.concatenate([session[:known], chain(rng, num_blocks - known)])
            self._count += 1
            tokens = num_blocks * BLOCK_SIZE + int(rng.integers(BLOCK_SIZE))
            found.append(Prompt(f"r{self._count}", hashes, tokens))
        return found
