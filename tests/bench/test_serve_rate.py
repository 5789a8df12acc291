"""The service as users start it, over Ray and a proxy, beside the same code in one process."""

import pytest

from bench.serve.__main__ import Scale, bench
from bench.serve.sides import Programs

pytestmark = [pytest.mark.process, pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

SCALE = Scale(engines=20, rounds=5, seconds=2.0, warm_up_s=0.5, clients=(16, 64), streams=8)


def test_a_deployed_fleet_answers_at_the_rate_of_one_process() -> None:
    """X13: at least 0.8 of its requests a second, of 16 and 64 clients; medians of rounds by turns."""
    found = bench(SCALE, ["serve", "one_process"], Programs("", ""))
    deployed, alone = (
        sum(found[side][case]["rps"] for case in ("c16", "c64"))
        for side in ("serve", "one_process")
    )
    assert deployed >= 0.8 * alone, f"{deployed:.0f} of {alone:.0f} requests a second"
