"""Fork cost: 1000 children of one parent, in the branch tree and through the whole engine.

    python -m bench.engine.fork [--repeats 15]

`bulk_ms` and `single_ms` are the tree's own cost of 1000 forks (one call, 1000 calls): the children
hold the parent's node, no block is touched. `engine_bulk_ms` and `engine_single_ms` take the same 1000
through `Engine.submit`: decoded commands, checks, a queue entry and the bookkeeping of each branch.
By the parent's length, its depth, and the children that it has already. Medians. The last line is one
JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from bench.doubles.forward import MockForward
from bench.measure import machine
from mallee.mocker.passes import mock_spec
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Fork, Limits, Prefill, Sampling, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.tree import BranchTree
from mallee.worker.records import EngineConfig

CHILDREN = 1000
LENGTHS = (16, 64, 256, 1024, 2048, 4096, 16384)
DEPTHS = (1, 10, 100, 500)
SIBLINGS = (0, 1, 10, 100, 500)


class Case(NamedTuple):
    """Something to time, and how to undo it."""

    work: Callable[[], object]
    undo: Callable[[], object]


def medians_ms(cases: dict[str, Case], repeats: int) -> dict[str, float]:
    """Median time of each case; the cases take turns, so that a slow moment hits them all."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            begin = time.perf_counter()
            case.work()
            times[name].append(time.perf_counter() - begin)
            case.undo()
    return {name: round(1000 * statistics.median(t), 4) for name, t in times.items()}


def parent_of(length: int, depth: int = 1, siblings: int = 0) -> tuple[BranchTree, Node]:
    """A node of `length` tokens at the end of a chain of `depth`, with `siblings` below; all are held."""
    tree = BranchTree(BlockPool(4096), 16, Journal())
    node = Node(None, 0, "", [])
    done = 0
    for level in range(1, depth + 1):
        more = length * level // depth - done
        if level == 1:
            node = tree.attach(block_hashes([]), "")
        else:
            tree.hold(node)
        node, _ = tree.reserve(node, more)
        tree.commit(node, [i % 97 for i in range(done, done + more)])
        done += more
    for i in range(siblings):
        tree.hold(node, 2)  # the child's own, and one that keeps `node` shared
        child, _ = tree.reserve(node, 1)
        tree.release(node)
        tree.commit(child, [i % 97])
    return tree, node


def bulk(tree: BranchTree, node: Node) -> Case:
    return Case(lambda: tree.hold(node, CHILDREN), lambda: tree.release(node, CHILDREN))


def single(tree: BranchTree, node: Node) -> Case:
    def one_by_one() -> None:
        for _ in range(CHILDREN):
            tree.hold(node)

    return Case(one_by_one, lambda: tree.release(node, CHILDREN))


def through_engine(length: int, *, calls: int, depth: int = 1, siblings: int = 0) -> Case:
    """CHILDREN forks of a capsule in `calls` commands.

    It has `length` tokens and two more for each of `depth` - 1 forks on the way to it; `siblings` of the
    children are queued already.
    """
    forward = MockForward(mock_spec(vocab_size=97), num_blocks=4096)
    engine = Engine(
        forward,
        config=EngineConfig(),
        clock=time.monotonic,
        worker=WorkerId("w0"),
        incarnation=Incarnation(0),
    )
    limits, sampling = Limits(1), Sampling(temperature=1.0)
    engine.submit(Prefill("d1", pack_tokens([i % 97 for i in range(length)])), "g")
    for level in range(1, depth):
        while engine.has_work:
            engine.step()
        suffix = pack_tokens([level % 97])
        engine.submit(Fork(f"d{level + 1}", f"d{level}.0", (suffix,), limits, sampling), "g")
    while engine.has_work:
        engine.step()
    parent = f"d{depth}.0"
    if siblings:
        engine.submit(Fork("s", parent, (b"",) * siblings, limits, sampling), "other")
    names = count()
    suffixes = (b"",) * (CHILDREN // calls)

    def fork() -> None:
        for _ in range(calls):
            engine.submit(Fork(f"f{next(names)}", parent, suffixes, limits, sampling), "g")

    return Case(fork, lambda: engine.drop_gateway("g"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    tree, node = parent_of(2048)
    cases = {
        "bulk_ms": bulk(tree, node),
        "single_ms": single(tree, node),
        "engine_bulk_ms": through_engine(2048, calls=1),
        "engine_single_ms": through_engine(2048, calls=CHILDREN),
    }
    cases |= {f"length {n}": single(*parent_of(n)) for n in LENGTHS}
    cases |= {f"depth {d}": single(*parent_of(2048, d)) for d in DEPTHS}
    cases |= {f"siblings {n}": single(*parent_of(2048, siblings=n)) for n in SIBLINGS}
    cases |= {f"engine {n}": through_engine(n, calls=1) for n in LENGTHS}
    cases |= {f"deep {d}": through_engine(2048, calls=1, depth=d) for d in DEPTHS}
    cases |= {f"beside {n}": through_engine(2048, calls=1, siblings=n) for n in SIBLINGS}
    times = medians_ms(cases, repeats)

    def of(kind: str) -> dict[str, float]:
        return {name.split()[1]: ms for name, ms in times.items() if name.split()[0] == kind}

    result = {
        "children": CHILDREN,
        "parent_tokens": 2048,
        **{name: ms for name, ms in times.items() if name.endswith("_ms")},
        "by_length": of("length"),
        "by_depth": of("depth"),
        "by_siblings": of("siblings"),
        "engine_bulk_by_length": of("engine"),
        "engine_bulk_by_depth": of("deep"),
        "engine_bulk_by_siblings": of("beside"),
        "repeats": repeats,
        **machine(),
    }
    for key, value in result.items():
        print(f"{key:>24}  {value}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
