"""Benches of the index's speed: match and store.

What is timed, ours against the peer's:

match   `PrefixIndex.match(uint64 array)` gives an int32 array of counts. Theirs: `find_matches(list)`
        gives a handle; reading its scores from Python costs more and is told apart. `shared` is held
        by all workers, `unique` by one, of `part` all hold three quarters. Ours jumps, since its
        workers' trees lose leaves first; `match_walk_us` is without that, as for engines whose
        caches may have holes (then every block is looked up), and in `match_holes_us` they have:
        every tenth worker lacks a block of each path that all share.
store   Events of 64 blocks, one to a batch, and of 1 block, 16 to a batch (a step's batch as workers
        send it), workers in turn, into an index that holds a fleet's blocks; they are removed again
        before the next round. `fresh`: into an empty one, which has to grow. Ours three ways: decoded
        batches through `Router.on_events` with its housekeeping, from raw bytes (decoding included),
        and the index alone, a run at a time. Theirs from raw bytes: their binding takes JSON only.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench import measure
from bench.peers import dynamo
from bench.router import traffic
from bench.router.scale import Scale, keep_house, new_router
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Removed, Stored, decode_batch
from mallee.protocol.hashing import Hashes
from mallee.router.index.index import PrefixIndex
from mallee.router.router import Router

DEPTHS = (64, 512, 4096)


class _Chains(NamedTuple):
    """Blocks that the fleet of the match bench holds, and the prompts to match."""

    shared: list[Hashes]
    unique: list[tuple[int, Hashes]]
    background: list[tuple[int, Hashes]]
    queries: dict[str, list[Hashes]]


def _chains(scale: Scale) -> _Chains:
    rng = np.random.default_rng(1)
    queries: dict[str, list[Hashes]] = {}
    shared: list[Hashes] = []
    unique: list[tuple[int, Hashes]] = []
    for depth in DEPTHS:
        samples = max(4, scale.samples * 64 // depth)
        several = [traffic.chain(rng, depth) for _ in range(max(1, 1024 // depth))]
        shared += several
        queries[f"shared_{depth}"] = [several[i % len(several)] for i in range(samples)]
        own = [traffic.chain(rng, depth) for _ in range(samples)]
        unique += [(int(rng.integers(scale.workers)), each) for each in own]
        queries[f"unique_{depth}"] = own
        rest = [traffic.chain(rng, depth // 4) for _ in range(samples)]
        queries[f"part_{depth}"] = [
            np.concatenate([several[i % len(several)][: depth - depth // 4], tail])
            for i, tail in enumerate(rest)
        ]
        queries[f"miss_{depth}"] = [traffic.chain(rng, depth) for _ in range(samples)]
    background = [
        (worker, traffic.chain(rng, 250))
        for worker in range(scale.workers)
        for _ in range(scale.blocks_per_worker // 250)
    ]
    return _Chains(shared, unique, background, queries)


def match(scale: Scale, with_peer: bool) -> dict[str, Any]:
    """Microseconds of a match, over an index that holds a fleet's blocks besides."""
    chains = _chains(scale)
    cases: dict[str, Callable[[Any], object]] = {}
    inputs: dict[str, Sequence[Any]] = {}
    index = _filled_index(scale, chains)
    for name, queries in chains.queries.items():
        cases[f"ours {name}"], inputs[f"ours {name}"] = index.match, queries
    if with_peer:
        tree = _filled_tree(scale, chains)
        for name, queries in chains.queries.items():
            lists = [query.tolist() for query in queries]
            cases[f"peer {name}"], inputs[f"peer {name}"] = tree.match, lists
            if name.startswith("shared"):
                cases[f"scores {name}"] = tree.match_with_scores
                inputs[f"scores {name}"] = lists[: max(4, len(lists) // 4)]
    times = measure.take_turns(cases, inputs, scale.rounds)
    for worker in range(scale.workers):
        index.set_prefix_closed(worker, False)
    walks = {f"walk {name}": index.match for name in chains.queries}
    queries_of = {f"walk {name}": queries for name, queries in chains.queries.items()}
    times |= measure.take_turns(walks, queries_of, min(scale.rounds, 3))
    rng = np.random.default_rng(3)
    for hashes in chains.shared:
        for worker in range(0, scale.workers, 10):
            at = int(rng.integers(1, len(hashes)))
            index.remove(worker, hashes[at : at + 1])
    holes = {f"holes {name}": index.match for name in chains.queries}
    queries_of = {f"holes {name}": queries for name, queries in chains.queries.items()}
    times |= measure.take_turns(holes, queries_of, min(scale.rounds, 3))

    def of(side: str, field: str = "p50_us") -> dict[str, Any]:
        named = {name.split()[1]: each for name, each in times.items() if name.split()[0] == side}
        return {name: value for name, t in named.items() if (value := getattr(t, field))}

    ours = {"match_us": of("ours"), "match_p99_us": of("ours", "p99_us")}
    result = {"ours": ours | {"match_walk_us": of("walk"), "match_holes_us": of("holes")}}
    if with_peer:
        result["peer"] = {
            "match_us": of("peer"),
            "match_p99_us": of("peer", "p99_us"),
            "match_with_scores_us": of("scores"),
            "match_slow_mode_us": of("peer", "slow_us"),
        }
    return result


def _filled_index(scale: Scale, chains: _Chains) -> PrefixIndex:
    index = PrefixIndex(scale.workers, is_prefix_closed=True)
    for worker, hashes in chains.background + chains.unique:
        index.store(worker, hashes)
    for hashes in chains.shared:
        for worker in range(scale.workers):
            index.store(worker, hashes)
    while index.work():
        pass
    return index


def _filled_tree(scale: Scale, chains: _Chains) -> dynamo.Tree:
    tree = dynamo.Tree()
    for number, (worker, hashes) in enumerate(chains.background + chains.unique):
        tree.apply([(worker, dynamo.stored(number, hashes))])
    for number, hashes in enumerate(chains.shared):
        raw = dynamo.stored(number, hashes)
        tree.apply([(worker, raw) for worker in range(scale.workers)])
    tree.apply_all([])
    return tree


class _Load(NamedTuple):
    """Chains by worker, and how they are cut into events and batches."""

    runs: dict[int, list[Hashes]]
    run_blocks: int
    runs_per_batch: int

    @property
    def num_blocks(self) -> int:
        return sum(len(hashes) for chains in self.runs.values() for hashes in chains)

    @property
    def events_per_worker(self) -> int:
        return sum(-(-len(hashes) // self.run_blocks) for hashes in self.runs[0])

    def batches(self, kind: type[Stored] | type[Removed], first_seq: int) -> list[EventBatch]:
        return list(
            traffic.batches(
                self.runs,
                run_blocks=self.run_blocks,
                runs_per_batch=self.runs_per_batch,
                kind=kind,
                first_seq=first_seq,
            )
        )


def store(scale: Scale, with_peer: bool) -> dict[str, Any]:
    """Millions of blocks, and events, stored and removed a second."""
    rng = np.random.default_rng(2)
    num_runs = max(1, scale.blocks_per_worker // 200)
    workers = range(scale.workers)
    same = [traffic.chain(rng, 64) for _ in range(num_runs)]
    long = _Load({w: [traffic.chain(rng, 64) for _ in range(num_runs)] for w in workers}, 64, 1)
    common = _Load(dict.fromkeys(workers, same), 64, 1)
    short = _Load({w: [traffic.chain(rng, 64)] for w in workers}, 1, 16)
    background = _Load(
        {w: [traffic.chain(rng, scale.blocks_per_worker)] for w in workers}, 1 << 20, 1
    )
    result: dict[str, dict[str, Any]] = {"ours": {}, "peer": {}}
    for key, load, under, unit in (
        ("mblocks_s", long, background, 1e6),
        ("shared_mblocks_s", common, background, 1e6),
        ("events_s", short, background, 1.0),
        ("fresh_mblocks_s", long, None, 1e6),
    ):
        for way, rate in _rates(scale, load, under, with_peer=with_peer).items():
            verb, _, how = way.partition(" ")
            if how == "_index" and unit == 1.0:
                continue  # the index alone takes whole runs: no events there
            if how == "peer":
                result["peer"][f"{verb}_{key}"] = rate / unit
            else:
                result["ours"][f"{verb}{how}_{key}"] = rate / unit
    return result


def _rates(
    scale: Scale, load: _Load, background: _Load | None, *, with_peer: bool
) -> dict[str, float]:
    """Blocks a second by "store" or "remove" and way: "" decoded batches, " _raw" bytes, " peer".

    The best of the rounds: what else the machine does only ever slows a round down. Without
    `background` every round begins with fresh structures, and nothing is removed.
    """
    events = dynamo.events(load.runs, load.run_blocks) if with_peer else []
    gone = dynamo.events(load.runs, load.run_blocks, are_removed=True) if with_peer else []
    times: dict[str, list[float]] = {}
    sides: _Sides | None = None
    for _ in range(scale.rounds):
        if sides is None or background is None:
            sides = _Sides(scale, background, with_peer=with_peer)
        stored = load.batches(Stored, sides.next_seq)
        stored_raw = [encode(batch) for batch in stored]
        removed = load.batches(Removed, sides.next_seq + load.events_per_worker)
        removed_raw = [encode(batch) for batch in removed]
        sides.next_seq += 2 * load.events_per_worker
        turns: dict[str, Callable[[], object]] = {
            "store": partial(_feed, sides.router, stored),
            "store _raw": partial(_feed_raw, sides.raw_router, stored_raw),
            "store _index": partial(_store_runs, sides.index, load),
            "remove": partial(_feed, sides.router, removed),
            "remove _raw": partial(_feed_raw, sides.raw_router, removed_raw),
            "remove _index": partial(_remove_runs, sides.index, load),
        }
        if sides.tree is not None:
            turns["store peer"] = partial(sides.tree.apply_all, events)
            turns["remove peer"] = partial(sides.tree.apply_all, gone)
        for turn, work in turns.items():
            if background is not None or not turn.startswith("remove"):
                times.setdefault(turn, []).append(measure.seconds(work))
    return {turn: load.num_blocks / min(each) for turn, each in times.items()}


class _Sides:
    """One structure for each way, with the same background."""

    def __init__(self, scale: Scale, background: _Load | None, *, with_peer: bool) -> None:
        self.router, self.raw_router = new_router(scale.workers), new_router(scale.workers)
        self.index = PrefixIndex(scale.workers, is_prefix_closed=True)
        self.tree = dynamo.Tree() if with_peer else None
        self.next_seq = 0
        if background is None:
            return
        batches = background.batches(Stored, 0)
        _feed(self.router, batches)
        _feed(self.raw_router, batches)
        self.next_seq = background.events_per_worker
        for worker, chains in background.runs.items():
            for hashes in chains:
                self.index.store(worker, hashes)
                if self.tree is not None:
                    self.tree.apply([(worker, dynamo.stored(0, hashes))])


def _feed(router: Router, made: list[EventBatch]) -> None:
    for batch in made:
        router.on_events(batch)
    keep_house(router)


def _feed_raw(router: Router, raw: list[bytes]) -> None:
    for each in raw:
        router.on_events(decode_batch(each))
    keep_house(router)


def _store_runs(index: PrefixIndex, load: _Load) -> None:
    for worker, chains in load.runs.items():
        for hashes in chains:
            index.store(worker, hashes)


def _remove_runs(index: PrefixIndex, load: _Load) -> None:
    for worker, chains in load.runs.items():
        for hashes in chains:
            index.remove(worker, hashes)
