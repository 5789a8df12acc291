"""S6, part: capsules that are forked before they are made, in stories written by hand."""

import pytest

from mallee.protocol.errors import CapsuleAbandoned, CapsulesFull, UnknownCapsule
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, capsule_id
from mallee.protocol.messages import Fork, Limits, Prefill, Sampling
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob
from mallee.router.dispatch.promises import MAX_BROKEN, BrokenPromises, Promise
from support.model_fleet import Asked, ModelFleet, ModelWorker, Rules

PROMPT = as_tokens([i % 11 for i in range(20)])
HOT = Sampling(temperature=1.0, seed=3)
NO_SUFFIX = as_tokens(())
CHUNK = 2


def fleet(workers: int = 2, **rules: object) -> ModelFleet:
    made = ModelFleet(Rules(chunk=CHUNK)._replace(**rules))
    for i in range(workers):
        made.join(f"w{i}")
    return made


def promise(f: ModelFleet, name: str = "p") -> tuple[CapsuleId, Asked]:
    makes = capsule_id(RequestId(name))
    asked = f.submit(name, PrefillJob(PROMPT, makes=makes))
    assert asked is not None, f.refusal
    return makes, asked


def fork(f: ModelFleet, name: str, of: CapsuleId, at: int | None = None) -> Asked:
    asked = f.submit(name, ForkJob(of, [NO_SUFFIX], Limits(30, ignore_eos=True), HOT, at=at))
    assert asked is not None, f.refusal
    return asked


def run(f: ModelFleet, times: int = 1, *workers: ModelWorker) -> None:
    for _ in range(times):
        for worker in workers or list(f.workers.values()):
            f.step(worker)
            f.deliver(worker)


def fill(f: ModelFleet) -> list[Asked]:
    """Leave no room on any worker."""
    job = GenerateJob(as_tokens([1]), Limits(9, ignore_eos=True), HOT)
    asked = [f.submit(f"full{i}", job) for i in range(len(f.workers) * f.rules.max_rows)]
    assert all(each is not None and each.workers for each in asked)
    return [each for each in asked if each is not None]


def test_a_fork_follows_its_prefill_to_the_same_worker_at_once() -> None:
    """S6, part: its command is right behind, and it draws as soon as its tokens are there."""
    f = fleet()
    made, prefill = promise(f)
    early, whole = fork(f, "e", made, at=5), fork(f, "f", made)
    (worker,) = {*prefill.workers, *early.workers, *whole.workers}
    kinds = [type(command) for command in f.workers[worker].inbox]
    assert kinds == [Prefill, Fork, Fork]
    run(f, 3)
    assert (len(early.got[0]), whole.got, prefill.ends) == (1, {}, {})
    run(f, 7)
    assert (len(early.got[0]), len(whole.got[0]), prefill.ends) == (8, 1, {0: "stop"})
    f.settle()
    assert prefill.capsules == {0: made}


def test_a_prefill_and_its_forks_go_on_together_when_their_worker_dies() -> None:
    """S6, X4, part: the capsule keeps its id."""
    f = fleet()
    made, prefill = promise(f)
    early, whole = fork(f, "e", made, at=5), fork(f, "f", made)
    run(f, 5)
    assert len(early.got[0]) == 3
    f.die(f.workers[prefill.workers[0]])
    f.settle()
    assert prefill.workers[0] != prefill.workers[1]
    assert (early.ends, whole.ends) == ({0: "length"}, {0: "length"})
    assert prefill.capsules == {0: made}
    assert fork(f, "g", made).workers == [prefill.workers[1]]


def test_forks_are_held_while_the_prefill_waits_for_a_worker() -> None:
    """S6, part: they are placed with it."""
    f = fleet(1, max_rows=2)
    fill(f)
    made, prefill = promise(f)
    forked = fork(f, "f", made, at=3)
    assert f.dispatcher.promise(made) == Promise(20, None, f.now)
    assert not prefill.workers
    assert not forked.workers
    f.settle()
    assert forked.ends == {0: "length"}


def test_what_waits_for_a_prefill_that_is_given_up_ends() -> None:
    """S6, part: whether its prefill had a worker or not; its id is unknown then."""
    for is_placed in (True, False):
        f = fleet(1, max_rows=4)
        others = [] if is_placed else fill(f)
        made, _ = promise(f)
        forked = fork(f, "f", made)
        f.cancel(RequestId("p"), None)
        f.settle()
        assert isinstance(forked.errors[0], CapsuleAbandoned)
        assert f.dispatcher.promise(made) is None
        assert f.submit("g", ForkJob(made, [NO_SUFFIX], Limits(3))) is None
        assert isinstance(f.refusal, UnknownCapsule)
        assert all(each.is_over for each in others)
        assert not any(worker.capsules.get(made) for worker in f.workers.values())


def test_a_prefill_that_fails_leaves_its_error_under_its_id() -> None:
    """S6, part: forks that wait get it, later ones too, until it is forgotten."""
    f = fleet(1, max_kept=0)
    made, prefill = promise(f)
    waiting = fork(f, "f", made)
    f.settle()
    assert prefill.ends == {0: CapsulesFull.code}
    assert waiting.ends[0] in (CapsulesFull.code, UnknownCapsule.code)
    broken = f.dispatcher.promise(made)
    assert broken is not None
    assert isinstance(broken.error, CapsulesFull)
    assert f.submit("g", ForkJob(made, [NO_SUFFIX], Limits(3))) is None
    assert isinstance(f.refusal, CapsulesFull)
    f.dispatcher.forget_capsule(made)
    assert f.submit("h", ForkJob(made, [NO_SUFFIX], Limits(3))) is None
    assert isinstance(f.refusal, UnknownCapsule)


def test_forks_wait_for_a_prefill_on_a_worker_that_drains() -> None:
    """S6, part: it takes nothing new, and what it computes is made again elsewhere for them."""
    f = fleet(2)
    made, prefill = promise(f)
    leaving = f.workers[prefill.workers[0]]
    run(f, 1)
    f.drain(leaving)
    forked = fork(f, "f", made, at=5)
    assert not forked.workers
    f.settle()
    assert prefill.ends == {0: "stop"}
    assert forked.ends == {0: "length"}
    assert leaving.name not in forked.workers


def test_the_end_of_a_gateway_ends_promises_and_their_forks() -> None:
    f = fleet(1, max_rows=2)
    fill(f)
    made, prefill = promise(f)
    forked = fork(f, "f", made)
    f.dispatcher.close(CapsuleAbandoned("x"))
    f.carry_out()
    assert prefill.is_over
    assert forked.is_over


@pytest.mark.parametrize("num", [MAX_BROKEN, MAX_BROKEN + 3])
def test_as_many_causes_are_remembered_as_may_be(num: int) -> None:
    broken = BrokenPromises()
    for i in range(num):
        broken.add(CapsuleId(f"c{i}"), Promise(1, error=CapsulesFull(i, 1, 1)))
    known = [i for i in range(num) if broken.get(CapsuleId(f"c{i}"))]
    assert known == list(range(num - MAX_BROKEN, num))
