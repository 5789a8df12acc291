"""K26: a replay is written down for programs (JSON, CSV) and for people (figures, one page)."""

import csv
import json
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.workloads import made
from mallee.figures import page, style, text
from mallee.figures.replays import run_charts
from mallee.figures.replays.write import CSV_COLUMNS, write_csv, write_report
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.replay.result import Result
from mallee.mocker.replay.run import replay
from mallee.mocker.timing import Fixed, Timing
from mallee.protocol.errors import ConfigError
from mallee.traces.workload import Request

NAN = float("nan")


@cache
def make_result(num: int = 3) -> Result:
    """`num` requests a second apart, each of which takes two; the last one never began."""
    requests = [Request(i, float(i), (), 100, 8, ("a<b>", "")[i % 2], "turn") for i in range(num)]
    config = ReplayConfig(
        engines=2,
        kv_tokens=1024,
        block_size=16,
        policy="round_robin",
        timing=Timing(Fixed(0.25, 0.25)),
        seed=7,
    )
    result = replay(made(requests, name="made <up> & small", id_tokens=16), config)
    result.columns.first_s[-1] = result.columns.end_s[-1] = NAN
    result.columns.worker[-1] = -1
    return result


# Tables


def test_csv_has_a_row_for_each_request_and_nothing_where_a_time_never_came(tmp_path: Path) -> None:
    path = write_csv(make_result(), tmp_path / "rows.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["session"] for row in rows] == ["a<b>", "", "a<b>"]
    assert (rows[1]["ttft_ms"], rows[1]["e2e_ms"], rows[1]["worker"]) == (
        "250.000000",
        "2000.000000",
        "w1",
    )
    assert (rows[2]["first_s"], rows[2]["ttft_ms"], rows[2]["worker"]) == ("", "", "")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        write_report(make_result(), tmp_path / "file")
    with pytest.raises(ConfigError, match="written"):
        write_csv(make_result(), tmp_path / "none" / "rows.csv")


# The whole report


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 20])
def test_a_report_is_complete_stands_alone_and_is_the_same_each_time(
    tmp_path: Path, num: int
) -> None:
    paths = write_report(make_result(num), tmp_path / "out")
    names = {path.name for path in paths}
    assert names == {
        *("report.json", "requests.csv", "report.html"),
        *("latency.png", "over_time.png", "tokens.png", "workers.png"),
    }
    assert all(path.stat().st_size for path in paths)
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert data["summary"]["digest"] == make_result(num).summary["digest"]
    assert data["conditions"]["seed"] == 7
    html = (tmp_path / "out" / "report.html").read_text()
    assert "made &lt;up&gt; &amp; small" in html
    assert "made <up>" not in html
    assert "a&lt;b&gt;" in html
    assert make_result(num).summary["digest"] in html
    assert_stands_alone(html)
    for first, again in zip(paths, write_report(make_result(num), tmp_path / "again"), strict=True):
        assert first.read_bytes() == again.read_bytes(), first.name


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"mallee\[plots\]"):
        write_report(make_result(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_csv(make_result(), tmp_path / "rows.csv")


# Figures


def test_figures_take_the_colours_of_the_page() -> None:
    figure = run_charts.latency_figure(make_result())
    svg = style.to_svg(figure)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "var(--grid)" in svg
    assert style.INK not in svg
    assert ET.fromstring(svg).get("width") is None


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), min_size=1, max_size=40))
def test_requests_under_way_are_those_that_have_come_and_not_ended(
    spans: list[tuple[float, float]],
) -> None:
    arrival = np.array([begin for begin, _ in spans])
    end = arrival + np.array([length for _, length in spans])
    columns = make_result(len(spans)).columns._replace(arrival_s=arrival, end_s=end)
    at = np.linspace(0, 150, 31)
    expected = [sum(a <= t and not e <= t for a, e in zip(arrival, end, strict=True)) for t in at]
    assert run_charts.running_at(columns, at).tolist() == expected


def test_sums_over_time_lose_nothing() -> None:
    columns = make_result(200).columns
    edges = run_charts.time_edges(columns)
    sums = run_charts.binned_sum(columns.arrival_s, columns.cached_tokens, edges)
    assert sums.sum() == columns.cached_tokens.sum()
    ttft = columns.first_s - columns.arrival_s
    quantiles = run_charts.binned_quantile(columns.arrival_s, ttft, edges, 0.9)
    assert np.nanmax(np.abs(quantiles - 0.25)) < 1e-9


# Words


def test_numbers_have_three_digits_that_count_and_what_there_is_not_is_a_dash() -> None:
    values = (0.0, 0.012345, 1.5, 12.345, 1234.5, None)
    assert [*map(text.number, values)] == ["0", "0.0123", "1.5", "12.3", "1,234", "-"]
    assert text.percent(None) == text.milliseconds(NAN) == "-"
    assert text.milliseconds(12_340.0) == "12.3 s"
    assert [*map(text.seconds, (90.0, 600.0, 36_000.0))] == ["90 s", "10 min", "10 h"]


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("has_pictures", [False, True])
def test_a_page_escapes_whatever_it_is_given_and_closes_what_it_opens(
    has_tiles: bool, has_pictures: bool
) -> None:
    bad = "<script>alert(1)</script>"
    html = page.render(
        bad,
        bad,
        [page.Tile(bad, bad)] * has_tiles,
        [page.Picture("<svg></svg>", bad, bad)] * has_pictures,
        [
            page.Table(bad, (bad,), [(bad,)], note=bad),
            page.Facts(bad, [(bad, bad)], is_folded=True),
        ],
    )
    assert_stands_alone(html)
    body = html[html.index("<body>") : html.index("</html>")]
    ET.fromstring(body)  # which would not parse otherwise


def assert_stands_alone(html: str) -> None:
    """Nothing in it is loaded from elsewhere."""
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", html)
    assert "@import" not in html
    assert "<script" not in html
    assert not re.search(r"url\((?!#)", html)
