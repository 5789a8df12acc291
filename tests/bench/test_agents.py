"""The bench of agents over HTTP runs, and its figures are those of hand-made agents."""

import json

import pytest
from anyio.to_thread import run_sync

from bench import agents
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)


async def test_pairs_and_sweeps_run_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    """S10, part, S12, part: the document is computed once for both agents that share it."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        await run_sync(agents.main, ["--quick", "--url", str(client.base_url)])
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    two, sweep = found["pair"], found["sweep"]
    document, both = agents.QUICK.document_chars, two["shared"]["prefilled"]
    assert two["apart"]["prefilled"] >= 2 * document > both > document
    assert two["speedup"] > 0
    assert list(sweep) == ["1", "2", "knee"]
    assert sweep["1"]["fairness"] == 1.0
    assert sweep["2"]["p50_ms"] <= sweep["2"]["p99_ms"]
    assert "the second agent's start" in printed.err


def test_figures_are_those_of_the_agents() -> None:
    found = agents.figures([agents.Agent([10.0, 30.0], 2.0), agents.Agent([20.0, 20.0], 1.0)])
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"]) == (20.0, 30.0, 30.0)
    assert found["jitter_ms"] == 5.0
    assert found["fairness"] == pytest.approx(0.9)
    assert agents.percentile([1.0], 50) == 1.0
    assert [agents.percentile([1.0, 2.0, 3.0, 4.0], q) for q in (25, 26, 100)] == [1.0, 2.0, 4.0]
