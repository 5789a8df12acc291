"""Benches of the decision: route, hash, and routing while events pour in.

What is timed, ours against the peer's:

route   `Router.route(...)`: match, cost, selection, booking, one synchronous call, given hashes; 200
        bookings are under way. Theirs: an awaited `SelectionService.select_and_reserve` given hashes
        (its cheapest input), as many bookings under way. Ours has an index filled with a whole fleet's
        blocks; theirs knows only the prompts it placed itself. `route_tokens_us` begins with a list of
        tokens on both sides.
cycles  Route, first token, free. Theirs alone and 16 at a time: the better one counts.
hash    A list or array of tokens to block hashes; ours are chained, theirs local only.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench import measure
from bench.peers import dynamo
from bench.router import traffic
from bench.router.scale import Scale, keep_house, new_router
from mallee.protocol.codec import encode
from mallee.protocol.events import EventBatch, Stored, decode_batch, pack_hashes
from mallee.protocol.ids import RequestId
from mallee.router.index.hashing import block_hashes
from mallee.router.router import Router

IN_FLIGHT = 200
VOCABULARY = 128_000
MAX_TOKENS = 128
WINDOW = 250  # decisions


def _filled(scale: Scale) -> tuple[Router, traffic.Fleet]:
    fleet = traffic.Fleet(6, num_workers=scale.workers, blocks_per_worker=scale.blocks_per_worker)
    router = new_router(scale.workers, time.monotonic)
    for batch in traffic.batches(fleet.held, run_blocks=1 << 20, runs_per_batch=1 << 20):
        router.on_events(batch)
    keep_house(router)
    return router, fleet


class _Booked:
    """The bookings under way: the oldest ends when there are too many."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._requests: deque[RequestId] = deque()

    def add(self, request: RequestId) -> None:
        self._router.first_token(request)
        self._requests.append(request)
        if len(self._requests) > IN_FLIGHT:
            self._router.free(self._requests.popleft())


def _sample_us(router: Router, prompts: Sequence[traffic.Prompt]) -> list[float]:
    """Microseconds of each route alone."""
    clock, booked, samples = time.perf_counter_ns, _Booked(router), []
    with measure.quiet():
        for name, hashes, num_tokens in prompts:
            request = RequestId(name)
            begin = clock()
            router.route(request, hashes, prompt_tokens=num_tokens, max_tokens=MAX_TOKENS)
            samples.append((clock() - begin) / 1000)
            booked.add(request)
    return samples


def _sample_tokens_us(router: Router, prompts: Sequence[list[int]], names: Any) -> list[float]:
    """Microseconds of each hash and route, from a list of tokens."""
    clock, booked, samples = time.perf_counter_ns, _Booked(router), []
    with measure.quiet():
        for tokens in prompts:
            request = RequestId(f"t{next(names)}")
            begin = clock()
            hashes = block_hashes(tokens)
            router.route(request, hashes, prompt_tokens=len(tokens), max_tokens=MAX_TOKENS)
            samples.append((clock() - begin) / 1000)
            booked.add(request)
    return samples


def _cycles_s(router: Router, prompts: Sequence[traffic.Prompt]) -> float:
    def work() -> None:
        for name, hashes, num_tokens in prompts:
            request = RequestId(name)
            router.route(request, hashes, prompt_tokens=num_tokens, max_tokens=MAX_TOKENS)
            router.first_token(request)
            router.free(request)

    return len(prompts) / measure.seconds(work)


