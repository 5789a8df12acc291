"""Requests of generated programs, one by one."""

from collections.abc import Sequence

import numpy as np

from mallee.synth.core.knobs import Knobs
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.names import ProgramNames
from mallee.synth.programs.orders import Waits
from mallee.synth.programs.rounds import Round
from mallee.traces.numbers import Floats, Ints
from mallee.traces.trace import NO_SESSION
from mallee.traces.workload import NO_PARENT, Request


class Table:
    """Lengths and times of all nodes, with the knobs, and their places in a round."""

    def __init__(self, forest: Forest, knobs: Knobs) -> None:
        nodes = forest.nodes
        self.forest = forest
        self.parts = max(1, int(np.ceil(knobs.prefix_len)))  # ids that a block may need
        self.speedup = knobs.speedup
        self.prompts = forest.prompts.stretched(
            shared=knobs.prefix_len,
            own=knobs.prompt_len,
            block_size=forest.block_size,
            is_ceil=forest.is_ceil,
        )
        self.sources = forest.prompts.program.tolist()
        self.added = np.rint(nodes.added_tokens * knobs.prompt_len).astype(np.int64)
        least = np.minimum(nodes.output_tokens, 1)  # none stays none
        self.output = np.maximum(least, np.rint(nodes.output_tokens * knobs.osl).astype(np.int64))
        self.parent: Ints = np.empty(0, np.int64)  # place in the visits of its program
        self.starts: list[int] = []
        self.node: Ints = np.empty(0, np.int64)
        self.since_s: Floats = np.empty(0)

    def show(self, of: Round) -> None:
        """From now on programs are those of this round."""
        starts, self.node, since_s = of.visits
        place = np.empty(len(self.node), np.int64)
        place[self.node] = np.arange(len(self.node)) - np.repeat(starts[:-1], np.diff(starts))
        parent = of.parent[self.node]
        self.parent = np.where(parent == NO_PARENT, NO_PARENT, place[parent])
        self.starts = starts.tolist()
        self.since_s = since_s / self.speedup

    def program(
        self, which: int, rank: int, begin_s: float, most: int, names: ProgramNames
    ) -> "Program":
        """Program `which` of the round with at most so many requests, begun as the one of that rank."""
        return Program(self, which, rank, begin_s, most, names)


class Program:
    """A generated program that is on its way; `rank` is its place among all."""

    __slots__ = (
        *("_added", "_batch", "_before", "_begin_s", "_branches", "_children", "_classes"),
        *("_depth", "_last", "_names", "_node", "_numbers", "_output", "_parent"),
        *("_recorded_from", "_session", "_since_s", "_table", "_tool_wait_s", "_waits"),
        *("next_s", "rank", "size"),
    )

    def __init__(
        self, table: Table, which: int, rank: int, begin_s: float, most: int, names: ProgramNames
    ) -> None:
        begin, end = table.starts[which], table.starts[which + 1]
        at = slice(begin, min(end, begin + most))
        nodes, node = table.forest.nodes, table.node[at]
        self._table = table
        self._names = names
        self._begin_s = begin_s
        self.rank = rank
        self.size = len(node)
        self.next_s = begin_s
        self._waits = int(table.forest.waits[which])
        self._recorded_from = int(table.forest.starts[which])
        self._node = node.tolist()
        self._parent = table.parent[at].tolist()
        self._since_s = table.since_s[at].tolist()
        self._added = table.added[node].tolist()
        self._output = table.output[node].tolist()
        self._session = nodes.session[node].tolist()
        self._classes = nodes.cls[node].tolist()
        self._branches = nodes.branches[node].tolist()
        self._tool_wait_s = nodes.tool_wait_s[node].tolist()
        self._depth = nodes.depth[node].tolist()
        self._batch = nodes.batch[node].tolist()
        self._children = [0] * self.size
        for parent in self._parent:
            if parent != NO_PARENT:
                self._children[parent] += 1
        self._numbers: list[int] = []
        self._before: tuple[int, ...] = ()  # whom the level or batch waits for
        self._last = 0  # where the level or batch begins

    @property
    def is_over(self) -> bool:
        return len(self._numbers) == self.size

    def request(self, number: int) -> Request:
        """The next one, with its place in the workload."""
        i = len(self._numbers)
        arrival_s = self.next_s
        parent = self._parent[i]
        prompt = self._prompt(i) if parent == NO_PARENT else ((), self._added[i])
        waits = self._waits_for(i)
        self._numbers.append(number)
        if i + 1 < self.size:
            self.next_s = max(arrival_s, self._begin_s + self._since_s[i + 1])
        return Request(
            number,
            arrival_s,
            prompt[0],
            prompt[1],
            self._output[i],
            self._session_name(i),
            self._table.forest.classes[self._classes[i]],
            waits,
            self._tool_wait_s[i],
            self._branches[i],
            NO_PARENT if parent == NO_PARENT else self._numbers[parent],
            self._children[i],
        )

    def _prompt(self, i: int) -> tuple[Sequence[int], int]:
        """Ids and tokens of a whole prompt."""
        table = self._table
        which = int(table.forest.nodes.prompt[self._node[i]])
        prompt = table.prompts[which]
        shared = sum(count for _, _, count in prompt.runs) * table.forest.block_size
        ids = self._names.ids(prompt, table.sources[which])
        return ids, max(1, shared + prompt.tail_tokens)

    def _session_name(self, i: int) -> str:
        session = self._session[i]
        if session == NO_SESSION:
            return ""
        return f"p{self.rank}.{session}" if session else f"p{self.rank}"

    def _waits_for(self, i: int) -> tuple[int, ...]:
        """Numbers of the requests that the next one waits for."""
        numbers = self._numbers
        match self._waits:
            case Waits.VISIT:
                return (numbers[-1],) if i > 1 else ()
            case Waits.LEVEL:
                if i and self._depth[i] != self._depth[i - 1]:
                    self._before, self._last = tuple(numbers[self._last :]), i
                return self._before if self._depth[i] > 1 else ()
            case Waits.BATCH:
                if i and self._batch[i] != self._batch[i - 1]:
                    self._before, self._last = tuple(numbers[self._last :]), i
                return self._before
            case Waits.RECORDED:
                nodes, place = self._table.forest.nodes, self._node[i]
                named = nodes.waits[nodes.wait_starts[place] : nodes.wait_starts[place + 1]]
                return tuple(sorted(numbers[w - self._recorded_from] for w in named.tolist()))
        return ()
