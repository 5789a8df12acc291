"""Examples whose agents share a document, over a tiny model: texts are noise, the counts are exact.

`langgraph_agents.py` runs by a stand-in, and by LangGraph where it is installed; and `debate.py`.
"""

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from anyio.to_thread import run_sync

from bench.doubles.random_model import random_model
from examples import debate, langgraph_agents
from examples.debate import PERSONAS
from examples.langgraph_agents import Agents, State, compiled
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.client import Mallee
from support.langgraph_stand_in import stand_in
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_api
from support.waiting import until

MODEL = random_model("llama", 5, max_position_embeddings=8192, eos_token_id=None)
DOCUMENT = "A mallee is a tree of many stems that rise from one root. " * 20
ROUNDS = 3


@asynccontextmanager
async def chat_api() -> AsyncIterator[tuple[str, LiveFleet]]:
    """A worker of conversations: a character is a token, and answers never end early."""
    settings = {"chat": ChatTemplate(None, family=FAMILIES[0])}
    async with tiny_api(MODEL, 1, num_blocks=8192, settings=settings) as (http, fleet):
        yield str(http.base_url), fleet


@pytest.fixture(params=["stand-in", "langgraph"])
def _langgraph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, or modules in its place."""
    if request.param == "langgraph":
        pytest.importorskip("langgraph.graph", reason="needs the extra clients: make clients")
    else:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("_langgraph")
async def test_all_nodes_fork_one_document_that_is_computed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D35: planner, four researchers in parallel, writer; nothing stays at the service."""

    def work(url: str) -> tuple[State, int]:
        with Mallee(url) as client:
            return langgraph_agents.run(client, DOCUMENT, "Why?", num_researchers=4, max_tokens=12)

    async with chat_api() as (url, fleet):
        state, num_shared = await run_sync(work, url)
        (engine,) = fleet.engines.values()
        await until(lambda: not engine.branches and not engine.stats().capsules.kept)
        computed = engine.stats().num_prefill_tokens
        path = tmp_path / "document.txt"
        path.write_text(DOCUMENT)
        await run_sync(langgraph_agents.main, [str(path), "Why?", "--tokens", "4", "--url", url])
    assert len(DOCUMENT) < num_shared < len(DOCUMENT) + 100
    assert computed == num_shared + sum(each.computed for each in state["prompts"])
    assert len(state["prompts"]) == 4 + 4 + 1
    assert all(each.cached >= num_shared for each in state["prompts"])
    assert len(state["questions"]) == len(state["notes"]) == 4
    assert all(
        f"- {question} " in note + " "
        for question, note in zip(state["questions"], state["notes"], strict=True)
    )
    assert state["answer"] == state["answer"].strip() != ""
    out = capsys.readouterr().out
    assert "answer: " in out
    assert " computed, " in out.splitlines()[-1]


@pytest.mark.skipif(find_spec("langgraph") is not None, reason="LangGraph is installed")
def test_a_missing_package_is_told_with_its_name() -> None:
    with pytest.raises(SystemExit, match="pip install langgraph"):
        compiled(object.__new__(Agents))


async def test_the_document_of_a_debate_is_computed_once_for_all_rounds_and_the_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own words are not computed again either; the command prints it with its figures."""

    def work(url: str) -> debate.Debate:
        with Mallee(url) as client:
            return debate.debate(client, DOCUMENT, "Why?", ROUNDS, max_tokens=12)

    async with chat_api() as (url, fleet):
        held = await run_sync(work, url)
        (engine,) = fleet.engines.values()
        await until(lambda: not engine.branches and not engine.stats().capsules.kept)
        assert held.computed_tokens == engine.stats().num_prefill_tokens
        document = tmp_path / "document.txt"
        document.write_text(DOCUMENT)
        options = ["--question", "Why?", "--rounds", "1", "--tokens", "4"]
        await run_sync(debate.main, [str(document), *options, "--url", url])
    assert [list(said) for said in held.rounds] == [list(PERSONAS)] * ROUNDS
    whole = held.document_computed_tokens
    assert len(DOCUMENT) < whole < len(DOCUMENT) + 100
    num_requests = ROUNDS * len(PERSONAS) + 1
    assert held.asked_tokens > num_requests * whole
    assert held.computed_tokens < whole + num_requests * 400
    assert 3 * held.computed_tokens < held.asked_tokens
    out = capsys.readouterr().out
    assert all(f"round 1, {name}: " in out for name in PERSONAS)
    assert "verdict: " in out
    assert re.search(
        r"prompt tokens: \d+ computed, \d+ of them the document's; \d+ without forks", out
    )
