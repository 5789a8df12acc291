"""Everything that can happen to an engine that speculates, in any order: nothing leaks, no answer changes."""

import random
from functools import partial
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from mallee.protocol.errors import DeviceMemoryExhausted
from mallee.protocol.ids import branch_seed
from mallee.testing.forward import MockForward, draw_token
from mallee.worker.forward import Forward
from mallee.worker.sched.branch import Branch
from mallee.worker.speculation.drafters import Drafter, EachAlone
from mallee.worker.speculation.speculator import SpeculationConfig
from support.engine_machine import QUIET, EngineMachine, Fallible, PassFailed, TorchMachine
from support.examples import examples
from support.speculating import CheckedModel, Free, Unsure, draft_by

pytestmark = pytest.mark.usefixtures("one_thread")


class Rerunning(EachAlone):
    """A drafter that runs the branch by itself, and tells the truth up to a token drawn by lot."""

    def __init__(self, machine: EngineMachine) -> None:
        self._machine = machine
        self._rng = random.Random(0)

    def read(self, branch: Branch) -> None:
        """It needs nothing of what was drawn."""

    def forget(self, branch: Branch) -> None:
        """It remembers nothing of a branch."""

    def propose(self, branch: Branch, num_tokens: int) -> list[int]:
        plan = self._machine.plans[branch.job.command.request, branch.index]
        seed, num = branch_seed(plan.sampling.seed, branch.index), branch.num_output
        if plan.grammar is None:
            draft = self._machine.rerun(plan, num + num_tokens, seed)[num:]
        else:
            draft = [self._rng.randrange(3, 7) for _ in range(num_tokens)]
        wrong = self._rng.randrange(num_tokens + 3)
        return [t if i < wrong else 3 + (t + 1) % 3 for i, t in enumerate(draft)]


class SpeculatingMachine(EngineMachine):
    """Drafts that are right at first."""

    speculation = SpeculationConfig("auto", 6)

    def begun(self) -> None:
        drafter: Drafter = Rerunning(self)
        draft_by(self.engine, drafter)


class LookingUp(EngineMachine):
    """Drafts from texts that repeat themselves, as their vocabulary is small."""

    speculation = SpeculationConfig("auto")

    def begun(self) -> None:
        assert self.engine._speculator is not None
        self.engine._speculator._costs = Free()


class LookingUpTorch(TorchMachine):
    """The same on a real, tiny model in float32."""

    speculation = SpeculationConfig("auto")

    def begun(self) -> None:
        assert self.engine._speculator is not None
        self.engine._speculator._costs = Free()


class Drafting(EngineMachine):
    """Drafts of a model that is mostly right, has few blocks, and may fail or have too little memory."""

    speculation = SpeculationConfig("auto", 6)

    def begun(self) -> None:
        forward = MockForward(self.forward.spec, num_blocks=14, block_size=4)
        self.draft = Fallible(cast(Forward, Unsure(forward)))
        self.drafter = CheckedModel(self.draft, partial(draw_token, 8), max_step_tokens=7)
        draft_by(self.engine, self.drafter)

    @rule(point=st.sampled_from(["before", "after", "sampling"]), is_full=st.booleans())
    def fail_to_draft_soon(self, point: str, is_full: bool) -> None:
        """One of the next passes of drafts raises: with too little memory that ends nothing."""
        self.draft.fails = point
        self.draft.error = DeviceMemoryExhausted("full") if is_full else PassFailed()

    @invariant()
    def drafts_are_well(self) -> None:
        self.drafter.check()

    def teardown(self) -> None:
        self.draft.fails = None
        super().teardown()
        for branch in list(self.drafter._followed):
            self.drafter.forget(branch)
        self.drafter.check()
        tree = self.drafter._tree
        assert tree.num_available == tree.pool.num_blocks, "a leak"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [
        *((SpeculatingMachine, 60, 40), (Drafting, 60, 40)),
        *((LookingUp, 40, 40), (LookingUpTorch, 8, 25)),
    ],
)
def test_every_branch_draws_what_a_linear_rerun_draws(
    machine: type[EngineMachine], num: int, steps: int
) -> None:
    """F27, part, I15, part: random trees of all kinds of requests on small pools, under every policy, with
    passes that fail, cancels, lost gateways, preemption, eviction and releases while drafts are under way.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
