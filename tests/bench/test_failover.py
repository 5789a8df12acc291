"""The real model over Ray, under load: whatever dies, stops or hangs, no answer is another one."""

import pytest

from support.benches import run_bench

pytestmark = [pytest.mark.ray, pytest.mark.service, pytest.mark.model, pytest.mark.nats]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_under_load_change_no_text() -> None:
    """X4, K28, part: answers as if undisturbed; those of a dead gateway are cut, and can be retried."""
    found, table = run_bench("failover", "--quick", timeout_s=800)
    faults = [name for name in found if name.endswith(("killed", "stopped", "hangs"))]
    assert len(faults) == 5
    for name in ["none", *faults]:
        figures = found[name]
        assert figures["failed"] == 0, table
        assert figures["equal"] == figures["requests"] == 9, table
        assert figures["equal_forks"] == figures["forks"] > 0, table
    gateway = found["gateway killed"]
    assert gateway["unclean_ends"] == gateway["failed_retries"] == 0
    assert gateway["end_s_max"] < 2.0
