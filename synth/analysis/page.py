"""Writes an analysis down: one JSON object, figures, a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mallee.figures.files import as_json, made_folder
from mallee.figures.page import Facts, Picture, Table, Tile, render
from mallee.figures.style import require_matplotlib
from mallee.figures.text import number, percent, seconds
from mallee.protocol.errors import ConfigError
from mallee.synth.analysis.analysis import Analysis
from mallee.synth.analysis.charts import pictures_of

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
_TREES_ARRIVE: Final = "A fork begins when what it waits for ends: only trees arrive."
_CAPTIONS: Final = {
    "lengths": "New in a prompt is what no earlier prompt begins with, block by block.",
    "arrivals": "Requests a second over the trace, and the gaps between them.",
    "dispersion": "Poisson arrivals have a variance of one mean at every width (dotted) and no"
    " correlation. What rises with the width is a rate that changes.",
    "cache": "By exact stack distances; the dots are 0.5, 1, 2, 5, 10, 20, 40 and 80 % of the distinct"
    " blocks. Engines evict the ends of prompts first; plain LRU loses their begin.",
    "reuse": "Of requests that hit: since the last request that used the deepest block they hit.",
    "tree": "Nodes of the tree with two children and more.",
    "sessions": "A turn extends the one before if it has all its whole blocks, and rolls back if at"
    " least half of them.",
    "hierarchy": "A thread ends with its last call's arrival; a call joins what it waits for.",
    "forks": "Of requests that fork what others left.",
}


def write_analysis(analysis: Analysis, told: Mapping[str, Any], out_dir: Path | str) -> list[Path]:
    """analysis.json, a PNG for each figure and analysis.html in `out_dir`; their paths.

    `told`: the analysis' `summary_of`, perhaps with more. The folder is made if need be, files of these
    names are replaced. Raises ConfigError if it can't be written to, or if matplotlib is missing.
    """
    require_matplotlib()
    folder = made_folder(out_dir)
    report, page = folder / "analysis.json", folder / "analysis.html"
    captions = _CAPTIONS | ({} if analysis.forks is None else {"arrivals": _TREES_ARRIVE})
    try:
        report.write_bytes(as_json(told))
        pictures = dict(pictures_of({analysis.name: analysis}, captions, folder))
        page.write_text(_page(told, list(pictures.values())), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: can't be written to ({error.strerror})") from error
    return [report, *pictures, page]


def _page(told: Mapping[str, Any], pictures: list[Picture]) -> str:
    note = f" {told['note'][:1].upper()}{told['note'][1:]}." if told.get("note") else ""
    subtitle = (
        f"{number(told['requests'])} requests in {seconds(told['duration_s'])}, blocks of"
        f" {told['block_size']} tokens ({told['rule']}).{note}"
    )
    return render(told["name"], subtitle, _tiles(told), pictures, sections_of(told))


def _tiles(told: Mapping[str, Any]) -> list[Tile]:
    reuse = told["reuse"]
    lru = {each["share"]: each["hit_rate"] for each in reuse["lru"]}
    return [
        Tile(number(told["arrivals"]["rate_per_s"]), "requests a second"),
        Tile(number(told["lengths"]["isl"]["p50"]), "tokens of a prompt, median"),
        Tile(number(reuse["new_tokens"]["p50"]), "of them new, median"),
        Tile(percent(reuse["ideal_hit"]), "of blocks seen before"),
        Tile(percent(lru.get(0.05)), "hit in an LRU cache of 5 % of all blocks"),
    ]


def sections_of(told: Mapping[str, Any]) -> list[Table | Facts]:
    """The numbers as tables: of distributions, of single values."""
    rows = [
        (
            name,
            *(number(values[key]) for key in ("count", "mean", "p5", "p50", "p90", "p99", "max")),
        )
        for name, values in distributions(told)
    ]
    lru = told["reuse"]["lru"]
    sections: list[Table | Facts] = [
        Table(
            "Distributions",
            ("", "samples", "mean", "p5", "median", "p90", "p99", "most"),
            rows,
        )
    ]
    if lru:
        sections.append(
            Table(
                "LRU caches",
                ("share of the distinct blocks", *(f"{100 * each['share']:g} %" for each in lru)),
                [
                    ("blocks", *(number(each["blocks"]) for each in lru)),
                    ("plain LRU", *(percent(each["hit_rate"]) for each in lru)),
                    ("ends of prompts first", *(percent(each["engine_hit_rate"]) for each in lru)),
                ],
            )
        )
    return [*sections, *(Facts(title, pairs) for title, pairs in facts(told))]


def distributions(told: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(what it is of, its quantiles) of all that the trace has."""
    names: dict[str, dict[str, float] | None] = {
        "prompt (tokens)": told["lengths"]["isl"],
        "new in the prompt (tokens)": told["reuse"]["new_tokens"],
        "answer (tokens)": told["lengths"]["osl"],
        "between arrivals (s)": told["arrivals"]["gap_s"],
        "blocks hit": told["reuse"]["hit_depth"] if told["tree"]["blocks"] else None,
        "blocks new": told["reuse"]["new_blocks"] if told["tree"]["blocks"] else None,
        "since last use (requests)": told["reuse"]["gap_requests"],
        "since last use (s)": told["reuse"]["gap_s"],
        "depth of branches": told["tree"]["branch_depth"],
        "width of branches": told["tree"]["branch_width"],
        **_of_sessions(told),
        "children of a spawn": told["hierarchy"]["children"],
        "siblings alive": told["hierarchy"]["live_siblings"],
        "start after the first sibling (s)": told["hierarchy"]["start_stagger_s"],
        "first child's end to join (s)": told["hierarchy"]["join_wait_s"],
        "spawn to join (s)": told["hierarchy"]["spawn_wait_s"],
    }
    if told["forks"] is not None:
        names["levels climbed back"] = told["forks"]["backtrack_levels"]
    return [(name, values) for name, values in names.items() if values is not None]


