"""The bench of a search's time beside the model's."""

import pytest

from support.benches import run_bench


@pytest.mark.ray
@pytest.mark.service
def test_the_time_beside_the_model_s_is_a_part_of_the_whole() -> None:
    """X10, part: over Ray and HTTP, with steps that take time and with such that take none."""
    found, _ = run_bench("search.overhead", "--quick")
    assert list(found["steps"]) == ["1", "16", "50"]
    for step in found["steps"].values():
        assert step["share"] == pytest.approx(step["host_s"] / step["whole_s"], rel=0.01)
    assert found["steps"]["50"]["host_s"] < found["steps"]["50"]["whole_s"] > 1.0
    assert found["scale"] == {"rounds": 1, "expansions": 5, "width": 4}
