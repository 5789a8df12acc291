"""Placement of fan-outs: trees of branches in a replay, through the real router and scheduler.

    python -m bench.router.fanout --engines 8 --fanout 512 --trees 1 --warm [--migrate]
    python -m bench.router.fanout --engines 8 --fanout 8 --trees 1 --cold
    python -m bench.router.fanout --engines 32 --fanout 8 --trees 256 --cold --gateways 8 [--no-sync]

Warm: the parent of each tree is computed and kept as a capsule, then all trees are forked at one moment.
Cold: the children arrive as prompts of their own at one moment, with nothing computed. Each request goes to
any of the gateways; without sync a gateway does not hear what the others booked.

The last line is one JSON object: `affinity` (share of the children on their parent's worker, over fan-outs
that fit beside what is there; null if none fits), `affinity_all`, `prefix_copies` (prefix tokens computed /
unique ones), `slowest_child_ms`, `no_spill_slowest_child_ms` (one warm tree: the same on one engine, where
every child stays with its parent), `spills` {count, rows, list: each with its three prices in seconds},
`bookings_max_mean`.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from bench.doubles.workloads import made
from mallee.mocker.replay.config import POLICIES, ReplayConfig
from mallee.mocker.replay.simulation import Simulation
from mallee.mocker.timing import Timing
from mallee.mocker.timing.profiles import DEFAULT_TIMING
from mallee.router.dispatch.effects import Placed
from mallee.traces.workload import Request, Workload

MAX_LISTED: Final = 64
BLOCK_TOKENS: Final = 16
FORKED_AT_S: Final = 60.0  # when the parents of a warm scene are long computed
GAP_S: Final = 1e-6  # between cold children: far less than any event takes
EVENT_LAG_S, BOOKING_LAG_S = 3e-3, 1e-3
NEVER_S: Final = 1e6  # a lag that no scene outlasts


class Scene(NamedTuple):
    """Trees, and the fleet that they are sent to."""

    engines: int
    fanout: int
    trees: int = 1
    is_cold: bool = False
    prefix_tokens: int = 4096
    suffix_tokens: int = 128
    output_tokens: int = 32
    can_migrate: bool = False
    gateways: int = 1
    sync: bool = True
    policy: str = "cost"
    max_rows: int = 256
    seed: int = 0
    timing: str | Timing = DEFAULT_TIMING

    def config(self) -> ReplayConfig:
        return ReplayConfig(
            engines=self.engines,
            policy=self.policy,
            kv_tokens=448_000,
            timing=self.timing,
            gateways=self.gateways,
            event_lag_s=EVENT_LAG_S,
            booking_lag_s=BOOKING_LAG_S if self.sync else NEVER_S,
            max_rows=self.max_rows,
            can_migrate=self.can_migrate,
            keeps_order=False,  # forks arrive by the clock, all at one moment
            seed=self.seed,
        )


class Rows(NamedTuple):
    """Children of one tree that run on one worker. `prices` in seconds, of rows that left their parent."""

    tree: int
    worker: str
    num: int
    how: str
    prices: dict[str, float]


class FanoutSimulation(Simulation):
    """A replay that notes where each shard of each fan-out runs."""

    def __init__(self, workload: Workload, config: ReplayConfig) -> None:
        super().__init__(workload, config)
        self.parents: dict[int, str] = {}  # worker by tree
        self.parts: list[Rows] = []

    def placed(self, effect: Placed) -> None:
        """The booking of a shard."""
        super().placed(effect)
        shard, request = effect.shard, self.asked[effect.request].request
        tree = int(request.cls)
        if not request.output_tokens:
            self.parents[tree] = shard.worker
            return
        prices = {}
        if shard.how != "stay" and effect.prices is not None:
            prices = {name: round(price, 5) for name, price in effect.prices._asdict().items()}
        self.parts.append(Rows(tree, shard.worker, len(shard.branches), shard.how, prices))


def requests_of(scene: Scene) -> Iterator[Request]:
    """The class of a request is the number of its tree."""
    num_ids = -(-scene.prefix_tokens // BLOCK_TOKENS)
    prefixes = [range(tree * num_ids, (tree + 1) * num_ids) for tree in range(scene.trees)]
    if scene.is_cold:
        own = range(scene.trees * num_ids, 1 << 40, -(-scene.suffix_tokens // BLOCK_TOKENS))
        for child in range(scene.fanout):
            for tree, prefix in enumerate(prefixes):
                number = child * scene.trees + tree
                yield Request(
                    number,
                    number * GAP_S,
                    [*prefix, *range(own[number], own[number + 1])],
                    num_ids * BLOCK_TOKENS + scene.suffix_tokens,
                    scene.output_tokens,
                    cls=str(tree),
                )
        return
    for tree, prefix in enumerate(prefixes):
        yield Request(tree, 0.0, prefix, scene.prefix_tokens, 0, cls=str(tree), num_children=1)
    for tree in range(scene.trees):
        yield Request(
            scene.trees + tree,
            FORKED_AT_S,
            (),
            scene.suffix_tokens,
            scene.output_tokens,
            cls=str(tree),
            branches=scene.fanout,
            parent=tree,
        )


def play(scene: Scene) -> dict[str, Any]:
    """The scene's figures."""
    workload = made(requests_of(scene), name="trees", id_tokens=BLOCK_TOKENS)
    simulation = FanoutSimulation(workload, scene.config())
    simulation.run()
    simulation.check()
    assert not simulation.errors, simulation.reasons
    columns = simulation.rows.columns()
    children = columns.output_tokens > 0
    slowest_s = (columns.end_s - columns.arrival_s)[children].max()
    homes, fits = _homes(scene, simulation)
    rows = Counter[str]()
    at_home = Counter[int]()
    for each in simulation.parts:
        rows[each.worker] += each.num
        at_home[each.tree] += each.num * (homes[each.tree] == each.worker)
    spills = [] if scene.is_cold else [each for each in simulation.parts if each.how != "stay"]
    return {
        **{name: value for name, value in scene._asdict().items() if name != "timing"},
        "affinity": _affinity(scene, at_home, fits),
        "affinity_all": _affinity(scene, at_home, list(homes)),
        "prefix_copies": round(simulation.sharing.copies, 4),
        "moved_nbytes": _moved_nbytes(simulation),
        "slowest_child_ms": round(1e3 * float(slowest_s), 1),
        "bookings_max_mean": round(max(rows.values()) * scene.engines / sum(rows.values()), 3),
        "spills": {
            "count": len(spills),
            "rows": sum(each.num for each in spills),
            "list": [each._asdict() for each in spills[:MAX_LISTED]],
        },
    }


