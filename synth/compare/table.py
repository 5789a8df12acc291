"""Gates as a table: a row each, what was compared side by side, noise beside it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mallee.synth.compare.gates import Gate, Outcome


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


def rows(
    compared: Mapping[str, Sequence[Outcome]], noises: Mapping[str, Sequence[Outcome]]
) -> list[Row]:
    """Every gate that was measured for any column. `noises` have one value each."""
    columns = [_by_gate(each) for each in compared.values()]
    sides = [_by_gate(each) for each in noises.values()]
    gates = dict.fromkeys(gate for column in [*columns, *sides] for gate in column)
    return [
        Row(
            gate,
            tuple(column.get(gate) for column in columns),
            tuple(side.get(gate) for side in sides),
        )
        for gate in gates
    ]


def _by_gate(outcomes: Sequence[Outcome]) -> dict[Gate, Outcome]:
    return {each.gate: each for each in outcomes}


def is_noise(outcome: Outcome, row: Row) -> bool:
    """Whether some noise is as large as this value: then a miss says little."""
    return outcome.value is not None and any(
        each is not None and each.value is not None and abs(each.value) >= abs(outcome.value)
        for each in row.noises
    )


def is_excused(row: Row) -> bool:
    """Whether a miss in it is noise."""
    return any(
        each is not None and each.verdict == "FAIL" and is_noise(each, row) for each in row.cells
    )


def shown(value: float | None) -> str:
    """Three digits behind the point, fewer for large values."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "infinite"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def cell(outcome: Outcome | None, *, bold: str = "") -> str:
    """`0.012 pass`, `0.31 FAIL` (between `bold`), `n/a`."""
    if outcome is None:
        return "-"
    if outcome.value is None:
        return "n/a"
    if outcome.verdict == "FAIL":
        return f"{bold}{shown(outcome.value)} FAIL{bold}"
    return shown(outcome.value) + (" pass" if outcome.verdict == "pass" else "")


def markdown(
    compared: Mapping[str, Sequence[Outcome]], noises: Mapping[str, Sequence[Outcome]]
) -> Iterator[str]:
    """Lines of a table. Gates that apply to no column are named in a line below it."""
    yield "| gate | bar | " + " | ".join([*compared, *(f"noise: {name}" for name in noises)]) + " |"
    yield "|---|---|" + "---|" * (len(compared) + len(noises))
    skipped = []
    for row in rows(compared, noises):
        if not row.applies:
            skipped.append(row)
            continue
        bar = "-" if row.gate.bar is None else f"{row.gate.bar:g}"
        values = [cell(each, bold="**") for each in row.cells]
        values += [shown(None if each is None else each.value) for each in row.noises]
        yield f"| {row.gate.name} | {bar} | " + " | ".join(values) + " |"
    if skipped:
        yield ""
        yield "Not applicable: " + "; ".join(reasons(skipped))


def reasons(skipped: Sequence[Row]) -> Iterator[str]:
    """Gates with the reason that they share."""
    names: dict[str, list[str]] = {}
    for row in skipped:
        why = next((each.why for each in row.cells + row.noises if each is not None), "")
        names.setdefault(why, []).append(row.gate.name)
    for why, gates in names.items():
        yield f"{', '.join(gates)} ({why})"


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
