"""The bench of weights of 8 bits, on a tiny model."""

from pathlib import Path

import numpy as np

from bench.weights import CASES, PLAIN, figures
from mallee.testing.random_model import random_model


def test_each_form_is_measured_and_the_finer_is_the_nearer(tmp_path: Path) -> None:
    """I14, part: bfloat16 is nearest to float32, then INT8 per channel, then FP8."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    random_model("llama", 5, **shape).save(tmp_path / "m")
    rows = [[int(t) for t in np.random.default_rng(i).integers(0, 128, 60)] for i in range(2)]
    found = figures(tmp_path / "m", rows, rounds=1, threads=1)
    assert set(found) == {"float32", PLAIN, *CASES}
    distances = [found[name]["distance"] for name in ("float32", PLAIN, "INT8 per channel")]
    assert distances == sorted(distances)
    assert distances[0] == 0 < distances[1]
    assert found["INT8 per channel"]["distance"] < found["FP8 per channel"]["distance"] < 0.2
    assert all(set(found[name]["step_ms"]) == {"1", "8", "64"} for name in (PLAIN, *CASES))
    assert all(found[name]["nbytes"] < found[PLAIN]["nbytes"] for name in CASES)
    assert found["float32"]["same_first"] == 1
