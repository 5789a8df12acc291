"""X4: the dispatcher over workers that die, hang, forget and leave, in stories written by hand."""

from collections.abc import Sequence
from itertools import cycle

import pytest
from msgspec.structs import replace

from mallee.protocol.errors import (
    CapsuleAbandoned,
    CapsuleLost,
    CapsulesFull,
    Overloaded,
    UnknownBranch,
    UnknownCapsule,
    WorkerLost,
)
from mallee.protocol.events import CapsuleStored
from mallee.protocol.hashing import NO_HASHES, as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Frame, Limits, Prefill, Sampling
from mallee.router.dispatch.effects import NotInjected
from mallee.router.dispatch.inboxes import Injection
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from mallee.router.dispatch.recovery.pending import MAX_BROKEN, BrokenPromises, Promise
from mallee.router.dispatch.recovery.quarantine import QUIET_S
from mallee.router.router import TAKEOVER_S
from support.model_fleet import Asked, ModelFleet, ModelWorker, Rules

PROMPT = as_tokens([i % 11 for i in range(21)])
HOT = Sampling(temperature=1.0, seed=3)
LONG = Limits(20, ignore_eos=True)
NO_SUFFIX = as_tokens(())


def fleet(workers: int = 2, **rules: object) -> ModelFleet:
    made = ModelFleet(Rules()._replace(**rules))
    for i in range(workers):
        made.join(f"w{i}")
    return made


def run(f: ModelFleet, *workers: ModelWorker, times: int = 1, tokens: Sequence[int] = (1,)) -> None:
    """Steps of these workers, or all, each heard of at once."""
    turns = cycle(tokens)
    for _ in range(times):
        for worker in workers or list(f.workers.values()):
            f.step(worker, lambda: next(turns))
            f.deliver(worker)


def ask(f: ModelFleet, name: str, n: int = 1, limits: Limits = LONG, **more: object) -> Asked:
    asked = f.submit(name, GenerateJob(PROMPT, limits, HOT, n, **more))
    assert asked is not None
    return asked


def capsule(f: ModelFleet, name: str = "c", ttl_s: float = 0.0) -> tuple[CapsuleId, ModelWorker]:
    """A requested capsule, and the worker that has it."""
    made = f.submit(name, PrefillJob(PROMPT, "", ttl_s))
    assert made is not None
    run(f)
    return made.capsules[0], f.workers[made.workers[0]]


def fork(f: ModelFleet, name: str, of: CapsuleId, num: int = 1, **more: object) -> Asked:
    asked = f.submit(name, ForkJob(of, [NO_SUFFIX] * num, LONG, HOT, **more))
    assert asked is not None, f.refusal
    return asked


def is_whole(*asked: Asked) -> bool:
    return all(set(each.ends.values()) <= {"stop", "length"} for each in asked)


def prefills(f: ModelFleet) -> list[Prefill]:
    """On their way to workers."""
    commands = [command for worker in f.workers.values() for command in worker.inbox]
    return [command for command in commands if isinstance(command, Prefill)]


def test_a_moved_branch_waits_no_longer_than_any_request() -> None:
    f = fleet(1, max_wait_s=30.0)
    asked = ask(f, "a", terms=QueueTerms(deadline_s=1.0))
    run(f, times=2)
    f.die(f.workers[WorkerId("w0")])
    f.wait(29.0)
    assert asked.open, "its own deadline was met when it was taken"
    f.wait(2.0)
    assert asked.ends == {0: "deadline_exceeded"}
    f.settle()


def test_a_branch_is_moved_a_bounded_number_of_times() -> None:
    f = fleet(2, max_moves=2)
    asked = ask(f, "a", n=2)
    for life in range(3):
        run(f, times=1)
        f.join(f"v{life}")
        f.die(f.workers[asked.workers[-1]])
        f.wait(QUIET_S)
    f.settle()
    assert set(asked.ends.values()) <= {"worker_lost", "length"}
    assert any(isinstance(error, WorkerLost) for error in asked.errors.values())


