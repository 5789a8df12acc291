"""Benches of memory: bytes a block, and a replica that joins a full fleet.

Each is for a process of its own: it goes by the growth of resident memory, and, of ours, by what the
index itself accounts for.
"""

import gc
import itertools
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from bench import measure
from bench.peers import dynamo
from bench.router import traffic
from bench.router.scale import Scale, new_router
from mallee.protocol.codec import encode
from mallee.protocol.events import Snapshot, decode_snapshot, pack_hashes
from mallee.protocol.hashing import Hashes
from mallee.protocol.ids import RequestId
from mallee.router.index.index import PrefixIndex
from mallee.router.router import Router


class _Side:
    """An index of one side that counts the pairs it was given."""

    def __init__(self, side: str, scale: Scale) -> None:
        self._is_ours = side == "ours"
        self._target: Any = PrefixIndex(scale.workers) if self._is_ours else dynamo.Tree()
        self.pairs = 0
        self._numbers = itertools.count()
        self.put(0, traffic.chain(np.random.default_rng(0), 250))  # compiles, starts threads

    def put(self, worker: int, hashes: Hashes) -> None:
        self.pairs += len(hashes)
        if self._is_ours:
            self._target.store(worker, hashes)
        else:
            self._target.apply([(worker, dynamo.stored(next(self._numbers), hashes))])

    def size(self) -> tuple[int, int, int]:
        """(pairs, resident, accounted for). Of ours, what is put off is done."""
        while self._is_ours and self._target.work():
            pass
        return self.pairs, measure.rss_nbytes(), getattr(self._target, "nbytes", 0)


def _growth(before: tuple[int, int, int], after: tuple[int, int, int]) -> tuple[float, float]:
    """Bytes a pair: resident, accounted for."""
    pairs = after[0] - before[0]
    return (after[1] - before[1]) / pairs, (after[2] - before[2]) / pairs


def memory(scale: Scale, side: str) -> dict[str, Any]:
    """Bytes for one more (worker, block).

    `unique`: blocks of one worker each; `unique_worst`: the most of any size past a quarter, since tables
    grow in leaps; `shared`: a block that all others hold already.
    """
    rng = np.random.default_rng(4)
    chains = max(1, scale.blocks_per_worker // 250)
    target = _Side(side, scale)
    before, worst = target.size(), 0.0
    for worker in range(scale.workers):
        for _ in range(chains):
            target.put(worker, traffic.chain(rng, 250))
        if worker >= scale.workers // 4:
            now = (target.pairs, measure.rss_nbytes(), 0)
            worst = max(worst, _growth(before, now)[0])
    unique = _growth(before, target.size())
    common = traffic.chain(rng, scale.shared_chain)
    target.put(0, common)
    before = target.size()
    for worker in range(1, scale.workers):
        target.put(worker, common)
    shared = _growth(before, target.size())
    return _result(
        side,
        {"unique": unique[0], "unique_worst": worst, "shared": shared[0]},
        {"unique": unique[1], "shared": shared[1]},
    )


def fleet_memory(scale: Scale, side: str) -> dict[str, Any]:
    """Bytes a pair of a fleet whose workers share system prompts in many different sets."""
    target = _Side(side, scale)
    held = traffic.Fleet(
        10, num_workers=scale.workers, blocks_per_worker=scale.blocks_per_worker
    ).held
    gc.collect()
    before = target.size()
    for worker, chains in held.items():
        for hashes in chains:
            target.put(worker, hashes)
    resident, accounted = _growth(before, target.size())
    return _result(side, {"fleet": resident}, {"fleet": accounted})


def _result(side: str, resident: dict[str, float], accounted: dict[str, float]) -> dict[str, Any]:
    if side == "peer":
        return {side: {"bytes_per_block": resident}}
    return {side: {"bytes_per_block": resident, "bytes_per_block_accounted": accounted}}


def join(scale: Scale) -> dict[str, Any]:
    """A new replica takes in a snapshot of every worker, as they arrive, and routes meanwhile.

    After each snapshot one turn of housekeeping, after every tenth a decision. `longest_ms` is the
    longest that any one call held up the others.
    """
    rng = np.random.default_rng(5)
    router = new_router(scale.workers)
    before = measure.rss_nbytes()
    times: list[float] = []
    routes: list[float] = []
    work = getattr(router, "work", lambda: False)
    for worker in range(scale.workers):
        held = traffic.chain(rng, scale.join_blocks)
        raw = encode(Snapshot(traffic.name(worker), 1, 0, pack_hashes(held), ()))
        times.append(measure.seconds(partial(_take_in, router, raw)))
        times.append(measure.seconds(work))
        if worker % 10 == 9:
            routes.append(measure.seconds(partial(_decide, router, held[:128])))
    while True:
        begin = time.perf_counter()
        has_more = work()
        times.append(time.perf_counter() - begin)
        if not has_more:
            break
    return {
        "ours": {
            "join": {
                "pairs": scale.workers * scale.join_blocks,
                "total_s": sum(times),
                "longest_ms": 1000 * max(times),
                "route_us": 1e6 * statistics.median(routes),
                "peak_mb": (measure.peak_rss_nbytes() - before) / 1e6,
            }
        }
    }


def _take_in(router: Router, raw: bytes) -> None:
    router.on_snapshot(decode_snapshot(raw), asked_at=0.0)


def _decide(router: Router, hashes: Hashes) -> None:
    request = RequestId("joining")
    router.route(request, hashes, prompt_tokens=16 * len(hashes) + 1, max_tokens=16)
    router.free(request)
