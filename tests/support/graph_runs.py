"""Graphs that the SDK runs against a tiny fleet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.doubles.random_model import random_model
from mallee.client import AsyncMallee, GraphResult
from support.live_api import served
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet
from support.waiting import until, until_asked

MODEL = random_model("llama", 5, max_position_embeddings=2048)
GREEDY: Any = {"temperature": 0, "ignore_eos": True}
DOC = "A tree of many trunks from one root. " * 4

# A template: `<role>content|` for each message.
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def times_add_up(graph: GraphResult) -> None:
    assert sum(step.ms for step in graph.path) == pytest.approx(graph.wall_ms, abs=0.1)
    for node in graph.nodes.values():
        times = [node.ready_ms, node.start_ms, node.first_token_ms, node.end_ms]
        known = [each for each in times if each is not None]
        assert known == sorted(known)
        assert node.end_ms is not None
        assert node.end_ms <= graph.wall_ms
        if node.kind == "branch" and node.status == "done" and not node.resumed:
            assert None not in times
            if node.after is not None:  # None: it went on from a prefill that had begun
                assert graph.nodes[node.after].end_ms == node.ready_ms


async def nothing_left(client: AsyncMallee, fleet: LiveFleet, num_kept: int = 0) -> None:
    """No branch runs, and no capsule is kept but those that are to stay."""
    await until(lambda: not any(engine.branches for engine in fleet.engines.values()))

    async def is_given_back() -> bool:
        return (await client.count_capsules(pinned=True)).count == num_kept

    await until_asked(is_given_back)
    kept = sum(engine.stats().capsules.kept for engine in fleet.engines.values())
    assert kept == num_kept


@asynccontextmanager
async def client_of(
    workers: int = 1, *, num_blocks: int = 512, **settings: Any
) -> AsyncIterator[tuple[AsyncMallee, LiveFleet]]:
    """At the end nothing of a graph is left. `settings` are of `served`."""
    async with (
        tiny_fleet(MODEL, workers, num_blocks=num_blocks) as fleet,
        served(fleet.gateways[0], **settings) as (url, _),
        AsyncMallee(url, timeout=30) as client,
    ):
        yield client, fleet
        await nothing_left(client, fleet)
        for engine in fleet.engines.values():
            engine.check()
        fleet.gateways[0].check()
