"""The outcome of a comparison as one table of gates, of which terminal, page and JSON are made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mallee.figures.page import Page, Table, Tile, write_page
from mallee.synth.analysis.charts import SOURCE, figures_of
from mallee.synth.compare.fits import Sample, Source, conditions
from mallee.synth.compare.gates import GATES, Gate, Outcome, Value, outcomes
from mallee.synth.compare.replays import REPLAY_GATES, Stage

ALL_GATES: Final = (*GATES, *REPLAY_GATES)
ALIKE: Final = 1.1  # ratio of lengths from which gates tell of length, too
_NOISES: Final = {
    "starts": "the source with the same sessions begun at other times",
    "halves": "half of the source's sessions against the others, dealt three times",
}


class Row(NamedTuple):
    """One gate. `cells` and `noises` are in the order of the table's columns; None: not measured."""

    gate: Gate
    cells: tuple[Outcome | None, ...]
    noises: tuple[Outcome | None, ...]

    @property
    def applies(self) -> bool:
        """Whether any column has a value."""
        return any(each is not None and each.value is not None for each in self.cells + self.noises)

    @property
    def fails(self) -> bool:
        return any(each is not None and each.verdict == "FAIL" for each in self.cells)

    def texts(self) -> list[str]:
        """Name, bar, each cell (`0.012 pass`, `0.31 FAIL`, `0.31 FAIL ~` if noise is as large), noises."""
        bar = "-" if self.gate.bar is None else f"{self.gate.bar:g}"
        noises = [shown(None if each is None else each.value) for each in self.noises]
        return [self.gate.name, bar, *map(self._cell, self.cells), *noises]

    def _cell(self, outcome: Outcome | None) -> str:
        if outcome is None:
            return "-"
        if outcome.value is None:
            return "n/a"
        verdict = {"pass": " pass", "FAIL": " FAIL"}.get(outcome.verdict, "")
        return shown(outcome.value) + verdict + " ~" * self.is_excused(outcome)

    def is_excused(self, outcome: Outcome) -> bool:
        """Whether some noise is as large as a miss, which then says little."""
        return outcome.verdict == "FAIL" and any(
            each is not None
            and each.value is not None
            and abs(each.value) >= abs(outcome.value or 0.0)
            for each in self.noises
        )


class GateTable:
    """Every gate that was measured for any column: what was compared, and noises beside it."""

    def __init__(
        self, compared: Mapping[str, Sequence[Outcome]], noises: Mapping[str, Sequence[Outcome]]
    ) -> None:
        self.head = ("gate", "bar", *compared, *(f"noise: {name}" for name in noises))
        cells, sides = (
            [{each.gate: each for each in column} for column in columns.values()]
            for columns in (compared, noises)
        )
        rows = [
            Row(gate, tuple(c.get(gate) for c in cells), tuple(s.get(gate) for s in sides))
            for gate in dict.fromkeys(gate for column in [*cells, *sides] for gate in column)
        ]
        self.rows = [row for row in rows if row.applies]
        self._skipped = [row for row in rows if not row.applies]

    def notes(self) -> Iterator[str]:
        """Gates that apply to no column, with the reasons that they share; the meaning of a mark."""
        names: dict[str, list[str]] = {}
        for row in self._skipped:
            why = next((each.why for each in row.cells + row.noises if each is not None), "")
            names.setdefault(why, []).append(row.gate.name)
        if names:
            reasons = (f"{', '.join(gates)} ({why})" for why, gates in names.items())
            yield f"Not applicable: {'; '.join(reasons)}."
        if any(each and row.is_excused(each) for row in self.rows for each in row.cells):
            yield "~ some noise is as large: the miss says little."

    def markdown(self) -> Iterator[str]:
        """Lines of text."""
        yield f"| {' | '.join(self.head)} |"
        yield "|---" * len(self.head) + "|"
        yield from (f"| {' | '.join(row.texts())} |" for row in self.rows)
        for note in self.notes():
            yield from ("", note)


def shown(value: float | None) -> str:
    """Three digits behind the point, fewer for large values."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "infinite"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Numbers of gates that passed, failed, and did not apply."""
    verdicts = [each.verdict for each in outcomes]
    return {
        "pass": verdicts.count("pass"),
        "fail": verdicts.count("FAIL"),
        "n/a": verdicts.count("n/a"),
    }


