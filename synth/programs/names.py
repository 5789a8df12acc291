"""Ids for text: which prompts of generated programs begin alike."""

from collections.abc import Sequence

from mallee.synth.programs.prompts import LASTING, OWN, PASSING, Prompt, Prompts
from mallee.traces.workload import Runs


class Names:
    """Gives out ids from 0 on, so that equal id means equal text up to there."""

    def __init__(self, prompts: Prompts, parts: int) -> None:
        """`parts`: ids that each block of the source may need."""
        self._num = {
            LASTING: prompts.num_lasting * parts,
            PASSING: prompts.num_passing * parts,
        }
        self._num_own = (prompts.num_own * parts).tolist()
        self._next = 0
        self._lasting: dict[int, int] = {}
        self._passing: dict[int, int] = {}

    def new_round(self) -> None:
        """Passing text is new from now on."""
        self._passing = {}

    def program(self, family: int) -> "ProgramNames":
        """Ids for one program of a family: of one copy of the shared forest."""
        for state, bases in ((LASTING, self._lasting), (PASSING, self._passing)):
            if family not in bases:
                bases[family] = self.take(self._num[state])
        return ProgramNames(self, self._lasting[family], self._passing[family])

    def own(self, program: int) -> int:
        """First id for what one program of the source has for itself."""
        return self.take(self._num_own[program])

    def take(self, count: int) -> int:
        """The first of `count` ids that nobody has."""
        first = self._next
        self._next += count
        return first


class ProgramNames:
    """Ids of one generated program; what is its own is the same in all its prompts."""

    __slots__ = ("_bases", "_names", "_own")

    def __init__(self, names: Names, lasting: int, passing: int) -> None:
        self._names = names
        self._bases = {LASTING: lasting, PASSING: passing}
        self._own: dict[int, int] = {}  # by program of the source

    def ids(self, prompt: Prompt, source: int) -> Sequence[int]:
        """Of a prompt of the source's program `source`; its tail has ids that nobody else has."""
        runs = []
        for state, first, count in prompt.runs:
            if state == OWN:
                if source not in self._own:
                    self._own[source] = self._names.own(source)
                base = self._own[source]
            else:
                base = self._bases[state]
            runs.append((base + first, count))
        if prompt.tail_blocks:
            runs.append((self._names.take(prompt.tail_blocks), prompt.tail_blocks))
        return Runs(runs)
