"""Steps beside a verifier: the times between tokens are those without one."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.live_api import served
from support.mock_scene import make_folder, mock_config, mocked
from support.tiny_fleet import chunks_of
from support.verifiers import Raw, verdict, verifying
from support.waiting import elapse, until

BRANCHES, TOKENS = 8, 80


async def gaps_s(client: httpx.AsyncClient, **more: Any) -> list[float]:
    """Seconds between two tokens of a branch, in order of length; of all branches."""
    body = {"prompt": [1, 2, 3], "n": BRANCHES, "max_tokens": TOKENS, "ignore_eos": True}
    now = asyncio.get_running_loop().time
    last: dict[int, float] = {}
    found = []
    asked = {**body, "stream": True, **more}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for chunk in chunks_of(answer):
            for choice in chunk["choices"]:
                if choice["index"] in last:
                    found.append(now() - last[choice["index"]])
                last[choice["index"]] = now()
    return sorted(found)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 60.0])
async def test_a_verifier_delays_no_step(tmp_path: Path, delay_s: float) -> None:
    """D12: in virtual time the p99 of steps is within 10 % of that without, however slow the verifier is."""
    config = mock_config(make_folder(tmp_path), mock__engines_per_worker=1, mock__speedup=1.0)

    async def think(question: dict[str, Any]) -> Raw:
        await elapse(delay_s)
        return verdict([1.0] * len(question["branches"]))

    async with (
        mocked(config) as scene,
        verifying() as verifier,
        served(scene.gateway, callbacks=(verifier.url,)) as (api, _),
        httpx.AsyncClient(base_url=api, timeout=100) as client,
    ):
        await until(lambda: any(view.is_whole for view in scene.router.workers()))
        verifier.reply = think
        alone = await gaps_s(client)
        score = {"score": {"url": verifier.url, "below": 0.5, "every": 8}}
        beside = await gaps_s(client, mallee={"stop_when": score})
        assert len(alone) == len(beside) > TOKENS
        assert len(verifier.questions) >= (1 if delay_s > 1 else 5)
        at = len(alone) * 99 // 100
        assert 0 < beside[at] <= 1.1 * alone[at]
