"""The model of search trees and other programs that fork: generates programs like those of its source.

In each round every program of the source is used once: trees exchange what was tried below their nodes
(`exchange`), others stay as they were; all have text of their own anew, and begin by the source's course
of begins. So statistics stay as they were at any length, while trees, if the source has several that are
alike somewhere, are new.

It holds the shapes, lengths and waits of the source's programs, no text and no names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mallee.protocol.errors import ConfigError
from mallee.synth.core.arrivals import Starts
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.programs.emit import Program, Table
from mallee.synth.programs.exchange import Exchange, exchange_of
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.merge import merged
from mallee.synth.programs.names import Names
from mallee.synth.programs.rounds import begins, round_of
from mallee.traces.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class SearchModel:
    """A `Model`. Generating takes some 200 bytes a request of the source, at any length."""

    forest: Forest
    starts: Starts
    kind: str = field(default="session", init=False)

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """As `Model.generate`. Programs are whole, but the last of them may be cut.

        Raises ConfigError for less than one request or a knob out of range.
        """
        knobs.validate()
        if requests < 1:
            raise ConfigError(f"requests={requests}: give at least one")
        forest = self.forest
        exchange = exchange_of(forest)

        def read() -> Iterator[Request]:
            return merged(_programs(forest, exchange, self.starts, requests, seed, knobs))

        return Workload(
            name=f"like {forest.name}",
            id_tokens=forest.block_size,
            read=read,
            kind="search",
            note=f"generated, seed {seed}",
            has_forks=True,
        )


def _programs(
    forest: Forest, exchange: Exchange, starts: Starts, requests: int, seed: int, knobs: Knobs
) -> Iterator[Program]:
    """Programs by begin; `requests` in all."""
    table = Table(forest, knobs)
    names = Names(forest.prompts, table.parts)
    num = forest.num_programs
    rounds = -(-requests // len(forest.nodes))
    left = requests
    current = None
    for rank, begin in enumerate(begins(starts, num, rounds * num, seed=seed, knobs=knobs)):
        if not left:
            return
        if not begin.turn or current is None:
            current = round_of(forest, exchange, seed, begin.in_round)
            table.show(current)
            names.new_round()
        which = int(current.order[begin.turn])
        program = table.program(
            which, rank, begin.at_s, left, names.program(rank % knobs.prefix_root)
        )
        left -= program.size
        yield program
