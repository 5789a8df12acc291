"""The bench of the time until a service answers."""

import pytest

from support.benches import run_bench


@pytest.mark.ray
@pytest.mark.service
def test_a_deploy_on_a_running_head_is_timed_until_its_first_answer() -> None:
    found, _ = run_bench("ready", "--quick", "--ways", "deploy")
    times = found["ways"]["deploy"]
    assert 0 < times["accepted_s"] < times["ready_s"] == times["slowest_s"]
    assert times["head_s"] > 0