def test_several_workers_that_hang_are_probed_side_by_side() -> None:
    """They lose their requests and get none; each is back as soon as it answers, whatever others do."""
    f = fleet(3, max_rows=16)
    asked = [ask(f, f"a{i}") for i in range(6)]
    run(f, times=3)
    stuck = [f.workers[WorkerId(name)] for name in ("w0", "w1")]
    for worker in stuck:
        worker.is_hung = True
    f.wait(4.0)
    for worker in stuck:
        assert [c.request[:8] for c in worker.inbox if isinstance(c, Prefill)] == [
            f"probe-{worker.name}"
        ]
    asked += [ask(f, f"b{i}", limits=Limits(2, ignore_eos=True)) for i in range(2)]
    assert {each.workers[-1] for each in asked} == {"w2"}
    stuck[1].is_hung = False
    run(f, stuck[1])
    assert {view.worker for view in f.router.workers()} == {"w1", "w2"}
    f.settle()
    assert is_whole(*asked)


def test_the_only_worker_may_take_its_time() -> None:
    """However long: there is nowhere else to go, and what it computes is not computed twice."""
    f = fleet(1)
    asked = ask(f, "a")
    run(f, times=3)
    worker = f.workers[WorkerId("w0")]
    worker.is_hung = True
    f.wait(100.0)
    worker.is_hung = False
    f.settle()
    assert f.dispatcher.num_moved == 0
    assert is_whole(asked)


def test_a_lost_capsule_is_computed_once_for_all_that_waited_to_fork_it() -> None:
    """No worker had room when it was lost: it is computed for the first that is placed."""
    f = fleet(2, max_rows=2)
    kept, owner = capsule(f)
    (other,) = set(f.workers.values()) - {owner}
    busy = [ask(f, f"b{i}", 2) for i in range(2)]
    run(f)
    f.die(owner)
    forks = [fork(f, f"f{i}", kept) for i in range(3)]
    f.join("w7")
    f.settle()
    assert is_whole(*busy, *forks)
    assert f.dispatcher.num_rebuilt == 1
    assert sum(each.name in f.workers and kept in each.capsules for each in f.workers.values()) == 1
    assert other.name in f.workers


def test_forks_go_on_with_their_text_where_no_worker_may_keep_the_capsule() -> None:
    f = fleet(2, max_kept=1)
    kept, owner = capsule(f)
    (other,) = set(f.workers.values()) - {owner}
    other.max_kept = 0
    asked = fork(f, "f", kept, 3)
    run(f)
    f.die(owner)
    again = fork(f, "g", kept, 2, at=9)
    f.settle()
    assert is_whole(asked, again)


def test_a_fork_whose_text_is_not_known_ends_with_the_reason() -> None:
    f = fleet(2)
    kept, owner = capsule(f)
    asked = fork(f, "f", kept)
    run(f, times=2)
    f.memory.forget(kept)
    log = next(iter(f.dispatcher._shards.values())).log
    assert log is not None
    log._path = None  # as of a gateway that never knew it
    f.die(owner)
    assert asked.ends == {0: "capsule_lost"}
    assert isinstance(asked.errors[0], CapsuleLost)
    f.settle()


def test_a_fork_of_what_another_worker_will_have_from_disk_is_to_come_again() -> None:
    """X28, part: while its worker leaves, and until another one must have taken the disk over."""
    f = fleet(2)
    kept, owner = capsule(f)
    entry = f.router.capsule(kept)
    on_disk = CapsuleStored(kept, entry.boundary, b"", entry.scope, is_durable=True)
    f.router._fleet.capsules.apply(owner.name, on_disk, created=entry.created)
    f.memory.forget(kept)
    running = ask(f, "r", n=8)  # on both, which holds the leaving one
    f.drain(owner)
    codes = []
    for step in (lambda: f.die(owner), lambda: f.wait(TAKEOVER_S), lambda: None):
        assert f.submit(f"f{len(codes)}", ForkJob(kept, [NO_SUFFIX], LONG)) is None
        assert f.refusal is not None
        codes.append(f.refusal.code)
        step()
    assert codes == ["lookup_incomplete", "lookup_incomplete", "capsule_lost"]
    f.settle()
    assert is_whole(running)


def test_an_answer_with_a_hole_is_an_error() -> None:
    """Never an end mark after a loss: what is missing at a branch's end is found."""
    f = fleet(1)
    asked = ask(f, "a", limits=Limits(12, ignore_eos=True))
    worker = f.workers[WorkerId("w0")]
    for _ in range(40):
        f.step(worker)
    ends = [frame for frame in worker.outbox if frame.updates[0].finish is not None]
    worker.outbox[:] = [frame for frame in worker.outbox if frame is not ends[0]][:2] + ends
    f.deliver(worker)
    assert asked.ends == {0: "worker_lost"}
    f.settle()


