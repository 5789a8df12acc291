"""The model of search trees and other programs that fork: generates programs like those of its source.

In each round every program of the source is used once: trees exchange what was tried below their nodes
(`exchange`), others stay as they were; all have text of their own anew, and begin by the source's course
of begins. So statistics stay as they were at any length, while trees, if the source has several that are
alike somewhere, are new.

It holds the shapes, lengths and waits of the source's programs, no text and no names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mallee.synth.core.arrivals import Starts
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.streams import stream
from mallee.synth.programs.emit import Draft, Program, merged
from mallee.synth.programs.exchange import Exchange, exchange_of
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.orders import Order
from mallee.synth.programs.prompts import OWN, Names
from mallee.synth.programs.visits import visits_of
from mallee.traces.numbers import Int32s, Ints
from mallee.traces.workload import NO_PARENT, Workload


@dataclass(frozen=True, slots=True)
class SearchModel:
    """A `Model`. Generating takes some 200 bytes a request of the source, at any length."""

    forest: Forest
    starts: Starts
    kind: str = field(default="session", init=False)

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """As `Model.generate`. Programs are whole, but the last of them may be cut."""
        knobs.validate(requests)
        exchange = exchange_of(self.forest)
        return Workload(
            name=f"like {self.forest.name}",
            id_tokens=self.forest.block_size,
            read=lambda: merged(
                self._programs(exchange, requests, seed, knobs), requests, knobs.speedup
            ),
            kind="search",
            note=f"generated, seed {seed}",
            has_forks=True,
        )

    def _programs(
        self, exchange: Exchange, requests: int, seed: int, knobs: Knobs
    ) -> Iterator[Program]:
        """Programs by begin, round after round, with `requests` or more."""
        forest = self.forest
        num = forest.num_programs
        rounds = -(-requests // len(forest.nodes))
        begins = self.starts.draw(stream(seed, "starts"), rounds * num).tolist()
        names = Names(forest.prompts.num_blocks, forest.block_size, knobs, is_ceil=forest.is_ceil)
        drafts = _Drafts(forest, names, knobs)
        for rank, begin_s in enumerate(begins):
            number, turn = divmod(rank, num)
            if not turn:
                rng = stream(seed, "shapes", number)
                drafts.show(exchange.mixed(rng))
                turns = forest.prompts.turns(num, rng)
                names.new_round()
            yield Program(begin_s, drafts.of(int(turns[turn]), rank))


class _Drafts:
    """Drafts of the programs of a round."""

    def __init__(self, forest: Forest, names: Names, knobs: Knobs) -> None:
        nodes, tails = forest.nodes, forest.prompts.tail_tokens
        self._forest = forest
        self._names = names
        self._prompt = np.cumsum(nodes.parent == NO_PARENT) - 1  # of each root
        self._tails = np.where(tails > 0, np.rint(tails * knobs.prompt_len), tails).astype(np.int64)
        self._added = np.rint(nodes.added_tokens * knobs.prompt_len).astype(np.int64)
        output = np.rint(nodes.output_tokens * knobs.osl).astype(np.int64)
        self._output = np.maximum(output, np.minimum(nodes.output_tokens, 1))  # none stays none
        self._place = np.zeros(len(nodes), np.int64)  # in its program

    def show(self, parent: Int32s) -> None:
        """From now on nodes have these parents."""
        self._parent = parent
        self._visits = visits_of(self._forest, parent)

    def of(self, which: int, rank: int) -> list[Draft]:
        """Program `which` of the source as that of this rank among those generated."""
        forest, nodes, names = self._forest, self._forest.nodes, self._names
        at = slice(*self._visits.starts[which : which + 2])
        node = self._visits.node[at]
        parent = self._parent[node]
        self._place[node] = np.arange(len(node))
        tokens = self._added[node].tolist()
        ids: list[Sequence[int]] = [()] * len(node)
        bases = names.program(rank, int(forest.prompts.num_blocks[OWN + which]))
        for i in np.flatnonzero(parent == NO_PARENT).tolist():
            prompt = int(self._prompt[node[i]])
            ids[i], tokens[i] = names.prompt(
                bases,
                forest.prompts.runs(prompt),
                int(self._tails[prompt]),
                is_named=bool(forest.prompts.is_named[prompt]),
            )
        return list(
            map(
                Draft,
                tokens,
                self._output[node].tolist(),
                map(forest.classes.__getitem__, nodes.cls[node].tolist()),
                np.where(parent == NO_PARENT, NO_PARENT, self._place[parent]).tolist(),
                self._waits(which, node),
                nodes.tool_wait_s[node].tolist(),
                self._visits.since_s[at].tolist(),
                ids,
                nodes.branches[node].tolist(),
                nodes.session[node].tolist(),
            )
        )

    def _waits(self, which: int, node: Ints) -> list[tuple[int, ...]]:
        """Places that each of a program's nodes waits for: recorded ones, or all of the batch before."""
        forest, nodes = self._forest, self._forest.nodes
        if forest.order[which] == Order.RECORDED:
            places = (nodes.waits - forest.starts[which]).tolist()
            bounds = nodes.wait_starts.tolist()
            return [tuple(places[bounds[i] : bounds[i + 1]]) for i in node.tolist()]
        found: list[tuple[int, ...]] = [()] * len(node)
        if not forest.has_waits[which]:
            return found
        edges = [*(np.flatnonzero(np.diff(nodes.batch[node])) + 1).tolist(), len(node)]
        for begin, then, end in zip(edges, edges[1:], edges[2:], strict=False):
            found[then:end] = [tuple(range(begin, then))] * (end - then)
        return found
