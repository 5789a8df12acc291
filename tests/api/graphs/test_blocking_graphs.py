"""Graphs for a client that blocks: an event loop in a thread of its own, in real time."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from bench.doubles.random_model import random_model
from mallee.client import Graph, InvalidParameter, Mallee, ToolFailed
from mallee.client.graphs.results import GraphResult
from support.graph_runs import DOC, GREEDY
from support.live_api import served
from support.tiny_fleet import tiny_fleet
from support.waiting import until

pytestmark = pytest.mark.real_time  # the run has a thread
ROOT = Path(__file__).parents[3]
MODEL = random_model("llama", 5, max_position_embeddings=2048)


async def test_a_blocking_client_runs_graphs_as_the_other_does(tmp_path: Path) -> None:
    """S4, part: by iterating, waiting, cancelling and leaving; functions run in threads."""

    def broken(_: str) -> str:
        raise ValueError("<no such page>")

    def work(url: str) -> GraphResult:
        graph = Graph()
        doc = graph.prefill(DOC, name="doc")
        found = graph.tool(lambda text: [text, "<i>blue</i>"], "red")
        each = graph.map(doc, found, ["Is it ", graph.item], max_tokens=4, **GREEDY)
        bad = graph.tool(broken)
        long = Graph()
        long.branch(long.prefill(DOC), max_tokens=1500, name="long", **GREEDY)
        with Mallee(url) as client:
            with client.run(graph, journal=tmp_path / "j") as run:
                events = list(run)
                result = run.wait()
            assert {event.node for event in events if event.type == "node.ended"} == {*result.nodes}
            assert result.nodes[each.name].items is not None
            with pytest.raises(ToolFailed, match="ValueError: <no such page>"):
                _ = result[bad]
            session = client.session("s")
            again = session.run(graph, journal=tmp_path / "j").wait()
            assert again.nodes[each.name].output == result.nodes[each.name].output
            with session.run(long) as run:
                for event in run:
                    if event.type == "node.delta":
                        run.cancel()
                assert run.wait().status == "cancelled"
                run.cancel()
            with client.run(long) as run:
                next(event for event in run if event.type == "node.delta")
        with (
            httpx.Client() as http,
            pytest.raises(InvalidParameter, match="a graph has an event loop"),
        ):
            Mallee(url, http_client=http).run(graph)
        return result

    def documented(url: str) -> None:
        text = (ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
        (code, *_) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        code = code.replace("http://127.0.0.1:8000", url)
        for name in ("mallee.journal", "timeline.html"):
            code = code.replace(name, str(tmp_path / name))
        exec(code, {})
        assert (tmp_path / "timeline.html").exists()

    async with tiny_fleet(MODEL, 1) as fleet, served(fleet.gateways[0]) as (url, _):
        result = await asyncio.to_thread(work, url)
        await asyncio.to_thread(documented, url)
        (engine,) = fleet.engines.values()
        await until(lambda: not engine.branches and not engine.stats().capsules.kept)
    shown(result, tmp_path / "timeline.html")


def shown(result: GraphResult, path: Path) -> None:
    """The timeline has every node and text, and no text of it is taken as HTML."""
    result.save_html(path)
    page = path.read_text(encoding="utf-8")
    assert result._repr_html_() in page
    assert page.startswith("<!doctype html>")
    assert "src=" not in page
    assert "href=" not in page
    for told in ("doc", "map-2[1]", "&lt;i&gt;blue&lt;/i&gt;", "&lt;no such page&gt;", "on w0"):
        assert told in page
    assert "<i>blue" not in page
    for step in result.path:
        assert f'bold">{step.node} ' in page
