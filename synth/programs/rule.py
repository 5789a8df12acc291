"""Programs made by rules, without a source, and the workload they make."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from mallee.protocol.errors import ConfigError
from mallee.synth.core.knobs import AS_LEARNED, Knobs
from mallee.synth.core.pace import service_s
from mallee.synth.core.streams import stream
from mallee.synth.programs.emit import Draft, Program, merged
from mallee.synth.programs.prompts import LASTING, Names, Run
from mallee.traces.workload import NO_PARENT, Request, Workload

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
        knobs.validate()
        if requests < 1:
            raise ConfigError(f"requests={requests}: give at least one")

        def read() -> Iterator[Request]:
            return merged(self._programs(requests, seed, knobs), knobs.speedup)

        note = f"made up, seed {seed}"
        return Workload(self.name, ID_TOKENS, read, kind="programs", note=note, has_forks=True)

    def _programs(self, requests: int, seed: int, knobs: Knobs) -> Iterator[Program]:
        rng = stream(seed, "drafts")
        runs = [Run(LASTING, 0, self.texts.shared // ID_TOKENS)]
        names = Names(np.array([runs[0].num, 0]), ID_TOKENS, knobs, is_ceil=False)
        begin_s, rank = 0.0, 0
        while requests:
            drafts = self.draft(rng)[:requests]
            bases = names.program(rank, 0)
            ends_s: list[float] = []
            made = []
            for draft in drafts:
                is_root = draft.parent == NO_PARENT
                # What forks go on from is shared text.
                tokens = round(draft.tokens * (knobs.prefix_len if is_root else knobs.prompt_len))
                output = max(min(1, draft.output_tokens), round(draft.output_tokens * knobs.osl))
                before = draft.waits if is_root else (*draft.waits, draft.parent)
                since_s = max((ends_s[i] + draft.tool_wait_s for i in before), default=0.0)
                ends_s.append(since_s + service_s(tokens, output))
                made.append(draft._replace(tokens=tokens, output_tokens=output, since_s=since_s))
                if is_root:
                    ids, tokens = names.prompt(bases, runs, tokens, is_named=True)
                    made[-1] = made[-1]._replace(ids=ids, tokens=tokens)
            yield Program(begin_s, made)
            requests -= len(drafts)
            rank += 1
            begin_s += float(rng.exponential(3600.0 / PER_HOUR))
