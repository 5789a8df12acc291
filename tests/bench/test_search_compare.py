"""The bench of searches over HTTP runs, and its figures add up."""

import json
from pathlib import Path

import httpx
import pytest
from anyio.to_thread import run_sync

from bench.search.clients import WAYS
from bench.search.compare import GAME_WAYS, QUICK, main
from bench.search.peer import beam_of_ours, mcts_of_ours, mcts_of_vllm, samples
from mallee.testing.random_model import random_model
from support.tiny_fleet import tiny_api

MODEL = random_model("llama", 5, max_position_embeddings=2048)


async def test_searches_are_played_by_all_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D24, part, D33, part: one call, forks, texts sent again with a cache and without; beams and samples."""
    out = tmp_path / "found.json"
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        await run_sync(main, ["--quick", "--url", str(client.base_url), "--out", str(out)])
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert tuple(found["game"]) == GAME_WAYS
    assert list(found["mcts"]) == list(WAYS)
    for ways in (found["game"], found["mcts"]):
        for name, way in ways.items():
            assert way["prefilled"] + way["drawn"] >= way["unique"], name
            assert way["seconds"] > 0
        assert ways["client"]["same_tree"] == 1.0
        assert ways["cold"]["prefilled"] > 2 * ways["client"]["prefilled"]
    mcts = found["mcts"]
    assert mcts["server"]["same_tree"] == 1.0
    assert mcts["server"]["requests"] == 1
    assert mcts["prefix"]["requests"] == QUICK.expansions
    # The SDK makes a capsule, and deletes it.
    assert mcts["client"]["requests"] == QUICK.expansions + 2
    for name in ("prefilled", "drawn", "unique", "best"):
        assert mcts["server"][name] == pytest.approx(mcts["client"][name], rel=1e-3)
    beam = found["beam"]
    assert beam["samples"]["ratio"] == 1.0
    assert beam["samples"]["drawn"] == QUICK.samples * QUICK.beam_depth * QUICK.step_tokens
    assert beam["rows"]["drawn"] <= beam["wide"]["drawn"]
    assert "mcts  server" in printed.err


async def test_plain_completions_carry_a_search() -> None:
    """D24, part: as another server is asked; here the service itself answers."""
    async with tiny_api(MODEL, 1, num_blocks=2048) as (client, _):
        url = str(client.base_url)

        def play() -> None:
            with httpx.Client(base_url=url, timeout=30) as one:
                ours, plain = mcts_of_ours(one, 1, QUICK), mcts_of_vllm(one, 1, QUICK)
                assert ours.drawn == plain.drawn == QUICK.expansions * 4 * QUICK.step_tokens
                assert ours.best is not None
                assert ours.best == pytest.approx(plain.best, rel=1e-3)
                drawn = samples(one, 1, QUICK).drawn
                assert drawn == QUICK.samples * QUICK.beam_depth * QUICK.step_tokens
                assert beam_of_ours(one, 1, QUICK).seconds > 0

        await run_sync(play)


def test_an_unknown_scene_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--scenes", "game,chess"])
    assert "chess: there are game, mcts, beam" in capsys.readouterr().err
