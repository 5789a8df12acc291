"""The bench of decode steps beside a verifier runs."""

import pytest

from support.benches import run_bench


@pytest.mark.nats
@pytest.mark.service
@pytest.mark.model
def test_steps_are_counted_with_and_without_a_verifier() -> None:
    """D12, part: a verifier that is called all the while leaves every token where it is."""
    found, table = run_bench("serve.scores", "--rounds", "1", "--tokens", "60")
    cases = found["mock"]
    assert set(cases) == {"none", "at_once", "busy", "silent"}
    assert {each["steps"] for each in cases.values()} == {16 * (60 - 20 - 1)}
    assert cases["none"]["calls"] == 0
    assert cases["silent"]["calls"] == 1
    assert cases["at_once"]["calls"] > 2
    assert cases["busy"]["calls"] > 1
    assert cases["none"]["p99_ratio"] == 1.0
    assert "busy" in table
