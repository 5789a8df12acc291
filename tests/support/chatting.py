"""The API over a tiny model that takes conversations: a character is a token, and answers never end early."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.families import FAMILIES
from mallee.testing.random_model import random_model
from support.live_api import served
from support.live_fleet import LiveFleet
from support.tiny_fleet import tiny_fleet

MODEL = random_model("llama", 5, max_position_embeddings=8192, eos_token_id=None)


@asynccontextmanager
async def chat_api() -> AsyncIterator[tuple[str, LiveFleet]]:
    """Its address, and the fleet of one worker."""
    async with (
        tiny_fleet(MODEL, 1, num_blocks=8192) as fleet,
        served(fleet.gateways[0], chat=ChatTemplate(None, family=FAMILIES[0])) as (url, _),
    ):
        yield url, fleet
