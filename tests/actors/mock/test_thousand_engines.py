"""A thousand mocked engines in one process, behind a real gateway."""

import asyncio
from collections import Counter
from pathlib import Path

from mallee.protocol.hashing import as_tokens
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from support.mock_scene import MockScene, make_folder, mock_config, mocked
from support.waiting import until

NUM = 1000


async def ask(scene: MockScene, number: int) -> tuple[str, int]:
    """The engine that answered, and how many tokens."""
    prompt = as_tokens([number // 300 + 1, number % 300 + 1, *range(1, 20)])
    stream = await scene.gateway.start(GenerateJob(prompt, Limits(4, ignore_eos=True)))
    return str(stream.worker), sum([len(delta.tokens) async for delta in stream])


async def test_a_thousand_engines_register_and_serve(tmp_path: Path) -> None:
    """K21, part: each of them answers a request, and the router knows the blocks of all."""
    config = mock_config(
        make_folder(tmp_path),
        mock__engines_per_worker=NUM,
        engine__kv_tokens=256,
        routing__policy="round_robin",
        lease_period_s=2.0,
    )
    async with mocked(config) as scene:
        await until(lambda: sum(view.is_whole for view in scene.router.workers()) == NUM)
        answers = await asyncio.gather(*(ask(scene, i) for i in range(NUM)))
        assert Counter(worker for worker, _ in answers) == dict.fromkeys(scene.names(), 1)
        assert {num for _, num in answers} == {4}
        await until(lambda: all(view.indexed_blocks for view in scene.router.workers()))
        assert scene.router.stats().gaps == 0
        scene.gateway.check()
