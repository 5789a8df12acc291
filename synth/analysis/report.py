"""An analysis as one table of statistics, from which its JSON object, terminal tables and page are made.

The JSON object nests the statistics by the dots in their keys. Quantiles are {count, mean, p5, p25, p50,
p75, p90, p99, max}, null where nothing of the kind is there; numbers that are none are null, too.
`Analysis` and its parts tell what each is exactly. Beside the table it has

    name, requests, duration_s, block_size, rule ("floor", "ceil"), note, malformed: {skipped, mended}
    reuse.lru      [{share, blocks, hit_rate, engine_hit_rate}], of plain LRU and of one that gives up the
                   ends of prompts first
    forks          null where no request forks another
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mallee.figures.page import Facts, Page, Table, Tile, write_page
from mallee.figures.text import number, percent, seconds
from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.arrivals import variation
from mallee.synth.analysis.charts import figures_of
from mallee.synth.analysis.sessions import RELATIONS
from mallee.synth.analysis.stack import SHARES
from mallee.traces.numbers import Floats

QUANTILES: Final = (5, 25, 50, 75, 90, 99)
_CORRELATIONS: Final = {
    "isl_osl": "prompt, answer",
    "new_tokens_osl": "new tokens, answer",
    "new_tokens_next_new_tokens": "new tokens, next turn's",
    "osl_next_osl": "answer, next turn's",
    "osl_next_gap": "answer, gap after it",
    "gap_next_gap": "gap, next gap",
    "gap_new_tokens": "gap, new tokens after it",
    "child_turns_siblings": "a child's turns, siblings",
    "width_parent_width": "forks, its parent's forks",
    "width_siblings_kept": "forks, siblings forked",
}


class Sample(NamedTuple):
    """A statistic of many values, told in quantiles; shown to people if it has a name."""

    key: str
    values: Floats
    name: str = ""
    is_shown: bool = True


class Single(NamedTuple):
    """A statistic of one value; shown to people, as `text`, if it has a name."""

    key: str
    value: float | None
    title: str = ""
    name: str = ""
    text: Callable[[float | None], str] = number
    is_shown: bool = True


def samples_of(analysis: Analysis) -> list[Sample]:
    """In the order in which they are shown."""
    a, sessions, family, forks = analysis, analysis.sessions, analysis.family, analysis.forks
    blocks = a.num_blocks > 0
    several = len(sessions.turns_per_session) < a.num_requests  # requests in a session
    threads = several and forks is None
    found = [
        Sample("lengths.isl", a.isl, "prompt (tokens)"),
        Sample("reuse.new_tokens", a.new_tokens, "new in the prompt (tokens)"),
        Sample("lengths.osl", a.osl, "answer (tokens)"),
        Sample("arrivals.gap_s", a.gaps_s, "between arrivals (s)"),
        Sample("reuse.hit_depth", a.hit_depth, "blocks hit", blocks),
        Sample("reuse.new_blocks", a.new_blocks, "blocks new", blocks),
        Sample("reuse.gap_requests", a.reuse_gap_requests, "since last use (requests)"),
        Sample("reuse.gap_s", a.reuse_gap_s, "since last use (s)"),
        Sample("tree.branch_depth", a.branch_depths, "depth of branches"),
        Sample("tree.branch_width", a.branch_widths, "width of branches"),
        Sample("sessions.turns", sessions.turns_per_session, "requests of a session", several),
        Sample("sessions.turns_per_thread", sessions.turns_per_thread),
        Sample("sessions.threads_per_session", sessions.threads_per_session),
        Sample("sessions.duration_s", sessions.duration_s, "length of a session (s)", threads),
        Sample("sessions.turn_gap_s", sessions.turn_gaps_s, "between turns (s)", threads),
        Sample(
            "sessions.rollback_tokens", sessions.rollback_tokens, "rolled back (tokens)", threads
        ),
        Sample("hierarchy.children", family.children_per_spawn, "children of a spawn"),
        Sample("hierarchy.live_siblings", family.live_siblings, "siblings alive"),
        Sample(
            "hierarchy.start_stagger_s", family.start_stagger_s, "start after the first sibling (s)"
        ),
        Sample("hierarchy.join_wait_s", family.join_wait_s, "first child's end to join (s)"),
        Sample("hierarchy.spawn_wait_s", family.spawn_wait_s, "spawn to join (s)"),
        Sample("hierarchy.shared_with_parent", family.shared_with_parent),
    ]
    if forks is not None:
        found += [
            Sample("forks.width", family.children_per_spawn),
            Sample("forks.depth", forks.depths),
            Sample("forks.leaf_depth", forks.leaf_depths),
            Sample("forks.backtrack_levels", forks.backtracks, "levels climbed back"),
        ]
    return found


def singles_of(analysis: Analysis) -> Iterator[Single]:
    """In the order in which they are shown."""
    a, sessions, forks = analysis, analysis.sessions, analysis.forks
    title = "Arrivals"
    rate = a.num_requests / a.duration_s if a.duration_s else None
    yield Single("arrivals.rate_per_s", rate, title, "requests a second")
    yield Single("arrivals.gap_cv", variation(a.gaps_s), title, "variation of gaps (CV)")
    for width, each in a.counts.items():
        name = f"counts in {width:g} s: variance / mean"
        yield Single(f"arrivals.dispersion.{width:g}", each.dispersion, title, name)
    for width, each in a.counts.items():
        name = f"next count, {width:g} s: correlation"
        yield Single(f"arrivals.autocorrelation.{width:g}", each.autocorrelation, title, name)
    yield Single("arrivals.tick_s", a.tick_s, title, "arrivals are on ticks of", _tick)
    title = "Prefix tree and reuse"
    depth = a.hit_depth + a.new_blocks
    shares = a.hit_depth[depth > 0] / depth[depth > 0]
    width_2 = _mean(a.branch_widths == 2)
    yield Single("tree.blocks", a.num_blocks, title, "distinct blocks")
    yield Single("tree.roots", a.roots, title, "roots")
    yield Single("tree.branch_nodes", len(a.branch_widths), title, "nodes that branch")
    yield Single("tree.width_2_share", width_2, title, "of width 2", percent)
    ideal = a.curve.ideal if a.num_blocks else None
    yield Single("reuse.ideal_hit", ideal, title, "blocks seen before", percent)
    yield Single("reuse.mean_hit_share", _mean(shares), title, "mean share of a request", percent)
    title = "Sessions"
    yield Single("sessions.sessions", len(sessions.turns_per_session), title, "sessions")
    num_threads = len(sessions.turns_per_thread)
    yield Single("sessions.threads", num_threads, title, "threads", is_shown=forks is None)
    has_turns = forks is None and any(sessions.relations.values())
    for name in RELATIONS:
        share, words = sessions.relation_share(name), f"turns: {name.replace('_', ' ')}"
        yield Single(f"sessions.relations.{name}", share, title, words, percent, has_turns)
    yield Single("hierarchy.spawns", len(a.family.children_per_spawn))
    if forks is not None:
        yield Single("forks.trees", forks.trees)
        share = forks.expanded_share
        yield Single("forks.expanded_share", share, title, "forks that are forked", percent)
    for name, value in a.second_order.items():
        yield Single(f"second_order.{name}", value, "Rank correlations", _CORRELATIONS[name])


def _mean(values: npt.NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _tick(tick_s: float | None) -> str:
    return "none, as read" if tick_s is None else seconds(tick_s)


def quantiles(values: Floats) -> dict[str, float] | None:
    """None of nothing."""
    if not len(values):
        return None
    found = np.percentile(values, QUANTILES).tolist()
    shares = {f"p{share}": value for share, value in zip(QUANTILES, found, strict=True)}
    return {
        "count": len(values),
        "mean": float(values.mean()),
        **shares,
        "max": float(values.max()),
    }


@dataclass(frozen=True, slots=True)
class Report:
    """The statistics of one trace: `data` for programs, the others for people."""

    data: dict[str, Any]
    distributions: dict[str, dict[str, float]]  # quantiles by name
    facts: dict[str, list[tuple[str, str]]]  # by title: names and values

    @property
    def about(self) -> str:
        """The trace in one line."""
        data = self.data
        note = f"; {data['note']}" if data["note"] else ""
        return (
            f"{data['requests']:,} requests in {seconds(data['duration_s'])}, blocks of"
            f" {data['block_size']} tokens ({data['rule']}){note}"
        )

    @property
    def caches(self) -> list[dict[str, Any]]:
        """LRU caches of several sizes."""
        found: list[dict[str, Any]] = self.data["reuse"]["lru"]
        return found


def report_of(
    analysis: Analysis, *, note: str = "", malformed: Mapping[str, int] | None = None
) -> Report:
    """`note` tells what was assumed in reading the trace, `malformed` counts lines that were not as asked."""
    data: dict[str, Any] = {
        "name": analysis.name,
        "requests": analysis.num_requests,
        "duration_s": analysis.duration_s,
        "block_size": analysis.block_size,
        "rule": analysis.rule,
        "note": note,
        "malformed": malformed,
        "arrivals": {"dispersion": {}, "autocorrelation": {}},
        "forks": None if analysis.forks is None else {},
        "second_order": {},
    }
    distributions, facts = {}, dict[str, list[tuple[str, str]]]()
    for sample in samples_of(analysis):
        told = quantiles(sample.values)
        _put(data, sample.key, told)
        if told is not None and sample.name and sample.is_shown:
            distributions[sample.name] = told
    for each in singles_of(analysis):
        _put(
            data, each.key, each.value if each.value is None or math.isfinite(each.value) else None
        )
        if each.name and each.is_shown:
            facts.setdefault(each.title, []).append((each.name, each.text(each.value)))
    data["reuse"]["lru"] = list(_caches(analysis)) if analysis.num_blocks else []
    return Report(data, distributions, facts)


def _put(data: dict[str, Any], key: str, value: object) -> None:
    *groups, name = key.split(".", 2)
    for group in groups:
        data = data.setdefault(group, {})
    data[name] = value


def _caches(analysis: Analysis) -> Iterator[dict[str, Any]]:
    sizes = analysis.mrc_sizes
    rates = analysis.mrc_hits, analysis.engine_curve.hits_at(sizes)
    for share, size, plain, engine in zip(SHARES, sizes, *rates, strict=True):
        yield {
            "share": share,
            "blocks": int(size),
            "hit_rate": float(plain),
            "engine_hit_rate": float(engine),
        }


def write_analysis(analysis: Analysis, report: Report, out_dir: Path | str) -> list[Path]:
    """analysis.json, a PNG for each figure and analysis.html in `out_dir`; their paths.

    The folder is made if need be, files of these names are replaced. Raises ConfigError if it can't be
    written to, or if matplotlib is missing.
    """
    data, caches = report.data, report.caches
    hit_rate = next((each["hit_rate"] for each in caches if each["share"] == 0.05), None)
    tiles = [
        Tile(number(data["arrivals"]["rate_per_s"]), "requests a second"),
        Tile(number(data["lengths"]["isl"]["p50"]), "tokens of a prompt, median"),
        Tile(number(data["reuse"]["new_tokens"]["p50"]), "of them new, median"),
        Tile(percent(data["reuse"]["ideal_hit"]), "of blocks seen before"),
        Tile(percent(hit_rate), "hit in an LRU cache of 5 % of all blocks"),
    ]
    columns = ("count", "mean", "p5", "p50", "p90", "p99", "max")
    sections: list[Table | Facts] = [
        Table(
            "Distributions",
            ("", "samples", "mean", "p5", "median", "p90", "p99", "most"),
            [
                (name, *(number(values[key]) for key in columns))
                for name, values in report.distributions.items()
            ],
        )
    ]
    if caches:
        rows = [
            ("blocks", *(number(each["blocks"]) for each in caches)),
            ("plain LRU", *(percent(each["hit_rate"]) for each in caches)),
            ("ends of prompts first", *(percent(each["engine_hit_rate"]) for each in caches)),
        ]
        head = ("share of the distinct blocks", *(f"{100 * each['share']:g} %" for each in caches))
        sections.append(Table("LRU caches", head, rows))
    sections += [Facts(title, pairs) for title, pairs in report.facts.items()]
    figures = figures_of({analysis.name: analysis})
    page = Page(analysis.name, report.about, tiles, figures, sections)
    return write_page(out_dir, "analysis", data, page)
