"""Where children go: fan-outs of trees through the real router, over stub workers in virtual time.

    python -m bench.router.fanout --engines 8 --fanout 512 --trees 1 --warm [--migrate] [--no-spill]
    python -m bench.router.fanout --engines 8 --fanout 8 --trees 1 --cold
    python -m bench.router.fanout --engines 32 --fanout 8 --trees 256 --cold --gateways 8 [--no-sync]

Warm: each tree's parent is computed and kept as a capsule, then every tree is forked, all at the same
moment. Cold: the children arrive as prompts of their own, at the same moment, with nothing computed.
Of several gateways each takes some requests; without sync none knows what the others booked.

The last line is one JSON object: `affinity` (children on their parent's worker, of those fan-outs that
fit beside what is there: null if none did), `affinity_all`, `prefix_copies` (prefix tokens computed /
unique ones), `slowest_child_ms`, `no_spill_slowest_child_ms` (warm: the same with every child where its
parent is), `spills` {count, rows, list: each with its three prices in seconds}, `bookings_max_mean`.
"""

import argparse
import json
import math
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from bench.router.stub_fleet import Simulation
from bench.router.stub_gateways import Answer, Gateways, chain, router_config
from mallee.protocol.hashing import BLOCK_SIZE, Hashes
from mallee.router.config import Policy
from mallee.router.placement.pricing import POLICIES

MAX_LISTED = 64


class Scene(NamedTuple):
    """What to play."""

    engines: int
    fanout: int
    trees: int = 1
    is_cold: bool = False
    prefix_tokens: int = 4096
    suffix_tokens: int = 128
    output_tokens: int = 32
    can_spill: bool = True
    can_migrate: bool = False
    gateways: int = 1
    sync: bool = True
    policy: Policy = "cost"
    max_rows: int = 256
    gap_s: float = 1e-6  # between cold children: far less than any news takes
    seed: int = 0


class Tree(NamedTuple):
    """One parent's children."""

    parent: str | None  # its worker
    fits: bool
    children: list[Answer]

    def num_home(self) -> int:
        """Children where their parent is; cold: where most of them are."""
        workers = Counter[str]()
        for child in self.children:
            for worker, rows in child.placements:
                workers[worker] += len(rows)
        return workers[self.parent] if self.parent else max(workers.values())


