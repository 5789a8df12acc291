"""Programs made by rules, without a source, and the workload they make."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.pace import service_s
from mallee.synth.core.streams import stream
from mallee.synth.programs.emit import Draft, Program, merged
from mallee.synth.programs.prompts import LASTING, Names, Run
from mallee.traces.workload import NO_PARENT, Workload

ID_TOKENS: Final = 16
PER_HOUR: Final = 240.0  # begins of programs


@dataclass(frozen=True, slots=True)
class Texts:
    """Lengths in tokens. Answers are lognormal around their mean, with this standard deviation of the log."""

    shared: int = 2048  # instructions that all roots of a family begin with
    task: int = 256  # that a root adds
    step: int = 0  # that a fork adds
    output: float = 64.0
    output_sigma: float = 0.5

    def outputs(self, rng: np.random.Generator, count: int) -> list[int]:
        """Lengths of `count` answers, each at least 1."""
        mean = np.log(self.output) - self.output_sigma**2 / 2
        drawn = np.exp(mean + self.output_sigma * rng.standard_normal(count))
        return [max(1, round(x)) for x in drawn.tolist()]


class Rule(ABC):
    """A `Model` of programs that are made up, `PER_HOUR` of them, begun by chance."""

    kind = "session"
    name: str
    texts: Texts

    @abstractmethod
    def draft(self, rng: np.random.Generator) -> Sequence[Draft]:
        """One program; the tokens of its roots are those after what all programs share."""

    def generate(self, *, requests: int, seed: int, knobs: Knobs = AS_LEARNED) -> Workload:
        """`requests` of programs, the last perhaps cut. Raises ConfigError."""
        knobs.validate(requests)
        return Workload(
            name=self.name,
            id_tokens=ID_TOKENS,
            read=lambda: merged(self._programs(seed, knobs), requests, knobs.speedup),
            kind="programs",
            note=f"made up, seed {seed}",
            has_forks=True,
        )

    def _programs(self, seed: int, knobs: Knobs) -> Iterator[Program]:
        rng = stream(seed, "drafts")
        shared = [Run(LASTING, 0, self.texts.shared // ID_TOKENS)]
        names = Names(np.array([shared[0].num, 0]), ID_TOKENS, knobs, is_ceil=False)
        begin_s = 0.0
        for rank in count():
            bases = names.program(rank, 0)
            made: list[Draft] = []
            ends_s: list[float] = []
            for draft in self.draft(rng):
                is_root = draft.parent == NO_PARENT
                # What forks go on from is shared text.
                tokens = round(draft.tokens * (knobs.prefix_len if is_root else knobs.prompt_len))
                output = max(min(1, draft.output_tokens), round(draft.output_tokens * knobs.osl))
                before = draft.waits if is_root else (*draft.waits, draft.parent)
                since_s = max((ends_s[i] + draft.tool_wait_s for i in before), default=0.0)
                ends_s.append(since_s + service_s(tokens, output))
                ids: Sequence[int] = ()
                if is_root:
                    ids, tokens = names.prompt(bases, shared, tokens, is_named=True)
                made.append(
                    draft._replace(tokens=tokens, output_tokens=output, since_s=since_s, ids=ids)
                )
            yield Program(begin_s, made)
            begin_s += float(rng.exponential(3600.0 / PER_HOUR))