def test_only_the_tokens_that_are_new_count() -> None:
    """Frames that were merged for a gateway that did not read may begin before the ones it has."""
    f = fleet(1)
    asked = ask(f, "a")
    worker = f.workers[WorkerId("w0")]
    run(f, times=2)
    for _ in range(2):
        f.step(worker)
    first, second = (frame.updates[0] for frame in worker.outbox)
    merged = replace(first, tokens=(*asked.got[0], *first.tokens, *second.tokens), position=0)
    worker.outbox[:] = [Frame(worker.num_steps, (merged,))]
    f.deliver(worker)
    assert len(asked.got[0]) == 4
    f.settle()
    assert is_whole(asked)


def test_a_hole_in_mid_answer_ends_the_branch_at_once() -> None:
    f = fleet(1)
    asked = ask(f, "a", n=2)
    worker = f.workers[WorkerId("w0")]
    run(f, times=2)
    for _ in range(2):
        f.step(worker)
    lost = worker.outbox[0]
    worker.outbox[0] = Frame(lost.step, lost.updates[1:])
    f.deliver(worker)
    assert asked.ends == {0: "worker_lost"}
    assert "2 of 3 tokens arrived" in str(asked.errors[0])
    f.step(worker)
    assert list(worker.rows["a"]) == [1], "nobody reads it"
    f.settle()
    assert asked.ends[1] in ("stop", "length")


@pytest.mark.parametrize("cancelled", [None, 1])
def test_a_branch_that_ends_before_its_cancel_arrives_leaves_no_capsule(
    cancelled: int | None,
) -> None:
    """K28, part: nobody has its id. What was told before the cancel stays."""
    f = fleet(1)
    asked = ask(f, "a", n=3, limits=Limits(2, ignore_eos=True))
    (worker,) = f.workers.values()
    f.step(worker, lambda: 1)
    f.deliver(worker)
    f.step(worker, lambda: 1)
    assert len(worker.capsules) == 3, "each branch has ended"
    f.cancel(RequestId("a"), cancelled)
    f.settle()
    told = set(asked.capsules.values())
    assert len(told) == (0 if cancelled is None else 2)
    assert worker.capsules.keys() == told


def test_tokens_for_a_branch_that_ends_before_they_come_are_told_to_be_left_out() -> None:
    """F22, part: and a branch that is over takes none."""
    f = fleet(1)
    request, injection = RequestId("a"), Injection(RequestId("i"), as_tokens([5]), replaces=False)
    ask(f, "a", limits=Limits(1, ignore_eos=True))
    (worker,) = f.workers.values()
    f.step(worker)
    f.dispatcher.inject(request, 0, injection)
    for frame in worker.outbox:
        f.dispatcher.on_frame(worker.name, frame.step, frame.updates)
    left_out = [each for each in f.dispatcher.effects() if isinstance(each, NotInjected)]
    assert [(each.name, type(each.error)) for each in left_out] == [("i", UnknownBranch)]
    with pytest.raises(UnknownBranch):
        f.dispatcher.inject(request, 0, injection)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_capsule_that_is_released_while_it_is_made_again_is_left_nowhere(is_made: bool) -> None:
    """K28, part: also if its new worker had made it before it heard of that."""
    f = fleet(2)
    kept, leaving = capsule(f)
    (other,) = [worker for worker in f.workers.values() if worker is not leaving]
    f.drain(leaving)
    assert f.dispatcher.is_rebuilding
    assert f.dispatcher.num_running == 0, "no client asked for that"
    if is_made:
        f.step(other)
        assert kept in other.capsules
    f.router.forget_capsule(kept)
    f.memory.forget(kept)
    f.dispatcher.forget_capsule(kept)
    f.carry_out()
    assert not f.dispatcher.is_rebuilding
    assert leaving.name not in f.workers, "it has left"
    f.settle()
    assert kept not in other.capsules
    with pytest.raises(UnknownCapsule):
        f.router.capsule(kept)


