"""`mallee demo`: its search and `--keep`, without Ray; the whole of it is in test_processes.py."""

from typing import Any

import pytest
from anyio.to_thread import run_sync
from rich.console import Console
from typer.testing import CliRunner

from mallee.cli.demo.search import ANSWER_TOKENS, search_table, searched, verdict
from mallee.cli.main import cli
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)


def way(score: float, drawn: int) -> dict[str, Any]:
    return {"score": score, "drawn": drawn, "prefill_tokens": 9, "total_ms": 1234.0, "text": ""}


async def test_a_search_draws_no_more_tokens_than_the_samples() -> None:
    """D33, part: both from one capsule, which is not computed again; samples of a tiny model end early."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        made = await client.post("/v1/capsules", json={"prompt": "A tree of many trunks"})
        ways = await run_sync(searched, str(client.base_url), made.json()["id"])
    assert 0 < ways["search"]["drawn"] <= ways["samples"]["drawn"] <= 8 * ANSWER_TOKENS
    for each in ways.values():
        assert 0 < each["score"] <= 1
        assert each["text"]
        assert each["prefill_tokens"] < 30 * 4, "a token of each fork's last block at most"


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (way(0.3, 368), "search: 1.5 times the score: 0.300 for 368 tokens drawn, "),
        (way(0.2, 368), "search: it did not win this time: 0.200 for 368 tokens drawn, "),
    ],
)
def test_a_search_that_does_not_win_is_said_to(search: dict[str, Any], says: str) -> None:
    ways = {"samples": way(0.2, 384), "search": search}
    assert verdict(ways).startswith(says)
    assert verdict(ways).endswith("0.200 for 384")


def test_the_table_of_the_search_fits_a_narrow_terminal() -> None:
    console = Console(width=60)
    with console.capture() as captured:
        console.print(search_table({"samples": way(0.2, 384), "search": way(0.3, 368)}))
    lines = captured.get().splitlines()
    assert any("samples" in line and "384" in line and "0.200" in line for line in lines)
    assert any("search" in line and "368" in line and "1.2" in line for line in lines)


def test_a_report_of_a_kept_service_is_refused() -> None:
    answer = CliRunner().invoke(cli, ["demo", "--keep", "--json"])
    assert answer.exit_code == 2
    assert "--keep with --json" in answer.output
