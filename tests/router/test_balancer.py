"""The router as a plain object, and as verl's load balancer."""

import random
from collections import Counter

import pytest

from examples.verl_balancer import KVAwareLoadBalancer, main
from mallee.protocol.errors import NoWorker, UnknownRequest
from mallee.router.balancer import Balancer

RNG = random.Random(5)
PROMPTS = [RNG.choices(range(32_000), k=2048) for _ in range(6)]


def balancer(*servers: str) -> tuple[Balancer, list[float]]:
    now = [0.0]
    return Balancer(servers, clock=lambda: now[0]), now


def test_a_conversation_goes_on_where_its_turns_before_are_cached() -> None:
    """With and without others meanwhile; requests are spread that share nothing."""
    found, now = balancer("a", "b", "c")
    homes: dict[int, str] = {}
    texts = dict(enumerate(PROMPTS))
    for turn in range(5):
        for number, text in texts.items():
            server = found.acquire_server(f"r{number}", text)
            assert homes.setdefault(number, server) == server
            found.release_server(server, f"r{number}")
            texts[number] = text + RNG.choices(range(32_000), k=200)
            now[0] += 1.0
        assert set(homes.values()) == {"a", "b", "c"}, turn


def test_after_an_update_of_the_weights_nothing_is_cached() -> None:
    found, _ = balancer("a", "b")
    prompt = PROMPTS[0]
    first = found.acquire_server("r", prompt)
    found.release_server(first, "r")
    assert found.acquire_server("r", prompt) == first
    found.release_server(first, "r")
    found.forget_caches()
    other = found.acquire_server("s", PROMPTS[1])
    again = found.acquire_server("r", prompt)
    assert again != other, "the other one is busy, and neither has the prompt"


def test_servers_come_and_go_and_what_runs_there_can_still_be_released() -> None:
    found, _ = balancer("a")
    assert found.acquire_server("r", PROMPTS[0]) == "a"
    found.add_servers(["b"])
    found.remove_servers(["a", "unknown"])
    assert found.acquire_server("s", PROMPTS[0]) == "b"
    found.release_server("a", "r")
    found.release_server("b", "s")
    with pytest.raises(UnknownRequest):
        found.release_server("b", "s")
    found.remove_servers(["b"])
    with pytest.raises(NoWorker):
        found.acquire_server("t", PROMPTS[0])


def test_the_samples_of_a_group_go_where_their_prompt_is_computed() -> None:
    """X26, part: as a plain object, with the handles that verl's rollout workers want."""
    groups = main(lambda: 0.0)
    assert sum(len(servers) for servers in groups.values()) <= 12, "of 32, where load alone decides"
    assert all(24 <= each <= 40 for each in sum(groups.values(), Counter()).values())
    found = KVAwareLoadBalancer({"a": 1}, clock=lambda: 0.0)
    acquired = {name: [1, 2, 3] for name in found.require_acquire_fields()}
    assert found.acquire_server("r", **acquired) == ("a", 1)
    found.add_servers({"b": 2})
    found.remove_servers(["a"])
    assert found.acquire_server("r", prompt_ids=[1, 2, 3]) == ("b", 2)
    found.release_server("a", **dict.fromkeys(found.require_release_fields(), "r"))
    found.weights_updated()
