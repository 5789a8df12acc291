"""The capsule directory: who holds what, within bounds."""

import random
from itertools import islice

import numpy as np
import pytest

from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes
from mallee.protocol.ids import COMMON, CapsuleId, Scope, WorkerId
from mallee.router.index.capsules import CapsuleDirectory

W0, W1 = WorkerId("w0"), WorkerId("w1")
HASHES = np.array([1, 2], dtype=np.uint64)


def learn(directory: CapsuleDirectory, name: str, worker: WorkerId = W0, at: float = 0.0) -> None:
    directory.learn(CapsuleId(name), worker, boundary=35, hashes=HASHES, created=at)
    directory.check()


def test_the_least_recently_used_is_forgotten_first() -> None:
    directory = CapsuleDirectory(2)
    learn(directory, "a")
    learn(directory, "b")
    directory.lookup(CapsuleId("a"))
    learn(directory, "c")
    assert len(directory) == 2
    with pytest.raises(UnknownCapsule):
        directory.lookup(CapsuleId("b"))
    assert directory.lookup(CapsuleId("a")).worker == W0


def test_learning_again_keeps_the_time_but_moving_does_not() -> None:
    directory = CapsuleDirectory(2)
    learn(directory, "a", at=1.0)
    learn(directory, "a", at=5.0)
    assert directory.lookup(CapsuleId("a")).created == 1.0
    learn(directory, "a", W1, at=7.0)
    moved = directory.lookup(CapsuleId("a"))
    assert (moved.worker, moved.created) == (W1, 7.0)


def test_events_make_and_release_but_only_by_the_owner() -> None:
    directory = CapsuleDirectory(2)
    stored = CapsuleStored("a", 16, pack_hashes(HASHES[:1]))
    directory.apply(W0, stored, created=0.0)
    directory.apply(W1, CapsuleReleased("a"), created=0.0)
    assert directory.lookup(CapsuleId("a")).worker == W0
    directory.apply(W0, CapsuleReleased("a"), created=0.0)
    directory.apply(W0, CapsuleReleased("a"), created=0.0)
    assert len(directory) == 0
    directory.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_page_is_the_next_names_of_its_own_scope(seed: int) -> None:
    """Against a list of all, through replies, events, moves, losses and forgetting."""
    rng, directory = random.Random(seed), CapsuleDirectory(24)
    scopes = [COMMON, Scope("s"), Scope("t")]
    owner = {f"c{i:02}": rng.choice(scopes) for i in range(40)}
    for _ in range(300):
        name, worker = rng.choice(sorted(owner)), rng.choice([W0, W1])
        match rng.randrange(8):
            case 0:
                directory.forget(CapsuleId(name))
            case 1:
                directory.drop_worker(worker, 0.0)
            case 2 | 3:
                stored = CapsuleStored(name, 35, b"", owner[name])
                directory.apply(worker, stored, created=0.0)
            case 4:  # a reply that knows no scope keeps what is known
                if len(directory) and name in directory._entries:
                    learn(directory, name, worker)
            case _:
                own = owner[name]
                directory.learn(
                    CapsuleId(name), worker, boundary=35, hashes=HASHES, created=0.0, scope=own
                )
        directory.check()
        scope, after, limit = rng.choice(scopes), f"c{rng.randrange(40):02}", rng.randint(1, 9)
        all_own = sorted(each for each in directory._entries if owner[each] == scope)
        want = [each for each in all_own if each > after][:limit]
        assert list(islice(directory.of_scope(scope, after), limit)) == want


def test_a_page_looks_at_no_other_scopes_names() -> None:
    """However many there are: a name that is compared ends the test."""

    class Name(str):
        __slots__ = ()

        def __gt__(self, other: str) -> bool:
            raise AssertionError("a name of another scope was looked at")

    directory = CapsuleDirectory(1000)
    for i in range(999):
        other = CapsuleId(Name(f"x{i}"))
        directory.learn(
            other, W0, boundary=1, hashes=HASHES, created=0.0, scope=Scope(f"other{i % 7}")
        )
    mine = CapsuleId("mine")
    directory.learn(mine, W0, boundary=1, hashes=HASHES, created=0.0, scope=Scope("me"))
    assert list(directory.of_scope(Scope("me"), "")) == [mine]


def test_capsules_that_go_while_a_scope_s_are_gone_through_are_left_out() -> None:
    directory = CapsuleDirectory(8)
    for name in "dbac":
        learn(directory, name, W0)
    found = directory.of_scope(COMMON, "a")
    assert next(found) == "b"
    directory.forget(CapsuleId("c"))
    assert list(found) == ["d"]