def _moved_nbytes(simulation: Simulation) -> int:
    peers = simulation.fleet.peers
    return 0 if peers is None else peers.num_blocks * BLOCK_TOKENS * peers.link.token_nbytes


def _homes(scene: Scene, simulation: FanoutSimulation) -> tuple[dict[int, str], list[int]]:
    """Each tree's worker, that of most children if it is cold; and the trees that fit there."""
    if scene.is_cold:
        found = defaultdict[int, Counter[str]](Counter)
        for each in simulation.parts:
            found[each.tree][each.worker] += each.num
        homes = {tree: workers.most_common(1)[0][0] for tree, workers in found.items()}
        return homes, list(homes) if scene.fanout <= scene.max_rows else []
    taken = Counter[str]()
    fits = []
    for tree, home in sorted(simulation.parents.items()):
        if taken[home] + scene.fanout <= scene.max_rows:
            fits.append(tree)
        for each in simulation.parts:
            taken[each.worker] += each.num * (each.tree == tree)
    return simulation.parents, fits


def _affinity(scene: Scene, at_home: Counter[int], trees: list[int]) -> float | None:
    if not trees:
        return None
    return round(sum(at_home[tree] for tree in trees) / (len(trees) * scene.fanout), 4)


def compare(scene: Scene) -> dict[str, Any]:
    """`play`, and for one warm tree how it goes if every child stays with its parent."""
    figures = play(scene)
    if scene.trees == 1 and not scene.is_cold:
        stay = play(scene._replace(engines=1))
        figures["no_spill_slowest_child_ms"] = stay["slowest_child_ms"]
    return figures


def _arguments(args: list[str]) -> Scene:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--fanout", type=int, default=8)
    parser.add_argument("--trees", type=int, default=1)
    warmth = parser.add_mutually_exclusive_group()
    warmth.add_argument("--cold", action="store_true")
    warmth.add_argument("--warm", action="store_true", help="the default")
    parser.add_argument("--prefix", type=int, help="tokens; default 16384 cold, 4096 warm")
    parser.add_argument("--suffix", type=int, default=128, help="tokens of each child")
    parser.add_argument("--output", type=int, default=32, help="tokens of each child")
    parser.add_argument("--migrate", action="store_true", help="workers can pull capsules")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--policy", choices=list(POLICIES), default="cost")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    if min(given.engines, given.fanout, given.trees, given.gateways, given.output) < 1:
        parser.error("engines, fanout, trees, gateways and output must be at least 1")
    return Scene(
        engines=given.engines,
        fanout=given.fanout,
        trees=given.trees,
        is_cold=given.cold,
        prefix_tokens=given.prefix or (16_384 if given.cold else 4096),
        suffix_tokens=given.suffix,
        output_tokens=given.output,
        can_migrate=given.migrate,
        gateways=given.gateways,
        sync=not given.no_sync,
        policy=given.policy,
        max_rows=given.max_rows,
        seed=given.seed,
    )


if __name__ == "__main__":
    print(json.dumps(compare(_arguments(sys.argv[1:]))))
