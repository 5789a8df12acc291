"""Workers of models with recurrent layers: credit where a state was left, and what a router shows of it."""

import pytest

from mallee.gateway.bodies import decisions_body
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import RequestId
from mallee.protocol.model import GroupSpec
from mallee.worker.kv.journal import Journal
from mallee.worker.kv.node import Node
from mallee.worker.kv.pool import BlockPool
from mallee.worker.kv.sides.group import RowSpan
from mallee.worker.kv.sides.states import StateGroup
from mallee.worker.kv.tree import BranchTree
from support.fleet_bench import SIZE, FleetBench, hashes

REACH = GroupSpec(kind="state", layers=(1,), nbytes=64).reach
TEXT = [*range(SIZE * 30)]


class Worker:
    """A tree with states, whose events go to the router of `bench`."""

    def __init__(self, bench: FleetBench, name: str) -> None:
        self._bench, self._name = bench, name
        self._journal = Journal()
        states = StateGroup(
            BlockPool(8), RowSpan(1, 100, 1), block_size=SIZE, journal=self._journal
        )
        self.tree = BranchTree(BlockPool(100), SIZE, self._journal, sides=[states])
        bench.lease(name, windows=(REACH,))

    def compute(self, text: list[int], *ends: int) -> Node:
        """The end of `text`, in chunks with these ends; its branch goes on."""
        known = block_hashes(text, SIZE)[: (len(text) - 1) // SIZE]
        node = self.tree.attach(known, "")
        for end in (*ends, len(text)):
            node, _ = self.tree.reserve(node, end - node.end)
            self.tree.commit(node, text[node.end : end])
        self.tell()
        return node

    def tell(self) -> None:
        self._bench.events(self._name, *self._journal.drain())


@pytest.mark.parametrize("num_tokens", [SIZE * 20, SIZE * 20 + 2])
def test_the_credit_is_the_last_place_that_has_a_state(num_tokens: int) -> None:
    """F12, part, X3: 20 blocks match and 12 are credited; of 15 with a state at the end all are."""
    bench = FleetBench(0)
    first, second = (Worker(bench, name) for name in ("w0", "w1"))
    first.compute(TEXT[: SIZE * 20 + 2], SIZE * 12)
    prompt = [*TEXT[:num_tokens], *range(500, 500 + SIZE * 8)]
    assert first.tree.find(hashes(prompt)) == 12
    placed = bench.route("a", prompt)
    assert (placed.worker, placed.overlap_blocks, placed.best_overlap_blocks) == ("w0", 12, 12)
    bench.router.free(RequestId("a"))
    second.compute(TEXT[: SIZE * 15 + 1], SIZE * 15)
    placed = bench.route("b", prompt)
    assert (placed.worker, placed.overlap_blocks) == ("w1", 15)
    (told,) = decisions_body(bench.router, RequestId("b"), 1, 8)["data"]
    shown = {each["worker"]: each for each in told["candidates"]}
    found = {name: (each["matched_blocks"], each["overlap_blocks"]) for name, each in shown.items()}
    assert found == {"w0": (20, 12), "w1": (15, 15)}


def test_no_credit_is_inside_a_block_or_beyond_a_state_whatever_is_computed() -> None:
    """X3: of every prefix of what chunks and an answer left, the credit is what the worker finds.

    While the answer is under way its last place is not told of: the next one will take its place.
    """
    bench = FleetBench(0)
    worker = Worker(bench, "w0")
    text = TEXT[: SIZE * 9 + 1]
    node = worker.compute(text, SIZE * 2 + 1, SIZE * 4, *range(SIZE * 6, SIZE * 9))

    def credits() -> dict[int, int]:
        found = {}
        for end in range(1, len(TEXT)):
            prompt = [*TEXT[:end], 999]
            found[worker.tree.find(hashes(prompt))] = bench.route("r", prompt).overlap_blocks
            bench.router.free(RequestId("r"))
        return found

    assert credits() == {0: 0, 4: 4, 6: 6, 8: 6}
    worker.tree.release(node)
    worker.tell()
    assert credits() == {0: 0, 4: 4, 6: 6, 8: 8}
