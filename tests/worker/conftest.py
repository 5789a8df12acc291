"""A bench around one engine: drives it, collects answers, checks invariants after every step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest

from bench.doubles.forward import MockForward
from bench.doubles.structures import MockStructures
from mallee.mocker.passes import mock_spec
from mallee.protocol.errors import MalleeError, from_wire
from mallee.protocol.events import Event
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import CapsuleReply, Command, TokenLogprobs, Update
from mallee.worker.engine import Engine, MakeTiers
from mallee.worker.records import EngineConfig
from mallee.worker.sched.policy import SchedulerConfig


@dataclass
class Answer:
    """All updates of one branch, added up."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Update | None = None

    @property
    def error(self) -> MalleeError | None:
        assert self.last is not None
        return from_wire(self.last.error) if self.last.error else None


class Bench:
    """One engine, its forward pass, a clock set by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_step_tokens: int = 16,
        max_rows: int = 64,
        max_waiting: int = 4096,
        max_answer_capsules: int = 64,
        vocab_size: int = 64,
        max_model_len: int = 1 << 20,
        eos: tuple[int, ...] = (),
        row_blocks: int = 0,
        sched: Mapping[str, Any] = MappingProxyType({}),
        below: MakeTiers | None = None,
        worker: str = "w0",
        forward: Any = None,
        **switches: Any,
    ) -> None:
        """A row of logits has the bytes of `row_blocks`. `forward` may take the place of the mocked one.

        `sched` are further fields of SchedulerConfig, `switches` of EngineConfig.
        """
        self.now = 100.0
        spec = mock_spec(vocab_size=vocab_size, max_model_len=max_model_len, eos_token_ids=eos)
        row_nbytes = row_blocks * block_size * spec.kv_bytes_per_token
        self.forward = forward or MockForward(
            spec, num_blocks=num_blocks, block_size=block_size, row_nbytes=row_nbytes
        )
        config = EngineConfig(
            SchedulerConfig(max_step_tokens, max_rows, max_waiting, **sched),
            max_answer_capsules,
            **switches,
        )
        self.structures = MockStructures(vocab_size, eos)
        self.engine = Engine(
            self.forward,
            config=config,
            clock=lambda: self.now,
            worker=WorkerId(worker),
            incarnation=Incarnation(1),
            structures=self.structures,
            below=below,
        )
        self.answers: dict[tuple[str, int], Answer] = {}
        self.replies: dict[str, CapsuleReply] = {}
        self.events: list[Event] = []
        self.untold: list[MalleeError] = []  # refusals that no update tells
        self.gateways: dict[str, list[Update]] = {}

    def submit(self, *commands: Command, gateway: str = "g") -> None:
        for command in commands:
            if (error := self.engine.submit(command, gateway)) is not None:
                self.untold.append(error)

    def step(self) -> None:
        result = self.engine.step()
        self.engine.check()
        for gateway, frame in result.frames.items():
            self.replies |= {reply.request: reply for reply in frame.replies}
            self.gateways.setdefault(gateway, []).extend(frame.updates)
            for update in frame.updates:
                answer = self.answers.setdefault((update.request, update.branch), Answer())
                is_open = answer.last is None or answer.last.finish is None
                assert is_open or update.branch == -1, "news after the end"
                answer.tokens += update.tokens
                answer.logprobs += update.logprobs
                answer.last = update
        if result.events is not None:
            self.events += result.events.events

    def run(self, *commands: Command, max_steps: int = 10_000) -> None:
        """Submit and step until the engine is idle."""
        self.submit(*commands)
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., Bench]:
    return Bench
