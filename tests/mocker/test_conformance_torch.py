"""K16: the mocked engine decides, tells and publishes what the engine over a real model does."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_thread")

torch = pytest.importorskip("torch")

from mallee.testing.random_model import random_model  # noqa: E402 - it needs torch
from support.asking import SIZE, random_scene  # noqa: E402
from support.conforming import assert_same, assert_same_but_for_strides, play_real, play_scene  # noqa: E402
from support.examples import examples  # noqa: E402

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a scene that fails is told by its seed
MODEL = random_model("llama", 3)


@settings(examples(12), phases=QUICK)
@given(st.integers(0, 1 << 32))
def test_a_mocked_engine_does_what_one_over_a_model_does(seed: int) -> None:
    """K16, K17: the model computes every row; who is admitted, cut, preempted and told is the same."""
    scene = random_scene(seed, num_asks=8)
    forward = MODEL.forward(num_blocks=scene.num_blocks, block_size=SIZE)
    expected = play_real(scene, forward)
    assert_same(play_scene(scene, forward.spec), expected)
    assert_same_but_for_strides(play_scene(scene, forward.spec, max_multi_step=99), expected)
