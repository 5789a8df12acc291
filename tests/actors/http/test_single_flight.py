"""Cold requests that arrive together, with a prefix in common: real engines over HTTP compute it once."""

import asyncio

import pytest

from mallee.testing.random_model import RandomModel, random_model
from support.tiny_fleet import BLOCK, post, tiny_api

PREFIX = "the quick brown fox jumps over the lazy dog. " * 80
PREFIX = PREFIX[: len(PREFIX) // BLOCK * BLOCK]  # dearer to compute again than to queue behind 64


@pytest.fixture(scope="module")
def model() -> RandomModel:
    return random_model("llama", max_position_embeddings=4096)


@pytest.mark.parametrize("num", [2, 32, 64])
async def test_cold_siblings_compute_their_prefix_once(model: RandomModel, num: int) -> None:
    """X2: prefill tokens = prefix + suffixes, of two real engines, for requests that came at once."""
    suffixes = [f" {i:02}?"[: 2 + i % 3] for i in range(num)]
    async with tiny_api(model, 2, num_blocks=2048) as (client, fleet):
        answers = await asyncio.gather(
            *(
                post(client, "/v1/completions", prompt=PREFIX + suffix, max_tokens=2, temperature=0)
                for suffix in suffixes
            )
        )
        computed = sum(engine.stats().num_prefill_tokens for engine in fleet.engines.values())
        assert computed == len(PREFIX) + sum(map(len, suffixes))
        details = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
        assert sorted(details) == [0] + [len(PREFIX)] * (num - 1)
