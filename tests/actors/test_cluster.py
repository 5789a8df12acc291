"""Names and lives of workers, claimed in the cluster's key-value store. K28, part."""

import pytest
import ray

from mallee.actors import cluster
from mallee.actors.cluster import Claim, Names
from support.dict_store import DictStore


def test_a_worker_that_is_replaced_comes_back_under_its_name_in_the_next_life() -> None:
    store, alive = DictStore(), {"a", "b", "c", "d"}

    def take(owner: str) -> Claim:
        return Names(store, "app", owner, is_alive=alive.__contains__).claim()

    assert [take("a"), take("b")] == [Claim(0, 1), Claim(1, 1)]
    alive.remove("a")
    assert take("c") == Claim(0, 2)
    alive.remove("c")
    assert take("d") == Claim(0, 3)
    other = Names(store, "another app", "e", is_alive=bool).claim()
    assert other == Claim(0, 1), "apps of one cluster have numbers of their own"
    gateway = Names(store, "gateways of app", "g", is_alive=bool).claim()
    assert gateway == Claim(0, 1), "and so have their gateways"


def test_a_worker_that_still_drains_keeps_its_name() -> None:
    store, alive = DictStore(), {"old0", "old1", "new0", "new1", "new2"}

    def take(owner: str) -> Claim:
        return Names(store, "app", owner, is_alive=alive.__contains__).claim()

    assert [take("old0").number, take("old1").number, take("new0").number] == [0, 1, 2]
    alive.remove("old1")
    assert take("new1") == Claim(1, 2)
    alive -= {"old0", "new0"}
    assert take("new2") == Claim(0, 2)


def test_a_claim_that_another_replica_takes_first_is_left_to_it() -> None:
    class Contested(DictStore):
        def keys(self, prefix: str) -> list[str]:
            seen = super().keys(prefix)
            self.values.setdefault("worker:app:0:1", "other")  # just now
            return seen

    names = Names(Contested(), "app", "me", is_alive=lambda owner: True)
    assert names.claim() == Claim(1, 1)


@pytest.mark.parametrize(
    ("addresses", "has_token", "named"),
    [
        (["127.0.0.1"], False, None),
        (["10.0.0.7", "10.0.0.9"], True, None),
        (["10.0.0.9", "127.0.0.1", "10.0.0.7"], False, "listens on 10.0.0.7, 10.0.0.9 without"),
    ],
)
def test_a_ray_that_others_reach_without_a_token_is_told(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], has_token: bool, named: str | None
) -> None:
    nodes = [{"NodeManagerAddress": each, "Alive": True} for each in addresses]
    nodes.append({"NodeManagerAddress": "10.0.0.1", "Alive": False})
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "is_token_auth_enabled", lambda: has_token)
    told = cluster.exposure()
    assert told == named if named is None else named in str(told)


def test_the_name_of_a_worker_that_is_gone_is_held_by_one_other_and_then_free() -> None:
    """X28, part: it is not gone while fewer workers live than should, for the next may take its name."""
    store, alive = DictStore(), {"a", "b", "c"}

    def names(owner: str) -> Names:
        return Names(store, "app", owner, is_alive=alive.__contains__)

    def take(owner: str) -> Claim:
        return names(owner).claim()

    def inherit(owner: str, number: int, target: int = 2) -> Claim | None:
        return names(owner).claim_departed(number, lambda: target)

    assert [take(each).number for each in "abc"] == [0, 1, 2]
    assert inherit("b", 0) is None, "it lives"
    alive.remove("a")
    assert inherit("b", 0, target=3) is None, "a replica is about to take it"
    held = inherit("b", 0)
    assert held == Claim(0, 2)
    assert inherit("c", 0) is None, "another holds it"
    alive.add("d")
    assert take("d") == Claim(3, 1), "and no worker gets the name meanwhile"
    names("b").give_back(held)
    alive.add("e")
    assert take("e") == Claim(0, 3)
    assert inherit("b", 7) == Claim(7, 1), "Ray is new, and had more workers before"
    alive.remove("b")
    assert inherit("c", 7) == Claim(7, 2), "its holder died"
