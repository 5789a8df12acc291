"""The capsule directory: who holds what, within bounds."""

import numpy as np
import pytest

from mallee.protocol.errors import UnknownCapsule
from mallee.protocol.events import CapsuleReleased, CapsuleStored, pack_hashes
from mallee.protocol.ids import CapsuleId, WorkerId
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


def test_dropping_a_worker_forgets_its_capsules_only() -> None:
    directory = CapsuleDirectory(4)
    learn(directory, "a")
    learn(directory, "b", W1)
    assert directory.drop_worker(W0) == 1
    assert directory.drop_worker(W0) == 0
    assert not directory.forget(CapsuleId("a"))
    assert directory.forget(CapsuleId("b"))
    directory.check()


def test_drop_older_keeps_the_named_and_the_young() -> None:
    directory = CapsuleDirectory(4)
    for name, at in (("old", 1.0), ("named", 1.0), ("young", 5.0)):
        learn(directory, name, at=at)
    directory.drop_older(W0, created_before=3.0, keep={CapsuleId("named")})
    directory.check()
    assert len(directory) == 2
    with pytest.raises(UnknownCapsule):
        directory.lookup(CapsuleId("old"))