def test_a_worker_that_comes_back_and_drains_again_waits_for_what_is_under_way() -> None:
    """Its durable capsule is made again once, by the request of its first drain, and it leaves then."""
    f = fleet(2)
    kept, leaving = capsule(f)
    (other,) = [worker for worker in f.workers.values() if worker is not leaving]
    other.is_hung = True
    f.drain(leaving)
    f.die(leaving)
    again = f.join(leaving.name)
    again.capsules[kept] = leaving.capsules[kept]
    f.router.learn_capsule(kept, again.name, len(PROMPT), NO_HASHES, "")
    f.drain(again)
    assert f.dispatcher.num_rebuilt == 1
    assert again.name in f.workers
    other.is_hung = False
    f.settle()
    assert again.name not in f.workers, "it has left"
    assert f.router.capsule(kept).worker == other.name
    assert not f.dispatcher.is_rebuilding


def test_a_gateway_that_closes_makes_no_more_capsules_again() -> None:
    f = fleet(1)
    for i in range(6):
        capsule(f, f"c{i}")
    f.join("w1")
    f.drain(f.workers[WorkerId("w0")])
    assert f.dispatcher.is_rebuilding
    f.dispatcher.close(WorkerLost("g", "it closes"))
    f.carry_out()
    assert not f.dispatcher.is_rebuilding
    assert not set(f.dispatcher._rebuilds)


def under_way_again(workers: int = 2, **rules: object) -> tuple[ModelFleet, CapsuleId, Asked]:
    """A capsule whose worker is gone; a first fork has it computed again, on a worker that hangs."""
    f = fleet(workers, max_rows=8, **rules)
    kept, owner = capsule(f)
    f.die(owner)
    for worker in f.workers.values():
        worker.is_hung = True
    return f, kept, fork(f, "first", kept)


def test_a_fork_waits_for_its_capsule_no_longer_than_it_may() -> None:
    """Its own deadline, and the time that any request may wait."""
    f, kept, first = under_way_again(max_wait_s=20.0)
    soon = fork(f, "soon", kept, 2, terms=QueueTerms(deadline_s=1.0))
    held = fork(f, "held", kept)
    f.wait(1.1)
    assert soon.ends == {0: "deadline_exceeded", 1: "deadline_exceeded"}
    assert "capsule 'c.0', lost with its worker, was not there again in 1.0 s" in str(
        soon.errors[0]
    )
    assert soon.errors[0].fields["is_own"]
    f.wait(18.0)
    assert held.open
    f.wait(2.0)
    assert held.ends == {0: "deadline_exceeded"}
    f.settle()
    assert is_whole(first)


def test_as_many_forks_wait_for_a_capsule_as_requests_for_a_worker() -> None:
    """It is computed once for all of them."""
    f, kept, first = under_way_again(max_waiting=2)
    held = [fork(f, f"held{i}", kept) for i in range(2)]
    assert f.submit("more", ForkJob(kept, [NO_SUFFIX], LONG, HOT)) is None
    assert isinstance(f.refusal, Overloaded)
    assert [command.capsule for command in prefills(f)] == [kept]
    f.settle()
    assert is_whole(first, *held)
    assert f.dispatcher.num_rebuilt == 1


def test_a_fork_that_waited_for_its_capsule_goes_on_waiting_for_room_in_the_same_time() -> None:
    f, kept, first = under_way_again(max_waiting=1)
    (worker,) = f.workers.values()
    held = fork(f, "held", kept, 8, terms=QueueTerms(deadline_s=5.0))
    f.wait(2.0)
    worker.is_hung = False
    run(f, worker)
    assert held.open == set(range(8))
    assert not held.workers, "seven rows are free"
    worker.is_hung = True
    f.wait(2.5)
    assert held.open
    f.wait(1.0)
    assert set(held.ends.values()) == {"deadline_exceeded"}
    assert "no worker took the request in 5.0 s" in str(held.errors[0])
    f.settle()
    assert is_whole(first)


def copies(f: ModelFleet) -> list[Prefill]:
    """The commands so far that make a capsule from others' KV."""
    return [each for each in f.commands if isinstance(each, Prefill) and each.holders]


