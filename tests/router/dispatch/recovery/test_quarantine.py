"""X4: requests that may kill workers are tried one by one, and refused after the second death."""

from mallee.protocol.errors import PoisonRequest
from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import RequestId, WorkerId
from mallee.protocol.messages import Limits
from mallee.router.dispatch.jobs import GenerateJob
from mallee.router.dispatch.recovery.quarantine import QUIET_S
from support.model_fleet import Asked, ModelFleet, Rules


class Desk(ModelFleet):
    """A fleet whose requests have nothing in common, so that they take turns at its workers."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(Rules(max_rows=8))
        for i in range(num_workers):
            self.join(f"w{i}")

    def ask(self, *names: str) -> dict[str, Asked]:
        job = GenerateJob(as_tokens([1, 2]), Limits(9, ignore_eos=True))
        made = {name: self.submit(name, job) for name in names}
        return {name: asked for name, asked in made.items() if asked is not None}

    def where(self, name: str) -> WorkerId:
        return self.asked[RequestId(name)].workers[-1]

    def lose(self, *workers: str) -> None:
        for worker in workers:
            self.die(self.workers[WorkerId(worker)])

    def answer(self, name: str) -> None:
        """Its worker draws a token for all that it has."""
        worker = self.workers[self.where(name)]
        self.step(worker)
        self.deliver(worker)

    @property
    def has_failed(self) -> bool:
        return any(asked.errors for asked in self.asked.values())


def test_a_request_that_killed_two_workers_is_refused_and_the_others_go_on() -> None:
    desk = Desk(3)
    asked = desk.ask("a", "b", "c", "d")
    assert desk.where("a") == desk.where("d") == "w0"
    desk.answer("b")
    desk.lose("w0")
    assert desk.where("a") == "w0", "nothing is tried right after a death"
    desk.wait(QUIET_S)
    killed = desk.where("a")
    assert killed != "w0"
    assert desk.where("d") == "w0", "one at a time"
    desk.lose(killed)
    assert isinstance(asked["a"].errors[0], PoisonRequest)
    desk.wait(QUIET_S)
    assert desk.where("d") not in ("w0", killed)
    assert not any(asked[name].errors for name in "bcd")


def test_what_several_workers_left_is_tried_side_by_side() -> None:
    desk = Desk(6)
    desk.ask(*"abcdefghijkl")
    for name in "cdef":
        desk.answer(name)
    desk.lose("w0", "w1")
    desk.wait(QUIET_S)
    assert not {"w0", "w1"} & {desk.where("a"), desk.where("b")}
    assert desk.where("a") != desk.where("b")
    assert (desk.where("g"), desk.where("h")) == ("w0", "w1"), "one of each worker's"
    desk.answer("b")
    assert desk.where("g") == "w0"
    assert desk.where("h") != "w1"


def test_of_several_that_are_tried_on_one_worker_none_is_convicted() -> None:
    desk = Desk(3)
    desk.ask(*"abcdef")
    desk.answer("c")
    desk.lose("w0", "w1")
    desk.wait(QUIET_S)
    assert desk.where("a") == desk.where("b") == "w2"
    desk.join("w3")
    desk.lose("w2")
    assert not desk.has_failed
    desk.wait(QUIET_S)
    assert len([name for name in "ab" if desk.where(name) == "w3"]) == 1, "now one by one"


def test_workers_that_die_together_died_of_no_request() -> None:
    """Their node is lost: whatever ran there, once or twice, goes on elsewhere."""
    desk = Desk(4)
    asked = desk.ask(*"abcdefgh")
    desk.lose("w0", "w1", "w2")
    for _ in range(6):
        desk.wait(QUIET_S)
        desk.answer("d")
    assert {desk.where(name) for name in asked} == {"w3"}
    assert not desk.has_failed
