"""`examples/rollouts.py`: over a tiny model, over weights that change meanwhile, and over stubbed answers."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from anyio.to_thread import run_sync

from bench.doubles.random_model import random_model
from examples.rollouts import PROMPT, MixedWeights, advantages, main, reward, rollouts
from mallee.client import InvalidParameter, Mallee
from mallee.mocker.passes import mock_spec
from mallee.router.config import RouterConfig
from support.live_api import served
from support.live_fleet import LiveFleet, running
from support.tiny_fleet import tiny_api
from support.versions import VersionedForward, Weights
from support.waiting import until

MODEL = random_model("llama", 5, eos_token_id=None)
LABELS = {
    "index",
    "text",
    "prompt_token_ids",
    "token_ids",
    "logprobs",
    "finish_reason",
    "weights",
    "reward",
    "advantage",
}


async def test_a_group_is_one_fork_with_ids_log_probabilities_and_a_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """X16, part, X26, part: each sample tells the weights that drew it."""
    async with tiny_api(MODEL, 1, num_blocks=1024) as (http, fleet):
        await run_sync(main, ["--url", str(http.base_url), "--tokens", "3"])
        with pytest.raises(InvalidParameter, match="max_tokens"):  # what is refused is told
            await run_sync(main, ["--url", str(http.base_url), "--tokens", "0"])
        (engine,) = fleet.engines.values()
        stats = engine.stats()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == list(range(16))
    for row in rows:
        assert set(row) == LABELS
        assert "".join(map(chr, row["token_ids"])) == row["text"]
        assert len(row["token_ids"]) == len(row["logprobs"]) == 3
        assert row["prompt_token_ids"] == [*PROMPT.encode()]
        assert all(value < 0 for value in row["logprobs"])
        assert (row["weights"], row["finish_reason"]) == ("base", "length")
    assert len({row["text"] for row in rows}) > 8
    assert stats.num_prefill_tokens == len(PROMPT), "it is computed once"


def test_rewards_and_advantages() -> None:
    assert [reward(text) for text in (" 42.", " 4 2", "42 or 43", "none", "")] == [1, 0, 1, 0, 0]
    assert advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert advantages([1.0, 1.0]) == [0.0, 0.0]


async def test_a_group_that_weights_change_under_is_drawn_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """X16, part: what runs is cut at the change; the second group is all of the new version."""
    made = LiveFleet(
        mock_spec(vocab_size=8, max_model_len=4096),
        RouterConfig(block_size=16),
        forward=VersionedForward,
        num_blocks=4096,
        source=lambda *about: Weights(*about),
    )
    async with running(made, 1) as fleet, served(fleet.gateways[0]) as (url, _):

        def work() -> Any:
            with Mallee(url, timeout=30) as client:
                return rollouts(client, "\1\2\3", 4, max_tokens=1000, ignore_eos=True, seed=1)

        drawing = asyncio.create_task(run_sync(work))
        (engine,) = fleet.engines.values()
        await until(lambda: engine.stats().num_output_tokens > 8)
        await fleet.gateways[0].operator.change_weights(
            "step-2", path="two", drain_s=0.0, wait_s=5.0
        )
        rows = await drawing
    assert {row["weights"] for row in rows} == {"step-2"}
    assert len(rows) == 4
    err = capsys.readouterr().err
    assert "began with weights 'base', and 'step-2' serve now" in err
    assert "drawing the group again" in err


def stubbed(*groups: Sequence[tuple[str, str]]) -> Mallee:
    """A client of a service that answers with groups of samples of these versions."""
    left: Iterator[Sequence[tuple[str, str]]] = iter(groups)

    def answer(_: httpx.Request) -> httpx.Response:
        choices = [
            {
                **{"index": index, "text": "a", "finish_reason": "stop", "token_ids": [7]},
                "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]},
                "mallee": {"weight_version": {"start": start, "end": end}},
            }
            for index, (start, end) in enumerate(next(left))
        ]
        events = f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, stream=httpx.ByteStream(events.encode()))

    return Mallee("http://stub", http_client=httpx.Client(transport=httpx.MockTransport(answer)))


OLD, NEW, CUT = ("a", "a"), ("b", "b"), ("a", "b")


@pytest.mark.parametrize("mixed", [[OLD, NEW], [OLD, CUT], [NEW, OLD, NEW]])
def test_a_mixed_group_is_drawn_once_more(mixed: list[tuple[str, str]]) -> None:
    with stubbed(mixed, [NEW, NEW]) as client:
        assert [row["weights"] for row in rollouts(client, "", 2)] == ["b", "b"]
    # A second one is refused by its versions.
    told = "the group has samples of several weights: a, b"
    with stubbed(mixed, [OLD, CUT], [NEW, NEW]) as client, pytest.raises(MixedWeights, match=told):
        rollouts(client, "", 2)
