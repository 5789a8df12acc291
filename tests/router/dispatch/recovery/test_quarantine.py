"""X4: requests that may kill workers are tried one by one, and refused after the second death."""

from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import MalleeError, PoisonRequest
from mallee.protocol.events import Lease
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import Incarnation, RequestId, WorkerId
from mallee.protocol.messages import Limits, Update
from mallee.router.config import RouterConfig
from mallee.router.dispatch.dispatcher import DispatchConfig, Dispatcher
from mallee.router.dispatch.effects import Failed, Placed
from mallee.router.dispatch.jobs import GenerateJob
from mallee.router.dispatch.recovery.quarantine import QUIET_S
from mallee.router.dispatch.texts import TokenTexts
from mallee.router.dispatch.token_memory import TokenMemory
from mallee.router.router import Router

LIFE = Incarnation(1)


def lease(name: WorkerId) -> Lease:
    return Lease(name, LIFE, name, "mock", "mock", RouterConfig().block_size, 100, 8, 1000, 0)


class Desk:
    """A dispatcher over workers that are only leases."""

    def __init__(self, num_workers: int) -> None:
        self.now = 0.0
        routing = RouterConfig(policy="round_robin", lease_s=1e9)
        self.router = Router(routing, clock=lambda: self.now)
        self.dispatcher = Dispatcher(
            self.router,
            TokenTexts(TokenMemory(0), mock_spec(), routing.block_size),
            DispatchConfig(recheck_s=None),
            clock=lambda: self.now,
        )
        for i in range(num_workers):
            name = WorkerId(f"w{i}")
            self.router.on_lease(lease(name))
            self.dispatcher.on_join(name, LIFE)
        self.where: dict[str, WorkerId] = {}  # by request
        self.errors: dict[str, MalleeError] = {}

    def ask(self, *names: str) -> None:
        for name in names:
            self.dispatcher.submit(RequestId(name), GenerateJob(as_tokens([1, 2]), Limits(9)))
        self.carry_out()

    def lose(self, *workers: WorkerId) -> None:
        for worker in workers:
            self.router.lose_worker(worker, LIFE)
            self.dispatcher.on_lost(worker, "it died")
        self.carry_out()

    def answer(self, name: str) -> None:
        """Its worker draws a first token."""
        (shard,) = self.dispatcher._requests[RequestId(name)].shards.values()
        self.dispatcher.on_updates(shard.worker, [Update(shard.name, 0, (7,), prefill_tokens=2)])
        self.carry_out()

    def wait(self) -> None:
        at = self.dispatcher.next_time()
        assert at is not None
        self.now = max(self.now, at)
        self.dispatcher.on_time()
        self.carry_out()

    def carry_out(self) -> None:
        self.dispatcher.check()
        for effect in self.dispatcher.effects():
            if isinstance(effect, Placed):
                self.where[effect.request] = effect.placement.worker
            elif isinstance(effect, Failed):
                self.errors[effect.request] = effect.error


def test_a_request_that_killed_two_workers_is_refused_and_the_others_go_on() -> None:
    desk = Desk(3)
    desk.ask("a", "b", "c", "d")
    assert desk.where["a"] == desk.where["d"] == "w0"
    desk.answer("b")
    desk.lose(desk.where["a"])
    assert desk.where["a"] == "w0", "nothing is tried right after a death"
    desk.wait()
    assert desk.now == QUIET_S
    killed = desk.where["a"]
    assert killed != "w0"
    assert desk.where["d"] == "w0", "one at a time"
    desk.lose(killed)
    assert isinstance(desk.errors.pop("a"), PoisonRequest)
    desk.wait()
    assert desk.where["d"] not in ("w0", killed)
    assert not desk.errors


def test_a_suspect_that_draws_a_token_lets_the_next_one_go() -> None:
    desk = Desk(2)
    desk.ask("a", "b", "c", "d")
    desk.lose(WorkerId("w0"))
    desk.wait()
    assert (desk.where["a"], desk.where["c"]) == ("w1", "w0")
    desk.answer("a")
    assert desk.where["c"] == "w1"


def test_what_several_workers_left_is_tried_side_by_side() -> None:
    desk = Desk(6)
    desk.ask(*"abcdefghijkl")
    for name in "cdefijkl":
        desk.answer(name)
    desk.lose(WorkerId("w0"), WorkerId("w1"))
    desk.wait()
    tried = {name: desk.where[name] for name in "ab"}
    assert not {"w0", "w1"} & set(tried.values())
    assert (desk.where["g"], desk.where["h"]) == ("w0", "w1"), "one of each worker's"
    desk.answer("b")
    assert desk.where["g"] == "w0"
    assert desk.where["h"] != "w1"


def test_of_several_that_are_tried_on_one_worker_none_is_convicted() -> None:
    desk = Desk(3)
    desk.ask(*"abcdef")
    desk.answer("c")
    desk.answer("f")
    desk.lose(WorkerId("w0"), WorkerId("w1"))
    desk.wait()
    assert desk.where["a"] == desk.where["b"] == "w2"
    desk.router.on_lease(lease(WorkerId("w3")))
    desk.dispatcher.on_join(WorkerId("w3"), LIFE)
    desk.lose(WorkerId("w2"))
    assert not desk.errors
    desk.wait()
    left = [name for name in "ab" if desk.where[name] == "w3"]
    assert len(left) == 1, "now one by one"


def test_workers_that_die_together_died_of_no_request() -> None:
    """Their node is lost: whatever ran there, once or twice, goes on elsewhere."""
    desk = Desk(4)
    desk.ask(*"abcdefgh")
    desk.lose(*(WorkerId(f"w{i}") for i in range(3)))
    desk.wait()
    for name in "aebfcg":
        assert desk.where[name] == "w3"
        desk.answer(name)
    assert set(desk.where.values()) == {"w3"}
    assert not desk.errors