def route(scale: Scale, with_peer: bool) -> dict[str, Any]:
    """The decision over a filled fleet; in every round all cases have their turn."""
    router, fleet = _filled(scale)
    peer = dynamo.Selection(scale.workers) if with_peer else None
    rng, names = np.random.default_rng(7), itertools.count()
    samples: dict[str, list[list[float]]] = {}
    rates: dict[str, list[float]] = {}

    def add(case: str, timed: list[float]) -> None:
        samples.setdefault(case, []).append(timed)

    few = max(10, scale.prompts // 10)
    for _ in range(scale.rounds):
        short, long = fleet.prompts(scale.prompts, 128), fleet.prompts(few, 2048)
        texts = [rng.integers(0, VOCABULARY, 2048).tolist() for _ in range(few)]
        cycles = fleet.prompts(scale.prompts, 128)
        add("ours route_us", _sample_us(router, short))
        add("ours route_2048_us", _sample_us(router, long))
        add("ours route_tokens_us", _sample_tokens_us(router, texts, names))
        rates.setdefault("ours", []).append(_cycles_s(router, cycles))
        if peer is not None:
            _peer_round(peer, few, short, long, texts, cycles, add, rates)
    if peer is not None:
        peer.close()
    return _summary(samples, rates)


def _peer_round(
    peer: dynamo.Selection,
    few: int,
    short: Sequence[traffic.Prompt],
    long: Sequence[traffic.Prompt],
    texts: Sequence[list[int]],
    cycles: Sequence[traffic.Prompt],
    add: Callable[[str, list[float]], None],
    rates: dict[str, list[float]],
) -> None:
    def made(prompts: Sequence[traffic.Prompt]) -> list[dict[str, Any]]:
        return [peer.from_hashes(each.hashes, each.num_tokens) for each in prompts]

    add("peer route_us", peer.sample_us(made(short[: 2 * few]), in_flight=IN_FLIGHT))
    add("peer route_2048_us", peer.sample_us(made(long[: max(10, few // 2)]), in_flight=IN_FLIGHT))
    requests = [peer.from_tokens(tokens) for tokens in texts]
    add("peer route_tokens_us", peer.sample_us(requests, in_flight=IN_FLIGHT))
    alone, together = made(cycles[: 2 * few]), made(cycles[2 * few : 4 * few])
    rates.setdefault("peer", []).append(
        max(peer.cycles_s(alone, concurrency=1), peer.cycles_s(together, concurrency=16))
    )


def _summary(
    samples: dict[str, list[list[float]]], rates: dict[str, list[float]]
) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for case, rounds in samples.items():
        side, key = case.split()
        times = measure.times_of(rounds)
        value: Any = times.p50_us
        if key == "route_us":
            value = {"p50": times.p50_us, "p99": times.p99_us}
            if times.slow_us is not None:
                value["slow_mode_p50"] = times.slow_us
        result.setdefault(side, {})[key] = value
    for side, each in rates.items():
        result[side]["routes_s"] = float(np.median(each[1:] or each))
    return result


def hashing(scale: Scale, with_peer: bool) -> dict[str, Any]:
    """Millions of tokens a second, for prompts of 128 k tokens and of 2 k."""
    rng = np.random.default_rng(8)
    num_long, num_short = (131_072, 2048) if scale.prompts > 100 else (4096, 512)
    long = [rng.integers(0, VOCABULARY, num_long, dtype=np.uint32) for _ in range(4)]
    short = [rng.integers(0, VOCABULARY, num_short, dtype=np.uint32) for _ in range(64)]
    cases: dict[str, Callable[[Any], object]] = {}
    inputs: dict[str, Sequence[Any]] = {}
    for size, arrays in (("", long), ("_2k", short)):
        lists = [array.tolist() for array in arrays]
        cases[f"ours array{size}"], inputs[f"ours array{size}"] = block_hashes, arrays
        cases[f"ours list{size}"], inputs[f"ours list{size}"] = block_hashes, lists
        if with_peer:
            cases[f"peer list{size}"] = dynamo.hash_tokens
            inputs[f"peer list{size}"] = lists
    result: dict[str, dict[str, Any]] = {}
    for case, times in measure.take_turns(cases, inputs, scale.rounds).items():
        side, form = case.split()
        rate = len(inputs[case][0]) / times.p50_us
        result.setdefault(side, {}).setdefault("hash_mtokens_s", {})[form] = rate
    return result


def mixed(scale: Scale) -> dict[str, Any]:
    """1,000 decisions a second while 100,000 blocks a second arrive as raw events, in one thread.

    A decision's latency counts from when it was due, so it includes every event and turn of
    housekeeping that it waited for. Events come as on a bus: batches of 16 events of 1 block, and of one
    of 64 blocks, half of the blocks each. The clock is this thread's processor time, and each figure the
    median over windows of 250 decisions: other programs, and hosts that take a virtual core away for
    tens of milliseconds, would otherwise make the tail.
    """
    router, fleet = _filled(scale)
    stream = _EventStream(np.random.default_rng(9), fleet, scale.workers)
    num_routes = max(20, int(1000 * scale.mixed_s))
    raw = stream.raw(num_routes * 100)
    late, elapsed_s = _mixed_run(router, fleet.prompts(num_routes, 128), raw)
    windows = [sorted(late[at : at + WINDOW]) for at in range(0, num_routes, WINDOW)]
    return {
        "ours": {
            "mixed": {
                "decision_us": {
                    "p50": statistics.median(w[len(w) // 2] for w in windows),
                    "p99": statistics.median(w[len(w) * 99 // 100] for w in windows),
                    "max": statistics.median(w[-1] for w in windows),
                },
                "routes_s": num_routes / elapsed_s,
                "blocks_s": num_routes * 100 / elapsed_s,
            }
        }
    }


def _mixed_run(
    router: Router, prompts: Sequence[traffic.Prompt], raw: Sequence[bytes]
) -> tuple[list[float], float]:
    """Microseconds from when a decision was due, one a millisecond, until it was made; and the whole
    time until all of `raw` was taken in too."""
    work = getattr(router, "work", lambda: False)
    clock, booked = time.thread_time, _Booked(router)
    late: list[float] = []
    sent = 0
    with measure.quiet():
        start = clock()
        for number, (name, hashes, num_tokens) in enumerate(prompts):
            due = start + number / 1000
            while (now := clock()) < due:
                if sent < min((now - start) * 1000 * len(raw) / len(prompts), len(raw)):
                    router.on_events(decode_batch(raw[sent]))
                    sent += 1
                else:
                    work()
            request = RequestId(name)
            router.route(request, hashes, prompt_tokens=num_tokens, max_tokens=MAX_TOKENS)
            late.append(1e6 * (clock() - due))
            booked.add(request)
        for each in raw[sent:]:
            router.on_events(decode_batch(each))
        return late, clock() - start


class _EventStream:
    """Events that go on from what each worker has sent."""

    def __init__(self, rng: np.random.Generator, fleet: traffic.Fleet, workers: int) -> None:
        self._rng = rng
        self._workers = workers
        self._next_seq = {worker: len(chains) for worker, chains in fleet.held.items()}

    def raw(self, num_blocks: int) -> list[bytes]:
        """Encoded batches with about `num_blocks` blocks in all."""
        batches: list[bytes] = []
        while num_blocks > 0:
            worker = int(self._rng.integers(self._workers))
            sizes = [64] if self._rng.random() < 0.2 else [1] * 16  # as many blocks in either form
            events = tuple(Stored(pack_hashes(traffic.chain(self._rng, n))) for n in sizes)
            seq = self._next_seq[worker]
            batches.append(encode(EventBatch(traffic.name(worker), 1, seq, events)))
            self._next_seq[worker] += len(events)
            num_blocks -= sum(sizes)
        return batches
