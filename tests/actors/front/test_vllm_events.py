"""KV events that a real vLLM published, replayed."""

import pytest

from support.vllm_driving import SETUPS, Held, Mirror, load


@pytest.mark.parametrize("name", SETUPS)
def test_the_index_equals_what_a_recorded_vllm_held(name: str) -> None:
    """X20, part: evictions, copies of the same block, resets of the cache and a crash; in each setup of vLLM.

    Promised hits equal vLLM's `cached_tokens` in 99 % of the requests: vLLM tells of a reset with the
    next request only.
    """
    mirror = Mirror(SETUPS[name].block_size)
    tiers: set[int] = set()
    for step in load(name):
        mirror.take(step)
        if isinstance(step, Held):
            tiers |= {tier for _, tier, _ in step.copies}
    assert mirror.num_lives == 2
    assert mirror.num_held >= 5
    assert mirror.num_requests >= 60
    assert len(mirror.wrong) <= mirror.num_requests / 100 + 1, mirror.wrong
    assert tiers == ({0, 1} if "offloaded" in name else {0})
    assert mirror.contents.names.adapters == ({"adapter"} if SETUPS[name].lora else set())
