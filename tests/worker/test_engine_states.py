"""Everything that can happen to an engine, in any order: nothing leaks, no answer changes."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from support.engine_machine import QUIET, EngineMachine, TorchMachine
from support.examples import examples
from support.tiered_machine import (
    TieredMachine,
    TieredStateMachine,
    TieredTorchMachine,
    TieredWindowMachine,
)

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [
        (EngineMachine, 80, 40),
        (TorchMachine, 8, 25),
        (TieredMachine, 80, 50),
        (TieredTorchMachine, 8, 30),
        (TieredWindowMachine, 12, 40),
        (TieredStateMachine, 80, 50),
    ],
)
def test_every_branch_draws_what_a_linear_rerun_draws(
    machine: type[EngineMachine], num: int, steps: int
) -> None:
    """D19, D30, I18, S6, F6, part, F24, part: random trees of all kinds of requests on small pools.

    Under every policy; with passes that fail, cancels, lost gateways, preemption and eviction. With tiers
    below: capsules and prefixes that go there and come back by moves that are late, damaged blocks and full
    disks; events tell the truth of every tier, and what was acknowledged durable is there after a restart.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
