"""Models fitted to a source and compared with it over several seeds, and what noise to expect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from mallee.synth.analysis.analysis import Analysis, analyze
from mallee.synth.compare.copies import copies
from mallee.synth.compare.gates import COPIES, DRIFT, Value, compare
from mallee.synth.compare.lengths import Maker, drift, ideal_hit_rates
from mallee.synth.compare.replays import MAX_REQUESTS, Replayer, Replays, Stage, stage_for
from mallee.synth.compare.views import Shows, halves, shared_views, shows, view
from mallee.synth.core.threads import threads_of
from mallee.traces.numbers import Int32s
from mallee.traces.trace import Rule, Trace, trace_of
from mallee.traces.workload import Workload

DEALS: Final = (1, 2, 3)  # seeds by which sessions are dealt into halves


class Reading(NamedTuple):
    """A way to read a trace. `make` takes a seed, which sets the begins of recorded sessions, if anything."""

    make: Callable[[int], Workload]
    block_size: int | None = None
    rule: Rule = "auto"
    seed: int = 1

    @property
    def other_seed(self) -> int:
        """With which recorded sessions begin at other times."""
        return self.seed + 1

    def trace(self, seed: int) -> Trace:
        return trace_of(self.make(seed), block_size=self.block_size, rule=self.rule)


class Sample(NamedTuple):
    """The measures of another trace: one seed of a model, or one file."""

    values: dict[str, Value]
    analysis: Analysis
    replays: Replays | None
    hit_rates: Sequence[float] = ()  # at 1x, 4x, 16x; empty if not measured


@dataclass(slots=True)
class Source:
    """A trace to be compared with others; its analyses, by what the other side shows too."""

    reading: Reading
    trace: Trace
    again: Trace | None  # begun at other times; None where the reading leaves no choice
    stage: Stage | None = None
    _analyses: dict[Shows, Analysis] = field(default_factory=dict)

    def analysis(self, keep: Shows | None = None) -> Analysis:
        """With all that the trace has by default."""
        keep = shows(self.trace) if keep is None else keep
        if keep not in self._analyses:
            self._analyses[keep] = analyze(view(self.trace, keep))
        return self._analyses[keep]

    def against(self, other: Trace) -> tuple[dict[str, Value], Analysis]:
        """The gates that two traces tell, and the analysis of the other that they were taken from."""
        ours, theirs = shared_views(self.trace, other)
        analysis = analyze(view(other, theirs))
        return compare(self.analysis(ours), analysis), analysis


def source_of(
    reading: Reading, replayer: Replayer | None = None, *, requests: int = MAX_REQUESTS
) -> Source:
    """Reads it. With `replayer`, finds a fleet for its first `requests`. Raises ConfigError, CodecError."""
    trace = reading.trace(reading.seed)
    again: Trace | None = reading.trace(reading.other_seed)
    if again is not None and np.array_equal(again.arrival_s, trace.arrival_s):
        again = None
    source = Source(reading, trace, again)
    if replayer is not None:
        other = None if again is None else reading.make(reading.other_seed)
        source.stage = stage_for(trace, reading.make(reading.seed), other, replayer, requests)
    return source


def compare_workload(source: Source, workload: Workload) -> Sample:
    """Another trace, of any length, against the source. Replays where the source has a stage for them."""
    trace = source.trace
    made = trace_of(workload, block_size=trace.block_size, rule=trace.rule)
    values, analysis = source.against(made)
    values[COPIES] = copies(trace, made)
    if source.stage is None:
        return Sample(values, analysis, None)
    replayed, replays = source.stage.against(workload)
    return Sample(values | replayed, analysis, replays)


def compare_model(source: Source, model: Maker, seed: int, *, with_lengths: bool = True) -> Sample:
    """As many requests as the source has, generated and compared."""
    trace = source.trace
    made = model.generate(requests=len(trace), seed=seed)
    found = compare_workload(source, made)
    if not with_lengths:
        return found
    rates = ideal_hit_rates(model, len(trace), seed, rule=trace.rule)
    apart = drift(rates) if trace.num_blocks else Value(None, "the source has no blocks")
    return found._replace(values=found.values | {DRIFT: apart}, hit_rates=rates)


def noises(source: Source) -> dict[str, list[dict[str, Value]]]:
    """Differences by chance alone, by kind; several draws of each.

    starts: the source with the same sessions begun at other times. halves: half of its sessions against
    the others, which differ by about twice as much in variance as two whole traces would. Kinds that the
    source doesn't allow are left out.
    """
    found = {}
    if source.again is not None:
        starts = source.against(source.again)[0]
        if source.stage is not None and source.stage.noise is not None:
            starts |= source.stage.noise
        found["starts"] = [starts]
    sessions = threads_of(source.trace).session
    if sessions.max(initial=-1) >= 1:
        found["halves"] = [_halves(source, sessions, deal) for deal in DEALS]
    return found


def _halves(source: Source, sessions: Int32s, deal: int) -> dict[str, Value]:
    """The second half is the source: a model of the first is held against that (see `held`)."""
    one, other = halves(source.trace, sessions, deal)
    values = Source(source.reading, other, None).against(one)[0]
    return values | {COPIES: copies(other, one)}


def conditions(source: Source) -> dict[str, Any]:
    """The conditions of a comparison, as plain data."""
    trace = source.trace
    stage = source.stage
    return {
        "trace": trace.name,
        "requests": len(trace),
        "block_size": trace.block_size,
        "rule": trace.rule,
        "distinct_blocks": trace.num_blocks,
        **{f"has_{name}": value for name, value in shows(trace)._asdict().items()},
        "fleet": None if stage is None else stage.fleet._asdict() | {"noise_band": stage.band},
    }


# Models that saw half of the sessions, against the other half: whether they learned or only remember.


def held_out(source: Source, fit: Callable[[Trace], Maker], deal: int) -> dict[str, Value] | None:
    """A model fitted to half of the sessions, as `deal` deals them, against the others.

    To be read beside noise of halves, which is the one half itself against the other. None where there
    is only one session. Raises ConfigError, CodecError of fitting.
    """
    sessions = threads_of(source.trace).session
    if sessions.max(initial=-1) < 1:
        return None
    seen, unseen = halves(source.trace, sessions, deal)
    judge = Source(source.reading, unseen, None)
    return compare_model(judge, fit(seen), deal, with_lengths=False).values
