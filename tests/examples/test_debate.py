"""`examples/debate.py` over a tiny model: texts are noise, the counts are exact."""

import re
from pathlib import Path

import pytest
from anyio.to_thread import run_sync

from examples.debate import PERSONAS, Debate, debate, main
from mallee.client import Mallee
from support.chatting import chat_api
from support.waiting import until

DOCUMENT = "A mallee is a tree of many stems that rise from one root. " * 20
ROUNDS = 3


async def test_the_document_is_computed_once_for_all_rounds_and_the_judge() -> None:
    """Of a model whose tokens are characters; its own words are not computed again either."""

    def work(url: str) -> Debate:
        with Mallee(url) as client:
            return debate(client, DOCUMENT, "Why?", ROUNDS, max_tokens=12)

    async with chat_api() as (url, fleet):
        held = await run_sync(work, url)
        (engine,) = fleet.engines.values()
        await until(lambda: not engine.branches and not engine.stats().capsules.kept)
        assert held.computed_tokens == engine.stats().num_prefill_tokens
    assert [list(said) for said in held.rounds] == [list(PERSONAS)] * ROUNDS
    whole = held.document_computed_tokens
    assert len(DOCUMENT) < whole < len(DOCUMENT) + 100
    num_requests = ROUNDS * len(PERSONAS) + 1
    assert held.asked_tokens > num_requests * whole
    assert held.computed_tokens < whole + num_requests * 400
    assert 3 * held.computed_tokens < held.asked_tokens


async def test_the_example_prints_the_debate_and_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "document.txt"
    document.write_text(DOCUMENT)
    async with chat_api() as (url, _):
        options = ["--question", "Why?", "--rounds", "1", "--tokens", "4"]
        await run_sync(main, [str(document), *options, "--url", url])
    out = capsys.readouterr().out
    assert all(f"round 1, {name}: " in out for name in PERSONAS)
    assert "verdict: " in out
    assert re.search(
        r"prompt tokens: \d+ computed, \d+ of them the document's; \d+ without forks", out
    )