def play(scene: Scene) -> dict[str, Any]:
    """The scene's figures."""
    simulation = Simulation()
    gateways = Gateways(
        simulation,
        scene.engines,
        config=router_config(scene.engines, policy=scene.policy),
        num_gateways=scene.gateways,
        sync=scene.sync,
        max_rows=scene.max_rows,
        seed=scene.seed,
    )
    rng = np.random.default_rng(scene.seed)
    prefixes = [chain(rng, scene.prefix_tokens // BLOCK_SIZE) for _ in range(scene.trees)]
    act = _cold if scene.is_cold else _warm
    trees = act(scene, simulation, gateways, prefixes)
    for worker in gateways.workers.values():
        worker.check()
    for router in gateways.routers:
        router.check()
        for view in router.workers():
            assert view.rows == 0, f"a booking was left on {view.worker}"
            assert view.indexed_blocks == gateways.workers[view.worker].num_cached
    return _report(scene, gateways, prefixes, trees)


def _warm(
    scene: Scene, simulation: Simulation, gateways: Gateways, prefixes: list[Hashes]
) -> list[Tree]:
    parents = [
        gateways.generate(f"p{i}", prefix, more_tokens=0, output_tokens=0, keeps_capsule=True)
        for i, prefix in enumerate(prefixes)
    ]
    simulation.run()
    simulation.run_until(simulation.now + 1.0)
    trees = []
    there = Counter[str]()
    for i, (parent, prefix) in enumerate(zip(parents, prefixes, strict=True)):
        ((home, _),) = parent.placements
        fits = there[home] + scene.fanout <= scene.max_rows
        child = gateways.fork(
            f"c{i}",
            f"p{i}.0",
            prefix,
            suffix_tokens=[scene.suffix_tokens] * scene.fanout,
            output_tokens=scene.output_tokens,
            can_spill=scene.can_spill,
            can_migrate=scene.can_migrate,
        )
        for worker, rows in child.placements:
            there[worker] += len(rows)
        trees.append(Tree(home, fits, [child]))
    simulation.run()
    return trees


def _cold(
    scene: Scene, simulation: Simulation, gateways: Gateways, prefixes: list[Hashes]
) -> list[Tree]:
    trees = [Tree(None, scene.fanout <= scene.max_rows, []) for _ in prefixes]
    for row in range(scene.fanout):
        for i, prefix in enumerate(prefixes):
            child = gateways.generate(
                f"c{i}.{row}",
                prefix,
                more_tokens=scene.suffix_tokens,
                output_tokens=scene.output_tokens,
            )
            trees[i].children.append(child)
            simulation.run_until(simulation.now + scene.gap_s)
    simulation.run()
    return trees


def _report(
    scene: Scene, gateways: Gateways, prefixes: list[Hashes], trees: list[Tree]
) -> dict[str, Any]:
    fitting = [tree for tree in trees if tree.fits]
    computed = sum(
        gateways.work.by_block[block] for prefix in prefixes for block in prefix.tolist()
    )
    rows = Counter[str]()
    for tree in trees:
        for child in tree.children:
            for worker, part in child.placements:
                rows[worker] += len(part)
    slowest = max(child.slowest_s for tree in trees for child in tree.children)
    spills = gateways.spills
    return {
        **scene._asdict(),
        "affinity": _share(fitting, scene.fanout),
        "affinity_all": _share(trees, scene.fanout),
        "prefix_copies": round(computed / sum(map(len, prefixes)), 4) if prefixes else None,
        "pulled_blocks": gateways.work.pulled_blocks,
        "slowest_child_ms": round(1000 * slowest, 1),
        "bookings_max_mean": round(max(rows.values()) * scene.engines / sum(rows.values()), 3),
        "spills": {
            "count": len(spills),
            "rows": sum(spill.rows for spill in spills),
            "list": [
                {
                    **spill._asdict(),
                    "prices": {k: round(v, 5) for k, v in spill.prices._asdict().items()},
                }
                for spill in spills[:MAX_LISTED]
            ],
        },
    }


def _share(trees: list[Tree], fanout: int) -> float | None:
    total = sum(fanout for _ in trees)
    return round(sum(tree.num_home() for tree in trees) / total, 4) if total else None


def compare(scene: Scene) -> dict[str, Any]:
    """`play`, and for a warm scene that may spill how it goes if nothing does."""
    figures = play(scene)
    if not scene.is_cold:
        stay = play(scene._replace(can_spill=False)) if scene.can_spill else figures
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
    parser.add_argument("--no-spill", action="store_true")
    parser.add_argument("--migrate", action="store_true", help="workers can pull capsules")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--policy", choices=list(POLICIES), default="cost")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--gap-ms", type=float, default=1e-3, help="between cold children")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    prefix = given.prefix or (16_384 if given.cold else 4096)
    if min(given.engines, given.fanout, given.trees, given.gateways, given.output) < 1:
        parser.error("engines, fanout, trees, gateways and output must be at least 1")
    return Scene(
        engines=given.engines,
        fanout=given.fanout,
        trees=given.trees,
        is_cold=given.cold,
        prefix_tokens=math.ceil(prefix / BLOCK_SIZE) * BLOCK_SIZE,
        suffix_tokens=given.suffix,
        output_tokens=given.output,
        can_spill=not given.no_spill,
        can_migrate=given.migrate,
        gateways=given.gateways,
        sync=not given.no_sync,
        policy=given.policy,
        max_rows=given.max_rows,
        gap_s=given.gap_ms / 1000,
        seed=given.seed,
    )


def main(args: list[str]) -> None:
    print(json.dumps(compare(_arguments(args))))


if __name__ == "__main__":
    main(sys.argv[1:])
