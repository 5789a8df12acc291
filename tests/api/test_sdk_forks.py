"""Forks by the SDK on a real engine: what is dropped ends, chats draw as chats, prefixes part."""

import gc
import time
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.families import FAMILIES
from mallee.client import Graph, Mallee
from support.tiny_fleet import tiny_api

pytestmark = pytest.mark.real_time  # its clients block in threads
MODEL = random_model("llama", 5, max_position_embeddings=4096, eos_token_id=None)
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


async def test_a_fork_that_is_dropped_unread_ends_at_the_service() -> None:
    """Of a client that blocks: at once where it was never read, with the garbage where it was."""
    async with tiny_api(MODEL, 1, num_blocks=4096) as (http, fleet):
        (engine,) = fleet.engines.values()

        def begin_and_drop(is_read: bool) -> None:
            with Mallee(str(http.base_url)) as client:
                forks = client.prefill("A mallee is ").fork(4, **LONG)
                while len(engine.branches) < 4:
                    time.sleep(0.01)
                if is_read:
                    next(forks.events())
                del forks
                gc.collect()
                while engine.branches:
                    time.sleep(0.01)

        for is_read in (False, True):
            with anyio.fail_after(30):
                await run_sync(begin_and_drop, is_read)


async def test_forks_with_messages_draw_as_many_tokens_as_chats() -> None:
    """That is as far as the window has room, if no setting says less; other forks draw 16."""
    system = [{"role": "system", "content": "A mallee is a tree."}]

    def work(url: str) -> tuple[list[int], list[int | None]]:
        with Mallee(url) as client, client.prefill(messages=system) as capsule:
            asked = [*capsule.ask(["Why?", "How?"]), capsule.ask("And then?")]
            ends = [each.boundary or 0 for each in asked]
            return ends, [each.completion_tokens for each in capsule.fork(["a", "b"])]

    small = random_model("llama", 5, max_position_embeddings=256, eos_token_id=None)
    settings = {"chat": ChatTemplate(None, family=FAMILIES[0])}
    async with tiny_api(small, 1, settings=settings) as (http, _):
        assert await run_sync(work, str(http.base_url)) == ([256] * 3, [16] * 2)


async def test_a_result_of_a_tool_that_is_too_long_for_the_service_is_its_error() -> None:
    """The refusal arrives, and no tool is waited for in vain."""
    graph = Graph()
    document = graph.prefill("A mallee is ")
    long = graph.tool(lambda _: "x" * 100_000, timeout_s=60.0)
    graph.branch(document, [long], max_tokens=4)

    def work(url: str) -> Any:
        with Mallee(url) as client:
            return client.run(graph).wait()

    async with tiny_api(MODEL, 1) as (http, _):
        result = await run_sync(work, str(http.base_url))
    assert result.status != "done"
    error = result.nodes[long.name].error
    assert error is not None, result
    assert "100000" in str(error), error


async def test_a_map_over_a_list_asks_each_of_its_texts() -> None:
    graph = Graph()
    document = graph.prefill("A mallee is ")
    notes = graph.map(document, ["one\n", "two"], [graph.item, ":"], max_tokens=4, temperature=0.0)

    def work(url: str) -> tuple[Any, list[str]]:
        with Mallee(url) as client:
            result = client.run(graph).wait()
            with client.prefill("A mallee is ") as capsule:
                forks = capsule.fork(["one\n:", "two:"], max_tokens=4, temperature=0.0)
                return result, [each.text for each in forks]

    async with tiny_api(MODEL, 1) as (http, _):
        result, texts = await run_sync(work, str(http.base_url))
    assert [result.nodes[f"{notes.name}[{i}]"].output for i in range(2)] == texts
