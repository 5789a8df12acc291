"""NVIDIA Dynamo's index and selector from Python, if `ai-dynamo-runtime` is installed here.

Inputs are made in the form that its binding takes (JSON bytes of an event, lists of ints) by the
functions here, outside of what is timed.
"""

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from mallee.protocol.hashing import Hashes

# Read when its library is loaded: one line a decision would be timed too; and without its ZMQ events
# the selector predicts what workers hold from its own decisions.
os.environ.setdefault("DYN_LOG", "error")
os.environ.setdefault("DYN_USE_KV_EVENTS", "false")
os.environ.setdefault("DYN_ROUTER_USE_KV_EVENTS", "false")

PACKAGE = "ai-dynamo-runtime"


def version() -> str | None:
    """Its version, or None if it isn't installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def stored(event_id: int, hashes: Hashes, parent: int | None = None) -> bytes:
    """A `stored` event, as its workers publish it. One number serves as both of its block's hashes."""
    blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes.tolist()]
    data = {"stored": {"parent_hash": parent, "blocks": blocks}}
    return json.dumps({"event_id": event_id, "data": data, "dp_rank": 0}).encode()


def removed(event_id: int, hashes: Hashes) -> bytes:
    """A `removed` event."""
    data = {"removed": {"block_hashes": hashes.tolist()}}
    return json.dumps({"event_id": event_id, "data": data, "dp_rank": 0}).encode()


def events(
    runs: dict[int, list[Hashes]], run_blocks: int, *, are_removed: bool = False
) -> list[tuple[int, bytes]]:
    """Every worker's chains as events of `run_blocks` blocks, the workers in turn: (worker, JSON).

    Chains are removed from their ends, as caches lose them.
    """
    rows: list[list[tuple[int, bytes]]] = []
    for worker, chains in runs.items():
        row: list[tuple[int, bytes]] = []
        for hashes in chains:
            for at in range(0, len(hashes), run_blocks):
                run, parent = hashes[at : at + run_blocks], int(hashes[at - 1]) if at else None
                raw = removed(len(row), run) if are_removed else stored(len(row), run, parent)
                row.append((worker, raw))
        rows.append(row[::-1] if are_removed else row)
    turns = itertools.zip_longest(*rows)
    return [event for turn in turns for event in turn if event is not None]


class Tree:
    """Its `RadixTree`: every call is a round trip to a thread of its own."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree  # optional: only where the peer is measured

        self._tree = RadixTree()
        self.match: Callable[[list[int]], Any] = self._tree.find_matches

    def apply(self, made: Sequence[tuple[int, bytes]]) -> None:
        apply = self._tree.apply_event
        for worker, raw in made:
            apply(worker, raw)

    def match_with_scores(self, hashes: list[int]) -> dict[Any, int]:
        """The match as a dict: `find_matches` itself returns a handle that Python can't read yet."""
        scores: dict[Any, int] = self._tree.find_matches(hashes).scores
        return scores

    def apply_all(self, made: Sequence[tuple[int, bytes]]) -> None:
        """All of `made` is in, and all before: the thread answers in order."""
        self.apply(made)
        self._tree.find_matches([1])


def hash_tokens(tokens: list[int]) -> list[int]:
    """Local hashes of the full blocks (its chain is made elsewhere)."""
    from dynamo._core import compute_block_hash_for_seq

    hashes: list[int] = compute_block_hash_for_seq(tokens, 16)
    return hashes


class Selection:
    """Its `SelectionService`, which Ray Serve LLM embeds: select and reserve in one call.

    Its index starts empty and learns from its own decisions.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        from dynamo._core import SelectionService

        self._service = SelectionService()
        for worker in range(self._num_workers):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "m",
                    "block_size": 16,
                    "endpoint": f"http://127.0.0.1:{10_000 + worker}",
                }
            )

    def close(self) -> None:
        self._service.shutdown()
        self._loop.close()

    def from_hashes(self, hashes: Hashes, num_tokens: int) -> dict[str, Any]:
        """A request whose prompt is hashed already. Its JSON knows signed integers only."""
        signed = hashes.view(np.int64).tolist()
        return self._request() | {
            "block_hashes": signed,
            "sequence_hashes": signed,
            "isl_tokens": num_tokens,
        }

    def from_tokens(self, tokens: list[int]) -> dict[str, Any]:
        return self._request() | {"token_ids": tokens}

    def _request(self) -> dict[str, Any]:
        return {"model_name": "m", "selection_id": f"r{next(self._ids)}"}

    def sample_us(self, requests: Sequence[dict[str, Any]], *, in_flight: int) -> list[float]:
        """Microseconds of each select-and-reserve; the oldest booking ends when `in_flight` are on."""
        return self._loop.run_until_complete(self._sample_us(requests, in_flight))

    async def _sample_us(self, requests: Sequence[dict[str, Any]], in_flight: int) -> list[float]:
        select, samples, booked = self._service.select_and_reserve, [], []
        for request in requests:
            begin = time.perf_counter_ns()
            await select(request)
            samples.append((time.perf_counter_ns() - begin) / 1000)
            booked.append(request["selection_id"])
            if len(booked) > in_flight:
                await self._end(booked.pop(0))
        for selection in booked:
            await self._end(selection)
        return samples

    async def _end(self, selection: str) -> None:
        await self._service.prefill_complete(selection)
        await self._service.free_reservation(selection)

    def cycles_s(self, requests: Sequence[dict[str, Any]], *, concurrency: int) -> float:
        """Select, prefill complete, free: cycles a second with `concurrency` of them at once."""

        async def work(share: Sequence[dict[str, Any]]) -> None:
            for request in share:
                await self._service.select_and_reserve(request)
                await self._end(request["selection_id"])

        async def all_of_them() -> None:
            shares = [requests[i::concurrency] for i in range(concurrency)]
            await asyncio.gather(*(work(share) for share in shares))

        return len(requests) / self._timed(all_of_them())

    def _timed(self, work: Coroutine[Any, Any, None]) -> float:
        begin = time.perf_counter()
        self._loop.run_until_complete(work)
        return time.perf_counter() - begin
