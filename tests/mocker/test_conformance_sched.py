"""Plans and preemptions, step by step, against models that keep plain lists.

The scheduler under a mocked pass is the very class that real workers run, so what holds here holds there.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.forward import MockForward, linear_tokens
from bench.mocker.policies import Fcfs, make_order
from mallee.mocker.passes import mock_spec
from mallee.protocol.events import Removed, Stored, unpack_hashes
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import Generate, Limits, Sampling, Update, pack_tokens
from mallee.worker.engine import Engine
from mallee.worker.forward import ForwardBatch, Logits
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig
from support.examples import examples

SIZE = 4
GREEDY = Sampling()
Step = list[tuple[int, int]]
"""Work of one step: (request, tokens of its prompt; 0 for a decode), in order."""


class Recorder:
    """A pass over content that notes which rows it was given: (number of tokens, start)."""

    def __init__(self, num_blocks: int) -> None:
        self.inner = MockForward(mock_spec(), num_blocks=num_blocks, block_size=SIZE)
        self.rows: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: ForwardBatch) -> Any:
        self.rows = [(len(row.tokens), row.start) for row in batch.rows]
        logits: list[Logits] = list(self.inner.forward(batch))
        return logits


def make_engine(num_blocks: int, **sched: Any) -> tuple[Engine, Recorder]:
    forward = Recorder(num_blocks)
    config = EngineConfig(SchedulerConfig(**sched), max_answer_capsules=0)
    engine = Engine(
        forward, config=config, clock=lambda: 0.0, worker=WorkerId("w0"), incarnation=Incarnation(1)
    )
    return engine, forward


@dataclass
class Asked:
    """A request in the list model."""

    number: int
    prompt_left: int
    tokens_left: int


class ListScheduler:
    """First come, first served, with room for all: decodes first, then prompts in chunks."""

    def __init__(self, max_tokens: int, max_rows: int, max_chunks: int | None) -> None:
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self.max_chunks = max_chunks or max_rows
        self.live: list[Asked] = []

    def step(self) -> Step:
        tokens, rows, chunks = self.max_tokens, self.max_rows, self.max_chunks
        done: Step = []
        drew: list[Asked] = []
        for asked in self.live:
            if not asked.prompt_left and rows and tokens:
                done.append((asked.number, 0))
                drew.append(asked)
                tokens, rows = tokens - 1, rows - 1
        for asked in self.live:
            if asked.prompt_left and rows and tokens and chunks:
                n = min(asked.prompt_left, tokens)
                done.append((asked.number, n))
                tokens, rows, chunks = tokens - n, rows - 1, chunks - 1
                asked.prompt_left -= n
                if not asked.prompt_left:
                    drew.append(asked)
        for asked in drew:
            asked.tokens_left -= 1
        self.live = [asked for asked in self.live if asked.tokens_left]
        return done


@examples(80)
@given(st.data())
def test_each_step_computes_what_a_list_of_requests_would(data: Any) -> None:
    """K17: waiting, prefill and decode queues; token budget, rows, chunks of prompts."""
    max_tokens, max_rows = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    max_chunks = data.draw(st.sampled_from([None, 1, 2]))
    engine, forward = make_engine(
        4096,
        max_step_tokens=max_tokens,
        max_rows=max_rows,
        max_chunks=max_chunks,
        order=Fcfs(),
        ageing_steps=0,
        gang=False,
    )
    model = ListScheduler(max_tokens, max_rows, max_chunks)
    arrivals = data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(1, 9)), max_size=10)
    )
    at: dict[int, int] = {}  # where the next row of a request starts
    for number, (gap, prompt, outputs) in enumerate(arrivals):
        for _ in range(gap):
            check_step(engine, forward, model, at)
        tokens = [(number + i) % 64 for i in range(prompt)]
        tokens[0] = number  # no two prompts begin alike: nothing is shared
        limits = Limits(outputs, ignore_eos=True)
        engine.submit(Generate(f"{number}", pack_tokens(tokens), limits), "g")
        model.live.append(Asked(number, prompt, outputs))
        at[number] = 0
    while model.live:
        check_step(engine, forward, model, at)
    engine.step()  # nothing is left but the news of it
    assert not engine.has_work
    engine.check()


def check_step(engine: Engine, forward: Recorder, model: ListScheduler, at: dict[int, int]) -> None:
    """One step of both: the same rows, in the same order."""
    expected = []
    for number, n in model.step():
        expected.append((n or 1, at[number]))
        at[number] += n or 1
    forward.rows = []
    if engine.has_work:
        engine.step()
    assert forward.rows == expected
    assert sum(n for n, _ in expected) <= model.max_tokens


REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 14), st.integers(1, 16)),
    min_size=2,
    max_size=9,
)


@examples(60)
@given(REQUESTS, st.integers(9, 16), st.sampled_from([0.0, 0.15]))
def test_the_oldest_decode_gives_way_and_draws_what_it_would_have(
    requests: list[tuple[int, int, int, int]], num_blocks: int, watermark: float
) -> None:
    """K18: victims are queued again: every answer is as if it had been alone; events tell its blocks."""
    engine, _ = make_engine(
        num_blocks,
        max_step_tokens=12,
        max_rows=6,
        order=make_order("fcfs", "oldest_decode"),
        watermark=watermark,
    )
    prompts = {}
    answers: dict[str, list[Update]] = {}
    stream = Stream(engine)
    for number, (gap, family, prompt, outputs) in enumerate(requests):
        for _ in range(gap):
            stream.step(answers)
        tokens = [family] * prompt
        prompts[f"{number}"] = (tokens, outputs)
        limits = Limits(outputs, ignore_eos=True)
        engine.submit(Generate(f"{number}", pack_tokens(tokens), limits), "g")
    while engine.has_work:
        stream.step(answers)
    for name, (tokens, outputs) in prompts.items():
        drawn = [token for update in answers[name] for token in update.tokens]
        expected = linear_tokens(mock_spec(), tokens, outputs, sampling=GREEDY, seed=0)
        assert drawn == expected
        stream.knows(tokens + drawn)
    stream.check()


class Stream:
    """The events of one engine, block by block."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parents: dict[int, int | None] = {}
        self.events: list[tuple[bool, int]] = []

    def step(self, answers: dict[str, list[Update]]) -> None:
        result = self.engine.step()
        self.engine.check()
        for frame in result.frames.values():
            for update in frame.updates:
                answers.setdefault(update.request, []).append(update)
        for event in result.events.events if result.events else ():
            assert isinstance(event, Stored | Removed)
            is_stored = isinstance(event, Stored)
            self.events += [(is_stored, h) for h in unpack_hashes(event.hashes).tolist()]

    def knows(self, text: list[int]) -> None:
        """Blocks of `text`, each after the one before it."""
        salt = mock_spec().salt("")
        before: int | None = None
        for value in block_hashes(text, SIZE, salt=salt).tolist():
            self.parents[value] = before
            before = value

    def check(self) -> None:
        """After every single event whoever listens knows whole prefixes, and at the end the truth."""
        known: set[int] = set()
        for is_stored, value in self.events:
            assert is_stored is (value not in known), "told twice"
            if is_stored:
                parent = self.parents[value]
                assert parent is None or parent in known, "a block before its parent"
                known.add(value)
            else:
                known.remove(value)
                orphans = [b for b in known if self.parents[b] == value]
                assert not orphans, "a block went before those that follow it"
        assert known == set(unpack_hashes(self.engine.snapshot().hashes).tolist())


def test_admission_stops_at_the_watermark_to_the_block() -> None:
    """K17: of a pool of 20 with a watermark of a fifth 4 blocks stay free for those that run."""
    # a has 4 blocks and takes a fifth; of the other 15 b needs its own, one to draw into, and leaves 4.
    for prompt, is_admitted in ((10 * SIZE, True), (10 * SIZE + 1, False)):
        engine, _ = make_engine(20, max_step_tokens=64, max_rows=4, watermark=0.2)
        limits = Limits(4, ignore_eos=True)
        engine.submit(Generate("a", pack_tokens([1] * (4 * SIZE)), limits), "g")
        engine.step()
        tokens = [2 + i % 60 for i in range(prompt)]
        engine.submit(Generate("b", pack_tokens(tokens), limits), "g")
        engine.step()
        assert engine.stats().sched.running == 1 + is_admitted
