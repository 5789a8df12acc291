"""Writes a replay down: a row a request, one JSON object, figures, a page."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mallee.figures.files import made_folder
from mallee.figures.page import Facts, Page, Table, Tile, write_page
from mallee.figures.replays.run_charts import run_figures
from mallee.figures.style import require_matplotlib
from mallee.figures.text import milliseconds, number, percent, seconds
from mallee.protocol.errors import ConfigError

if TYPE_CHECKING:
    from mallee.mocker.replay.result import Result

CSV_COLUMNS: Final = (
    *("number", "session", "class", "worker", "arrival_s", "routed_s", "first_s", "end_s"),
    *("ttft_ms", "e2e_ms", "input_tokens", "cached_tokens", "computed_tokens", "output_tokens"),
    *("branches", "retries"),
)
_CAPTIONS: Final = {
    "latency": "Share of requests that had their first and their last token after so long.",
    "over_time": "Median and 90th percentile of time to first token, by time of arrival; below,"
    " requests that had arrived and not ended.",
    "tokens": "Prompt tokens of the requests that arrived then: found in a worker's cache, or computed.",
    "workers": "An even skyline is a balanced fleet; blue is work that caches saved.",
}
_MOST_SESSIONS: Final = 25
_GROUP_HEAD: Final = (
    *("requests", "TTFT p50", "TTFT p90", "TTFT p99", "queued p90", "E2E p50", "E2E p99"),
    "hit rate",
)


def write_report(result: "Result", out_dir: Path | str) -> list[Path]:
    """requests.csv, report.json, a PNG for each figure and report.html in `out_dir`; their paths.

    The folder is made if need be, files of these names are replaced. Raises ConfigError if the folder
    can't be written to, or if matplotlib is missing.
    """
    require_matplotlib()
    rows = write_csv(result, made_folder(out_dir) / "requests.csv")
    return [rows, *write_page(out_dir, "report", whole(result), _page(result))]


def write_csv(result: "Result", path: Path | str) -> Path:
    """A row a request in the order of their ends; empty where a time never came. Raises ConfigError."""
    columns = result.columns
    lists = [column.tolist() for column in columns]
    at = {name: lists[i] for i, name in enumerate(columns._fields)}
    path = Path(path)
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(CSV_COLUMNS)
            for i in range(len(columns.number)):
                arrival, routed, first, end = (
                    at[name][i] for name in ("arrival_s", "routed_s", "first_s", "end_s")
                )
                worker = at["worker"][i]
                out.writerow(
                    [
                        at["number"][i],
                        result.sessions[at["session"][i]],
                        result.classes[at["cls"][i]],
                        result.workers[worker] if worker >= 0 else "",
                        *(_cell(time_s) for time_s in (arrival, routed, first, end)),
                        _cell(1000 * (first - arrival)),
                        _cell(1000 * (end - arrival)),
                        at["input_tokens"][i],
                        at["cached_tokens"][i],
                        at["computed_tokens"][i],
                        at["output_tokens"][i],
                        at["branches"][i],
                        at["retries"][i],
                    ]
                )
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror})") from error
    return path


def whole(result: "Result") -> dict[str, Any]:
    """Everything but the rows, as plain data."""
    return {
        "summary": result.summary,
        "conditions": result.conditions,
        "by_class": result.by_class,
        "by_session": result.by_session,
        "workers": result.workers,
    }


def _cell(value: float) -> str:
    return "" if value != value else f"{value:.6f}"


def _page(result: "Result") -> Page:
    summary, conditions = result.summary, result.conditions
    engines = conditions["engines"]
    title = f"{conditions['trace']} on {engines} engine{'s' if engines > 1 else ''}"
    subtitle = (
        f"{number(summary['requests'])} requests in {seconds(summary['duration_s'])} of virtual time,"
        f" policy {conditions['policy']}, {conditions['kv_tokens']:,} tokens of KV in"
        f" blocks of {conditions['block_size']}, timing {conditions['timing']}"
    )
    figures = {name: (figure, _CAPTIONS[name]) for name, figure in run_figures(result).items()}
    return Page(title, subtitle, _tiles(result), figures, _sections(result))


def _tiles(result: "Result") -> list[Tile]:
    summary, conditions = result.summary, result.conditions
    ttft, itl = summary["ttft_ms"], summary["itl_ms"]
    limits = f"{number(conditions['slo_ttft_ms'])} / {number(conditions['slo_itl_ms'])} ms"
    return [
        Tile(milliseconds(ttft["p50"]), "first token, median"),
        Tile(milliseconds(ttft["p99"]), "first token, p99"),
        Tile(milliseconds(itl["p50"]), "between tokens, median"),
        Tile(milliseconds(itl["p99"]), "between tokens, p99"),
        Tile(percent(summary["hit_rate"]), "of prompt tokens found in caches"),
        Tile(number(summary["prefix_copies"]), "copies of each shared prefix"),
        Tile(percent(summary["slo_share"]), f"of requests within {limits}"),
        Tile(number(summary["goodput_per_s"], "/s"), "requests within those limits"),
        Tile(number(summary["output_tokens_per_s"], "/s"), "answer tokens"),
        Tile(percent(summary["utilisation"]["mean"]), "of the engines' time used"),
    ]


def _sections(result: "Result") -> list[Table | Facts]:
    sections: list[Table | Facts] = [
        Table(
            "By class",
            ("class", *_GROUP_HEAD),
            [_group(name, each) for name, each in result.by_class.items()],
        )
    ]
    sessions = {name: each for name, each in result.by_session.items() if name}
    if sessions:
        slowest = sorted(
            sessions.items(), key=lambda item: (-(item[1]["ttft_ms"]["p90"] or 0.0), item[0])
        )[:_MOST_SESSIONS]
        sections.append(
            Table(
                "By session",
                ("session", *_GROUP_HEAD),
                [_group(name, each) for name, each in slowest],
                note=f"{len(slowest)} of {len(sessions)}: those that waited longest for first tokens"
                " (p90). report.json has the others.",
            )
        )
    conditions = {**result.conditions, "digest": result.summary["digest"]}
    return [
        *sections,
        Facts("Conditions", facts(conditions)),
        Facts("Everything measured", facts(result.summary), is_folded=True),
    ]


def _group(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    ttft, e2e = each["ttft_ms"], each["e2e_ms"]
    return (
        name,
        number(each["requests"]),
        *(milliseconds(ttft[share]) for share in ("p50", "p90", "p99")),
        milliseconds(each["queue_ms"]["p90"]),
        milliseconds(e2e["p50"]),
        milliseconds(e2e["p99"]),
        percent(each["hit_rate"]),
    )


def facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Each value as text, nested ones with dots in their names."""
    pairs: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, dict):
            pairs += [(f"{name}.{inner}", text) for inner, text in facts(value)]
        elif isinstance(value, float):
            pairs.append((name, f"{value:.6g}"))
        elif isinstance(value, list | tuple):
            pairs.append((name, ", ".join(map(str, value))))
        else:
            pairs.append((name, "-" if value is None or value == "" else str(value)))
    return pairs
