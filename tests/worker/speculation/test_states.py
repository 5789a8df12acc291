"""Everything that can happen to an engine that speculates, in any order: nothing leaks, no answer changes."""

import random

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from mallee.protocol.ids import branch_seed
from mallee.worker.sched.branch import Branch
from mallee.worker.speculation.drafters import Drafter, EachAlone
from mallee.worker.speculation.speculator import SpeculationConfig
from support.engine_machine import QUIET, EngineMachine, TorchMachine
from support.examples import examples
from support.speculating import Free, draft_by

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


@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [(SpeculatingMachine, 60, 40), (LookingUp, 40, 40), (LookingUpTorch, 8, 25)],
)
def test_every_branch_draws_what_a_linear_rerun_draws(
    machine: type[EngineMachine], num: int, steps: int
) -> None:
    """F27, part, I15, part: random trees of all kinds of requests on small pools, under every policy, with
    passes that fail, cancels, lost gateways, preemption, eviction and releases while drafts are under way.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