def _of_sessions(told: Mapping[str, Any]) -> dict[str, dict[str, float] | None]:
    """Nothing of sessions of one request each; of trees of forks their size alone."""
    sessions = told["sessions"]
    if sessions["sessions"] == told["requests"]:
        return {}
    found = {"requests of a session": sessions["turns"]}
    if told["forks"] is None:
        found |= {
            "length of a session (s)": sessions["duration_s"],
            "between turns (s)": sessions["turn_gap_s"],
            "rolled back (tokens)": sessions["rollback_tokens"],
        }
    return found


def facts(told: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, (name, value) pairs) of single values."""
    arrivals, tree, reuse = told["arrivals"], told["tree"], told["reuse"]
    tick = arrivals["tick_s"]
    found = [
        (
            "Arrivals",
            [
                ("requests a second", number(arrivals["rate_per_s"])),
                ("variation of gaps (CV)", number(arrivals["gap_cv"])),
                *(
                    (f"counts in {w} s: variance / mean", number(v))
                    for w, v in arrivals["dispersion"].items()
                ),
                *(
                    (f"next count, {w} s: correlation", number(v))
                    for w, v in arrivals["autocorrelation"].items()
                ),
                ("timestamps are cut to", "no ticks seen" if tick is None else seconds(tick)),
            ],
        ),
        (
            "Prefix tree and reuse",
            [
                ("distinct blocks", number(tree["blocks"])),
                ("roots", number(tree["roots"])),
                ("nodes that branch", number(tree["branch_nodes"])),
                ("of width 2", percent(tree["width_2_share"])),
                ("blocks seen before", percent(reuse["ideal_hit"])),
                ("mean share of a request", percent(reuse["mean_hit_share"])),
            ],
        ),
        ("Sessions", _session_facts(told)),
        (
            "Rank correlations",
            [(_CORRELATIONS[name], number(v)) for name, v in told["second_order"].items()],
        ),
    ]
    return [(title, pairs) for title, pairs in found if pairs]


def _session_facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    sessions = told["sessions"]
    pairs = [("sessions", number(sessions["sessions"]))]
    if told["forks"] is not None:
        return [*pairs, ("forks that are forked", percent(told["forks"]["expanded_share"]))]
    pairs.append(("lines", number(sessions["lines"])))
    if any(sessions["relations"].values()):
        pairs += [
            (f"turns: {name.replace('_', ' ')}", percent(share))
            for name, share in sessions["relations"].items()
        ]
    return pairs
