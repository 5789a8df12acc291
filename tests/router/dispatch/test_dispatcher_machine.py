"""X4; X6, part: any requests, any faults, in any order, with workers that lend each other KV or not.

What is delivered is the undisturbed answer, or an error.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from mallee.protocol.hashing import as_tokens
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId, capsule_id
from mallee.protocol.messages import Frame, Limits, Sampling
from mallee.router.dispatch.jobs import ForkJob, GenerateJob, PrefillJob, QueueTerms
from support.examples import examples
from support.model_fleet import STOP, ModelFleet, ModelWorker, Rules

NAMES = ("w0", "w1", "w2")
# Ends that a client may see besides "stop" and "length", after faults or beyond limits.
ERRORS = {
    *("worker_lost", "poison_request", "deadline_exceeded", "no_worker", "capsule_not_found"),
    *("capsule_lost", "capsule_abandoned", "capsules_full", "overloaded"),
}
picks = st.integers(0, 1000)
prompts = st.tuples(st.integers(0, 2), st.integers(1, 13))
limits = st.builds(
    Limits,
    st.integers(1, 12),
    st.sampled_from([(), (STOP,), (STOP, 8, 9)]),
    st.just(True),
    st.integers(0, 2),
)
samplings = st.builds(Sampling, st.sampled_from([0.0, 1.0]), seed=st.integers(0, 5))
terms = st.builds(
    QueueTerms,
    st.sampled_from(["a", "b"]),
    st.integers(0, 2),
    st.sampled_from([None, None, None, 0.5]),
    st.just(""),
    st.just(1.0),
)
splits = st.lists(st.integers(0, 3), min_size=1, max_size=5)


class DispatcherMachine(RuleBasedStateMachine):
    """One gateway's requests over a fleet where everything goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0
        self.late: list[tuple[str, Frame]] = []
        self.told: list[tuple[ModelWorker, Frame]] = []

    @initialize(
        workers=st.integers(1, 3),
        rows=st.integers(1, 5),
        kept=st.integers(1, 5),
        moves=st.sampled_from([2, 16]),
        lends=st.booleans(),
        chunk=st.sampled_from([0, 2]),
    )
    def begin(
        self, workers: int, rows: int, kept: int, moves: int, lends: bool, chunk: int
    ) -> None:
        """A capsule of a prefill and one of an answer are there."""
        rules = Rules(max_rows=rows, max_kept=kept, max_waiting=12, max_moves=moves, lends=lends)
        rules = rules._replace(chunk=chunk)
        self.fleet = ModelFleet(rules)
        for name in NAMES[:workers]:
            self.fleet.join(name)
        self.fleet.submit(self.name(), PrefillJob(as_tokens(range(9))))
        self.fleet.submit(self.name(), GenerateJob(as_tokens(range(6)), Limits(5)))
        self.fleet.settle()

    def worker(self, pick: int) -> ModelWorker | None:
        here = list(self.fleet.workers.values())
        return here[pick % len(here)] if here else None

    def name(self) -> str:
        self.num_asked += 1
        return f"r{self.num_asked}"

    # Requests

    @rule(prompt=prompts, limits=limits, sampling=samplings, n=st.integers(1, 6), terms=terms)
    def generate(
        self, prompt: tuple[int, int], limits: Limits, sampling: Sampling, n: int, terms: QueueTerms
    ) -> None:
        first, length = prompt
        tokens = as_tokens([(first + i) % 11 for i in range(length)])
        self.fleet.submit(self.name(), GenerateJob(tokens, limits, sampling, n, terms=terms))

    @rule(prompt=prompts, ttl_s=st.sampled_from([0.0, 5.0]), terms=terms)
    def prefill(self, prompt: tuple[int, int], ttl_s: float, terms: QueueTerms) -> None:
        first, length = prompt
        tokens = as_tokens([(first + i) % 11 for i in range(length)])
        self.fleet.submit(self.name(), PrefillJob(tokens, "", ttl_s, terms))

    @rule(prompt=prompts, ttl_s=st.sampled_from([0.0, 5.0]), terms=terms)
    def promise(self, prompt: tuple[int, int], ttl_s: float, terms: QueueTerms) -> None:
        """S6, part: its capsule can be forked from now on."""
        first, length = prompt
        tokens, name = as_tokens([(first + i) % 11 for i in range(length)]), self.name()
        makes = capsule_id(RequestId(name))
        self.fleet.submit(name, PrefillJob(tokens, "", ttl_s, terms, makes=makes))

    @precondition(lambda self: self.fleet.texts)
    @rule(
        pick=picks,
        suffixes=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        cut=st.one_of(st.none(), st.integers(0, 5)),
        limits=limits,
        sampling=samplings,
        terms=terms,
    )
    def fork(
        self,
        pick: int,
        suffixes: list[int],
        cut: int | None,
        limits: Limits,
        sampling: Sampling,
        terms: QueueTerms,
    ) -> None:
        capsules = sorted(self.fleet.texts)
        capsule = capsules[pick % len(capsules)]
        at = None if cut is None else max(1, len(self.fleet.texts[capsule]) - cut)
        texts = [as_tokens([20 + i] * i) for i in suffixes]
        self.fleet.submit(self.name(), ForkJob(capsule, texts, limits, sampling, terms, at=at))

    @precondition(lambda self: self.fleet.asked)
    @rule(pick=picks, branch=st.one_of(st.none(), st.integers(0, 5)))
    def cancel(self, pick: int, branch: int | None) -> None:
        names = list(self.fleet.asked)
        self.fleet.cancel(RequestId(names[-1 - pick % min(8, len(names))]), branch)

    # Workers

    @rule(pick=picks, split=splits, times=st.integers(1, 4))
    def step(self, pick: int, split: list[int], times: int) -> None:
        if (worker := self.worker(pick)) is not None:
            turns = iter(split * 1000)
            for _ in range(times):
                self.fleet.step(worker, lambda: next(turns))

    @rule(pick=picks, num=st.integers(1, 4))
    def deliver(self, pick: int, num: int) -> None:
        if (worker := self.worker(pick)) is not None:
            self.told += [(worker, frame) for frame in worker.outbox[:num]]
            self.fleet.deliver(worker, num)

    @rule(pick=picks)
    def run(self, pick: int) -> None:
        if (worker := self.worker(pick)) is not None:
            self.fleet.step(worker)
            self.fleet.deliver(worker)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.fleet.workers:
            self.fleet.join(name)

    @rule(pick=picks)
    def die(self, pick: int) -> None:
        if (worker := self.worker(pick)) is not None:
            self.late += [(worker.name, frame) for frame in worker.outbox]
            self.fleet.die(worker)

    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        worker = self.worker(pick)
        if worker is not None and worker.name not in self.fleet.leaving:
            self.fleet.drain(worker)

    @rule(pick=picks)
    def hang(self, pick: int) -> None:
        if (worker := self.worker(pick)) is not None:
            worker.is_hung = not worker.is_hung

    @rule(pick=picks)
    def stop(self, pick: int) -> None:
        if (worker := self.worker(pick)) is not None:
            worker.is_stopped = not worker.is_stopped

    @rule(pick=picks, capsule=picks, is_told=st.booleans())
    def evict(self, pick: int, capsule: int, is_told: bool) -> None:
        worker = self.worker(pick)
        if worker is not None and worker.capsules:
            names = sorted(worker.capsules)
            self.fleet.evict(worker, CapsuleId(names[capsule % len(names)]), is_told=is_told)

    @precondition(lambda self: self.late)
    @rule(pick=picks)
    def late_frame(self, pick: int) -> None:
        """Of a life that is over, or what a worker had said before its requests were moved."""
        name, frame = self.late[pick % len(self.late)]
        self.fleet.hear(WorkerId(name), frame)

    @precondition(lambda self: self.told)
    @rule(pick=picks)
    def tell_again(self, pick: int) -> None:
        """A frame is delivered twice."""
        worker, frame = self.told[-1 - pick % min(8, len(self.told))]
        if self.fleet.workers.get(worker.name) is worker:
            self.fleet.hear(worker.name, frame)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.6, 2.0, 4.0, 35.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.wait(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.fleet.settle()
        for asked in self.fleet.asked.values():
            assert set(asked.ends.values()) <= {"stop", "length", *ERRORS}, asked.errors


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(examples(60), stateful_step_count=60, deadline=None)