def test_a_fork_of_an_answer_on_a_worker_that_drains_pulls_its_capsule() -> None:
    """X6, part: it is made again under its own id, from the worker that still has it."""
    f = fleet(2, lends=True)
    first = ask(f, "a")
    f.settle()
    answer, owner = first.capsules[0], f.workers[first.workers[0]]
    running = fork(f, "b", answer)  # so that it stays for a while
    f.drain(owner)
    asked = fork(f, "f", answer)
    (command,) = copies(f)
    assert (command.capsule, command.replaceable) == (answer, True)
    assert [each.capsule for each in command.holders] == [answer]
    assert f.router.stats().pulls == {"rebuild": 1}
    f.settle()
    assert is_whole(running, asked)


def test_a_fork_of_part_of_a_capsule_pulls_its_blocks() -> None:
    """X6, part: no capsule has that text; its first blocks are the same."""
    f = fleet(3, lends=True)
    hot, _ = capsule(f)
    asked = fork(f, "f", hot, 12, at=13)
    for command in copies(f):
        assert [(each.capsule, each.num_tokens) for each in command.holders] == [("", 13)]
    assert copies(f)
    f.settle()
    assert is_whole(asked)


# S6, part: capsules that are forked before they are made

CHUNK = 2


def promised(f: ModelFleet, name: str = "p") -> tuple[CapsuleId, Asked]:
    makes = capsule_id(RequestId(name))
    asked = f.submit(name, PrefillJob(PROMPT[:20], makes=makes))
    assert asked is not None, f.refusal
    return makes, asked


def fill(f: ModelFleet) -> list[Asked]:
    """Leave no room on any worker."""
    made = [ask(f, f"full{i}") for i in range(len(f.workers) * f.rules.max_rows)]
    assert all(each.workers for each in made)
    return made


@pytest.mark.parametrize("is_closed", [False, True])
def test_forks_are_held_while_the_prefill_waits_for_a_worker(is_closed: bool) -> None:
    """S6, part: they are placed with it, or end with it when the gateway does."""
    f = fleet(1, chunk=CHUNK, max_rows=2)
    fill(f)
    made, prefill = promised(f)
    forked = fork(f, "f", made, at=3)
    assert f.dispatcher.promise(made) == Promise(20, None, f.now)
    assert not prefill.workers
    assert not forked.workers
    if is_closed:
        f.dispatcher.close(CapsuleAbandoned("x"))
        f.carry_out()
        assert prefill.is_over
        assert forked.is_over
    else:
        f.settle()
        assert forked.ends == {0: "length"}


def test_what_waits_for_a_prefill_that_is_given_up_ends() -> None:
    """S6, part: whether its prefill had a worker or not; its id is unknown then."""
    for is_placed in (True, False):
        f = fleet(1, chunk=CHUNK, max_rows=4)
        others = [] if is_placed else fill(f)
        made, _ = promised(f)
        forked = fork(f, "f", made)
        f.cancel(RequestId("p"), None)
        f.settle()
        assert isinstance(forked.errors[0], CapsuleAbandoned)
        assert f.dispatcher.promise(made) is None
        assert f.submit("g", ForkJob(made, [NO_SUFFIX], Limits(3))) is None
        assert isinstance(f.refusal, UnknownCapsule)
        assert all(each.is_over for each in others)
        assert not any(worker.capsules.get(made) for worker in f.workers.values())


def test_forks_wait_for_a_prefill_on_a_worker_that_drains() -> None:
    """S6, part: it takes nothing new, and what it computes is made again elsewhere for them."""
    f = fleet(2, chunk=CHUNK)
    made, prefill = promised(f)
    leaving = f.workers[prefill.workers[0]]
    run(f, times=1)
    f.drain(leaving)
    forked = fork(f, "f", made, at=5)
    assert not forked.workers
    f.settle()
    assert prefill.ends == {0: "stop"}
    assert forked.ends == {0: "length"}
    assert leaving.name not in forked.workers


@pytest.mark.parametrize("num", [MAX_BROKEN, MAX_BROKEN + 3])
def test_as_many_causes_are_remembered_as_may_be(num: int) -> None:
    broken = BrokenPromises()
    for i in range(num):
        broken.add(CapsuleId(f"c{i}"), Promise(1, error=CapsulesFull(i, 1, 1)))
    known = [i for i in range(num) if broken.get(CapsuleId(f"c{i}"))]
    assert known == list(range(num - MAX_BROKEN, num))
