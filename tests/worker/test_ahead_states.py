"""Everything that can happen to an engine that launches ahead, in any order: what it tells is the same."""

from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from bench.doubles.forward import MockForward
from bench.doubles.random_model import random_model
from mallee.mocker.passes import mock_spec
from mallee.protocol.messages import (
    Capture,
    Cut,
    Fork,
    Generate,
    Grammar,
    Limits,
    Pin,
    Rewind,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.worker.engine import Engine
from mallee.worker.forward import Forward
from mallee.worker.kv.watch import KVChecks
from mallee.worker.records import EngineConfig
from support.engine_machine import (
    GATEWAYS,
    GRAMMARS,
    QUIET,
    TOKENS,
    EngineMachine,
    TorchMachine,
    make_engine,
)
from support.examples import examples
from support.fake_device import Call, FakeDevice, Twin
from support.tiered_machine import TieredMachine, TieredStateMachine

pytestmark = pytest.mark.usefixtures("one_thread")

RICH = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1 << 60),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([-1, -1, -1, 0, 2]),
)
LIMITS = st.builds(
    Limits,
    st.integers(1, 24),
    stop_token_ids=st.sampled_from([(), (3,), (6, 5)]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 4]),
)


class TwinMachine(EngineMachine):
    """An engine over a device that is late, beside one that waits for all."""

    num_blocks = 20
    checks: ClassVar[KVChecks] = KVChecks()

    def make_forward(self) -> Forward:
        spec = mock_spec(vocab_size=8, eos_token_ids=(7,))
        return MockForward(spec, num_blocks=self.num_blocks, block_size=4)

    def make_engine(self, config: EngineConfig) -> Engine:
        # Gangs stand in a batch by the blocks that they have, and the two may take other ones.
        config = replace(config, scheduler=replace(config.scheduler, gang=False))
        device: Any = FakeDevice(cast(Forward, self.forward), seed=1)
        ahead = make_engine(device, lambda: self.now, config, device=device)
        plain = make_engine(self.make_forward(), lambda: self.now, config)
        return cast(Engine, Twin(ahead, plain))

    def fail_soon(self, point: str) -> None:  # type: ignore[override]
        """Nothing: engines that launch in other steps would fail in other steps."""

    def take(self, update: Update) -> None:
        if update.capsule is not None:
            self.texts[update.capsule] = [3] * update.boundary

    @rule(
        tokens=TOKENS,
        n=st.integers(1, 3),
        limits=LIMITS,
        sampling=RICH,
        grammar=GRAMMARS,
        keep_s=st.sampled_from([None, None, 0.0, 3.0]),
        gateway=GATEWAYS,
    )
    def generate_richly(
        self,
        tokens: list[int],
        n: int,
        limits: Limits,
        sampling: Sampling,
        grammar: Grammar | None,
        keep_s: float | None,
        gateway: str,
    ) -> None:
        name = self.name(gateway)
        command = Generate(
            name, pack_tokens(tokens), limits, sampling, n, grammar=grammar, keep_s=keep_s
        )
        self.engine.submit(command, gateway)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), branch=st.integers(0, 2))
    def capture(self, data: st.DataObject, branch: int) -> None:
        of = data.draw(st.sampled_from(sorted(self.open)))
        gateway = self.open[of]
        self.engine.submit(Capture(self.name(gateway), of, branch, 3.0), gateway)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), branch=st.integers(0, 2), at=st.integers(1, 12))
    def cut(self, data: st.DataObject, branch: int, at: int) -> None:
        of = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.submit(Cut(of, branch, at, pack_tokens([4])), self.open[of])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), is_pinned=st.booleans())
    def pin(self, data: st.DataObject, is_pinned: bool) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        self.engine.submit(Pin(self.name("g"), capsule, is_pinned, 3.0), "g")

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        at = data.draw(st.integers(1, len(self.texts[capsule])))
        self.engine.submit(Rewind(self.name("g"), capsule, at, 3.0), "g")

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), limits=LIMITS)
    def resume(self, data: st.DataObject, limits: Limits) -> None:
        capsule = data.draw(st.sampled_from(sorted(self.texts)))
        more = Limits(limits.max_tokens)
        self.engine.submit(Fork(self.name("g"), capsule, (b"",), more, resumes=True), "g")


class FallibleAhead(EngineMachine):
    """Passes and draws that fail, also those that are launched ahead; against reruns."""

    num_blocks = 20
    checks: ClassVar[KVChecks] = KVChecks()
    is_ahead = True

    def make_forward(self) -> Forward:
        return cast(
            Forward, FakeDevice(EngineMachine.make_forward(self), seed=2, told=self.collect)
        )

    def collect(self, call: Call, number: int) -> None:
        if call == "collect":
            self.forward.fail_at("collecting")

    def make_linear(self) -> Forward:
        return EngineMachine.make_forward(self)


class FallibleTorch(FallibleAhead):
    """The same on a real, tiny model in float32, whose draws are launched as on a GPU."""

    num_blocks = 30

    def make_forward(self) -> Forward:
        return random_model("llama", 3).forward(num_blocks=self.num_blocks, block_size=4)

    def make_linear(self) -> Forward:
        return self.make_forward()

    rerun = TorchMachine.rerun


class TieredAhead(TieredMachine):
    """Blocks that go below a device and come back while a pass is under way."""

    num_blocks = 20
    checks: ClassVar[KVChecks] = KVChecks()
    is_ahead = True
    make_forward = FallibleAhead.make_forward
    collect = FallibleAhead.collect
    make_linear = FallibleAhead.make_linear


class TieredStatesAhead(TieredAhead, TieredStateMachine):
    """The same with a layer that folds all tokens into a state."""

    num_blocks = 41

    def make_forward(self) -> Forward:
        return cast(
            Forward,
            FakeDevice(TieredStateMachine.make_forward(self), seed=2, told=self.collect),
        )

    def make_linear(self) -> Forward:
        return TieredStateMachine.make_forward(self)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [
        (TwinMachine, 150, 60),
        (FallibleAhead, 60, 40),
        (FallibleTorch, 8, 30),
        (TieredAhead, 60, 50),
        (TieredStatesAhead, 60, 50),
    ],
)
def test_launching_ahead_changes_nothing_that_is_told(
    machine: type[EngineMachine], num: int, steps: int
) -> None:
    """I18, part, D16, part, I26, part: random trees of all kinds of requests on small pools.

    Step by step the same updates, events and replies as without it, with cancels, cuts, captures, preemption
    and eviction while passes are under way; and no block leaks.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
