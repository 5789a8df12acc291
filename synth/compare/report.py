"""The outcome of a comparison, for tables, pages and JSON."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from mallee.synth.compare.fits import Sample, Source, conditions
from mallee.synth.compare.gates import GATES, Outcome, outcomes
from mallee.synth.compare.measures import Value
from mallee.synth.compare.replays import REPLAY_GATES, Replays
from mallee.synth.compare.table import Row, as_data, counts, is_excused, reasons, rows

ALL_GATES: Final = (*GATES, *REPLAY_GATES)


@dataclass(slots=True)
class Report:
    """A source and what was compared with it, by name; each has one sample or several (seeds)."""

    source: Source
    _noises: dict[str, list[dict[str, Value]]]
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, name: str, sample: Sample) -> None:
        self.samples.setdefault(name, []).append(sample)

    @property
    def title(self) -> str:
        trace = self.source.trace
        return f"{', '.join(self.samples)} against {trace.name} ({len(trace):,} requests)"

    @property
    def compared(self) -> dict[str, list[Outcome]]:
        """Medians over the samples."""
        return {
            name: outcomes([each.values for each in samples], ALL_GATES)
            for name, samples in self.samples.items()
        }

    @property
    def noises(self) -> dict[str, list[Outcome]]:
        return {name: outcomes(values, ALL_GATES) for name, values in self._noises.items()}

    @property
    def num_failed(self) -> int:
        """Gates that are failed, over all that was compared."""
        return sum(counts(each)["fail"] for each in self.compared.values())

    def applicable(self) -> list[Row]:
        """Rows that say anything."""
        return [row for row in rows(self.compared, self.noises) if row.applies]

    def notes(self) -> Iterator[str]:
        """Notes that belong under the table."""
        for name, each in self.compared.items():
            count = counts(each)
            yield f"{name}: {count['pass']} passed, {count['fail']} failed, {count['n/a']} do not apply."
        all_rows = rows(self.compared, self.noises)
        skipped = [row for row in all_rows if not row.applies]
        if skipped:
            yield f"Not applicable: {'; '.join(reasons(skipped))}."
        if any(map(is_excused, all_rows)):
            yield "~ some noise is as large: the miss says little."
        kinds = {
            "starts": "the source with the same sessions begun at other times",
            "halves": "half of the source's sessions against the others, dealt three times",
        }
        told = [f"{name}: {kinds[name]}" for name in self._noises]
        if told:
            yield f"Noise is the source against itself. {'; '.join(told)}."
        if self.source.stage is not None:
            yield self._about_fleet()

    def _about_fleet(self) -> str:
        stage = self.source.stage
        assert stage is not None
        fleet, figures = stage.fleet, stage.source.small["cost"]
        return (
            f"Replays: the first {fleet.requests:,} requests on {fleet.engines} engines with KV for"
            f" {fleet.kv_tokens:,} tokens (small cache) and four times as many (large); cost keeps them"
            f" {figures.busy:.0%} busy."
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data; documented in docs/synth.md."""
        return {
            "source": conditions(self.source),
            "noise": {name: as_data(each) for name, each in self.noises.items()},
            "compared": {
                name: {
                    "samples": len(self.samples[name]),
                    "counts": counts(each),
                    "gates": as_data(each),
                    "ideal_hit_rates_1x_4x_16x": [
                        s.hit_rates for s in self.samples[name] if s.hit_rates
                    ],
                    "replays": [
                        plain(s.replays) for s in self.samples[name] if s.replays is not None
                    ],
                }
                for name, each in self.compared.items()
            },
            "source_replays": None
            if self.source.stage is None
            else plain(self.source.stage.source),
        }


def plain(replays: Replays) -> dict[str, dict[str, Any]]:
    """cache -> policy -> figures."""
    return {
        cache: {policy: figures.as_data() for policy, figures in by_policy.items()}
        for cache, by_policy in replays._asdict().items()
    }
