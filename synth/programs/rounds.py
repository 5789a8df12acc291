"""Programs in the order of their begin: round after round, in each every program of the source once."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mallee.synth.core.arrivals import Starts
from mallee.synth.core.knobs import Knobs
from mallee.synth.core.streams import stream
from mallee.synth.programs.exchange import Exchange
from mallee.synth.programs.forest import Forest
from mallee.synth.programs.prompts import PASSING
from mallee.synth.programs.visits import Visits, visits_of
from mallee.traces.numbers import Int32s, Ints


class Round(NamedTuple):
    """One round: `order` [programs] says whose turn it is; `parent` and `visits` what they are now."""

    parent: Int32s
    visits: Visits
    order: Ints


class Begin(NamedTuple):
    """A program that begins."""

    at_s: float
    in_round: int
    turn: int


def round_of(forest: Forest, exchange: Exchange, seed: int, number: int) -> Round:
    """Round `number`; the same for the same seed."""
    rng = stream(seed, "shapes", number)
    parent = exchange.mixed(rng)
    return Round(parent, visits_of(forest, parent), _turns(forest, rng))


def begins(
    starts: Starts, programs: int, count: int, *, seed: int, knobs: Knobs
) -> Iterator[Begin]:
    """`count` begins of programs, `programs` in a round."""
    rng = stream(seed, "starts")
    for i, at_s in enumerate((starts.draw(rng, count) / knobs.speedup).tolist()):
        yield Begin(at_s, *divmod(i, programs))


def _turns(forest: Forest, rng: np.random.Generator) -> Ints:
    """Programs in a new order; those that share passing text stay as far from one another as they were."""
    prompts = forest.prompts
    num = forest.num_programs
    is_passing = np.flatnonzero(prompts.run_state == PASSING)
    owner = np.searchsorted(prompts.run_starts, is_passing, side="right") - 1
    cluster = np.arange(num) + prompts.num_passing
    program = prompts.program[owner]
    first = np.unique(program, return_index=True)[1]
    cluster[program[first]] = prompts.run_first[is_passing[first]]
    shift = rng.random(num + prompts.num_passing)[cluster]
    return np.argsort((np.arange(num) / num + shift) % 1.0, kind="stable").astype(np.int64)