def as_data(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By gate, as plain data; what is infinite (one side has nothing of the kind) is null, and fails."""
    return {
        each.gate.name: {
            "group": each.gate.group,
            "statistic": each.gate.statistic,
            "bar": each.gate.bar,
            "value": _finite(each.value),
            "low": _finite(each.low),
            "high": _finite(each.high),
            "verdict": each.verdict,
            "why": each.why,
        }
        for each in outcomes
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Report:
    """A source and what was compared with it, by name; each has one sample or several (seeds)."""

    def __init__(
        self,
        source: Source,
        noises: Mapping[str, Sequence[Mapping[str, Value]]],
        samples: Mapping[str, Sequence[Sample]],
    ) -> None:
        self._source = source
        self._samples = samples
        self._compared = {
            name: outcomes([each.values for each in several], ALL_GATES)
            for name, several in samples.items()
        }
        self._noises = {name: outcomes(values, ALL_GATES) for name, values in noises.items()}
        self._counts = {name: counts(each) for name, each in self._compared.items()}
        self.num_failed = sum(each["fail"] for each in self._counts.values())
        self.title = (
            f"{', '.join(samples)} against {source.trace.name} ({len(source.trace):,} requests)"
        )
        self.table = GateTable(self._compared, self._noises)

    def notes(self) -> Iterator[str]:
        """Notes that belong under the table."""
        for name, count in self._counts.items():
            yield f"{name}: {count['pass']} passed, {count['fail']} failed, {count['n/a']} do not apply."
        yield from self._about_lengths()
        yield from self.table.notes()
        if self._noises:
            kinds = "; ".join(f"{name}: {_NOISES[name]}" for name in self._noises)
            yield f"Noise is the source against itself. {kinds}."
        if self._source.stage is not None:
            yield _about_fleet(self._source.stage)

    def _about_lengths(self) -> Iterator[str]:
        ours = len(self._source.trace)
        for name, samples in self._samples.items():
            theirs = samples[0].analysis.num_requests
            if max(ours, theirs) > ALIKE * min(ours, theirs):
                yield (
                    f"{name} has {theirs:,} requests, the source {ours:,}: many gates (reuse, tree, counts)"
                    f" differ by that alone. Compare equal lengths: --requests {min(ours, theirs)}."
                )

    def as_data(self) -> dict[str, Any]:
        """Plain data; documented in docs/synth.md."""
        stage = self._source.stage
        return {
            "source": conditions(self._source),
            "noise": {name: as_data(each) for name, each in self._noises.items()},
            "compared": {
                name: {
                    "samples": len(samples),
                    "counts": self._counts[name],
                    "gates": as_data(self._compared[name]),
                    "ideal_hit_rates_1x_4x_16x": [s.hit_rates for s in samples if s.hit_rates],
                    "replays": [s.replays.as_data() for s in samples if s.replays is not None],
                }
                for name, samples in self._samples.items()
            },
            "source_replays": None if stage is None else stage.source.as_data(),
        }

    def write(self, out_dir: Path | str) -> list[Path]:
        """compare.json, a PNG for each figure and compare.html in `out_dir`; their paths.

        The folder is made if need be, files of these names are replaced. Raises ConfigError if it can't
        be written to, or if matplotlib is missing.
        """
        traces = {name: samples[0].analysis for name, samples in self._samples.items()}
        figures = figures_of({SOURCE: self._source.analysis()} | traces)
        tiles = [
            Tile(f"{count['pass']} of {count['pass'] + count['fail']}", f"gates that {name} passes")
            for name, count in self._counts.items()
        ]
        page = Page(self.title, " ".join(self.notes()), tiles, figures, list(self._sections()))
        return write_page(out_dir, "compare", self.as_data(), page)

    def _sections(self) -> Iterator[Table]:
        """A table for each group of gates."""
        for group in dict.fromkeys(row.gate.group for row in self.table.rows):
            rows = [row for row in self.table.rows if row.gate.group == group]
            yield Table(
                group.capitalize(),
                self.table.head,
                [row.texts() for row in rows],
                note="; ".join(dict.fromkeys(row.gate.statistic for row in rows)),
                best=frozenset(i for i, row in enumerate(rows) if row.fails),
            )


def _about_fleet(stage: Stage) -> str:
    fleet, figures = stage.fleet, stage.source.small["cost"]
    return (
        f"Replays: the first {fleet.requests:,} requests on {fleet.engines} engines with KV for"
        f" {fleet.kv_tokens:,} tokens (small cache) and four times as many (large); cost keeps them"
        f" {figures.busy:.0%} busy."
    )
