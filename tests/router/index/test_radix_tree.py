"""The prefix index against a radix tree over tokens: a flat table of chain hashes gives its answers."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from mallee.protocol.hashing import Hashes, block_hashes
from mallee.router.index.index import PrefixIndex

BLOCK_SIZE = 4
NUM_WORKERS = 4

Block = tuple[int, ...]
Path = tuple[Block, ...]


@dataclass(slots=True)
class Node:
    """A run of blocks on an edge. `held`: how many of them each worker holds, from the first on."""

    run: Path = ()
    children: dict[Block, "Node"] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def split(self, at: int) -> None:
        """Cut the run: what lies behind `at` becomes the only child."""
        tail = {worker: n - at for worker, n in self.held.items() if n > at}
        child = Node(self.run[at:], self.children, tail)
        self.children = {self.run[at]: child}
        self.held = {worker: min(n, at) for worker, n in self.held.items()}
        self.run = self.run[:at]


def common(run: Path, path: Path) -> int:
    """Leading blocks that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(run, path, strict=False)) if a != b),
        min(len(run), len(path)),
    )


class RadixTree:
    """Prefixes of prompts with the workers that hold them, as SGLang's and Dynamo's trees keep them."""

    def __init__(self) -> None:
        self.root = Node()

    def insert(self, worker: int, path: Path) -> None:
        node, rest = self.root, path
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                node.children[rest[0]] = Node(rest, {}, {worker: len(rest)})
                return
            same = common(child.run, rest)
            if same < len(child.run):
                child.split(same)
            child.held[worker] = same
            node, rest = child, rest[same:]

    def cut(self, worker: int, path: Path) -> list[Path]:
        """Drop what `worker` holds from the last block of `path` on; returns the dropped paths."""
        node, rest = self.root, path
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                return []
            same = common(child.run, rest)
            if child.held.get(worker, 0) < same or same < min(len(child.run), len(rest)):
                return []
            if same == len(rest):
                return self._drop(worker, child, path[: len(path) - same], same - 1)
            node, rest = child, rest[same:]
        return []

    def _drop(self, worker: int, node: Node, above: Path, keep: int) -> list[Path]:
        n = node.held.pop(worker, 0)
        if keep and n:
            node.held[worker] = min(n, keep)
        dropped = [above + node.run[: i + 1] for i in range(keep, n)]
        for child in node.children.values():
            dropped += self._drop(worker, child, above + node.run, 0)
        return dropped[::-1]  # leaves first

    def match(self, path: Path) -> list[int]:
        """Leading blocks of `path` that each worker holds."""
        counts = [0] * NUM_WORKERS
        node, rest, walking = self.root, path, set(range(NUM_WORKERS))
        while rest and walking and (child := node.children.get(rest[0])) is not None:
            same = common(child.run, rest)
            for worker in list(walking):
                found = min(same, child.held.get(worker, 0))
                counts[worker] += found
                if found < len(child.run):
                    walking.discard(worker)
            node, rest = child, rest[same:]
        return counts


def hashes(path: Path) -> Hashes:
    return block_hashes([token for block in path for token in block], BLOCK_SIZE)


def block(kind: int) -> Block:
    return (kind, 7, kind, 1)


paths = st.lists(st.integers(0, 2).map(block), min_size=1, max_size=9).map(tuple)
operations = st.lists(
    st.tuples(st.sampled_from(["insert"] * 3 + ["cut", "clear"]), st.integers(0, 3), paths),
    max_size=40,
)


@given(operations, st.lists(paths, min_size=1, max_size=4))
def test_a_flat_table_of_chain_hashes_answers_as_a_radix_tree(
    stream: list[tuple[str, int, Path]], queries: list[Path]
) -> None:
    """K1: same counts after every event, for workers that are walked and workers that are jumped."""
    index, tree = PrefixIndex(NUM_WORKERS), RadixTree()
    for worker in range(NUM_WORKERS):
        index.set_prefix_closed(worker, worker % 2 == 0)
    for verb, worker, path in stream:
        if verb == "insert":
            tree.insert(worker, path)
            index.store(worker, hashes(path))
        elif verb == "cut":
            for gone in tree.cut(worker, path):
                index.remove(worker, hashes(gone)[-1:])
        else:
            for first in range(3):
                tree.cut(worker, (block(first),))
            index.clear(worker)
        for query in (*queries, path):
            assert index.match(hashes(query)).tolist() == tree.match(query)
