"""OpenAI's clients of two gateways over one worker with a tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.live_fleet import LiveFleet
from support.tiny_fleet import two_gateways

MODEL = random_model("llama", 5, max_position_embeddings=8192)
OPTIONS: Any = {"ignore_eos": True, "seed": 1}


class Scene(NamedTuple):
    a: openai.AsyncOpenAI
    b: openai.AsyncOpenAI
    fleet: LiveFleet
    jobs: list[Any]


@asynccontextmanager
async def two_clients() -> AsyncIterator[Scene]:
    """OpenAI's clients of two gateways that know each other; all jobs that these start."""
    chat = ChatTemplate(None, family=FAMILIES[0])
    options: Any = {"api_key": "-", "max_retries": 0}
    async with (
        two_gateways(MODEL, num_blocks=4096, chat=chat) as two,
        openai.AsyncOpenAI(base_url=f"{two.a.base_url}/v1", **options) as a,
        openai.AsyncOpenAI(base_url=f"{two.b.base_url}/v1", **options) as b,
    ):
        jobs: list[Any] = []
        for gateway in two.fleet.gateways:

            async def spied(job: Any, *more: Any, start: Any = gateway.start, **named: Any) -> Any:
                jobs.append(job)
                return await start(job, *more, **named)

            gateway.start = spied  # type: ignore[method-assign]
        yield Scene(a, b, two.fleet, jobs)


async def ask(client: openai.AsyncOpenAI, text: Any, **fields: Any) -> Any:
    return await client.responses.create(
        model="m", input=text, max_output_tokens=4, extra_body=OPTIONS, **fields
    )
