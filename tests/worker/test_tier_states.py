"""Random trees whose capsules and prefixes go below the device and come back, with moves that are late,
blocks that are damaged, disks that are full, and engines that are started again.
"""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from support.engine_machine import QUIET
from support.examples import examples
from support.tiered_machine import TieredMachine, TieredTorchMachine, TieredWindowMachine

pytestmark = pytest.mark.usefixtures("one_thread", "small_window_pools")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "num", "steps"),
    [(TieredMachine, 80, 50), (TieredTorchMachine, 8, 30), (TieredWindowMachine, 12, 40)],
)
def test_capsules_come_back_from_below_as_they_were(
    machine: type[TieredMachine], num: int, steps: int
) -> None:
    """F6, part, F24, part: random trees with parking, eviction, damage, restarts.

    Every branch draws what a rerun draws, events tell the truth of every tier, and what was acknowledged
    durable is there after a restart.
    """
    bounds = settings(examples(num), stateful_step_count=steps, suppress_health_check=QUIET)
    run_state_machine_as_test(machine, settings=bounds)
