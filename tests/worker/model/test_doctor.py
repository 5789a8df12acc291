"""The doctor: silent on a right model, and it finds a planted bug where it was planted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mallee.testing.random_model import RandomModel, random_model
from mallee.worker.model import runner
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.doctor import Difference, examine

PROMPT = [int(t) for t in torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(1))]


def find(oracle: Any, ours: RandomModel, num_steps: int = 4) -> Difference | None:
    return examine(ours.forward(), oracle.hf, PROMPT, num_steps=num_steps).first


def changed(model: RandomModel, name: str, rows: slice) -> RandomModel:
    """`model` with some rows of one tensor scaled."""
    tensor = model.tensors[name].clone()
    tensor[rows] *= 1.5
    return model._replace(tensors={**model.tensors, name: tensor})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_model_agrees_at_every_site(
    family: str, dtype: str, oracles: Callable[..., Any]
) -> None:
    """I3, I1: embed, each layer's heads, attention and output, last norm and logits are compared."""
    oracle = oracles(random_model(family, 2), dtype)
    forward = oracle.model.forward(dtype=dtype)
    found = examine(forward, oracle.hf, PROMPT, num_steps=5)
    assert found.first is None
    assert (found.dtype, found.num_prompt, len(found.tokens)) == (dtype, 30, 35)
    inside = [
        (site, layer)
        for layer in range(oracle.model.config.num_layers)
        for site in ("heads", "attention", "output")
    ]
    sites = [(report.site, report.layer) for report in found.sites]
    assert sites == [("embed", None), *inside, ("norm", None), ("logits", None)]
    assert all(0 <= r.mean_error <= r.max_error and r.excess < 1 for r in found.sites)
    assert forward.decoder.tap is None


@pytest.mark.parametrize(
    ("tensor", "rows", "site", "layer", "heads"),
    [
        ("model.embed_tokens.weight", slice(None), "embed", None, ()),
        ("model.layers.0.input_layernorm.weight", slice(None), "heads", 0, (0, 1, 2, 3)),
        ("model.layers.1.self_attn.q_proj.weight", slice(32, 48), "heads", 1, (2,)),
        ("model.layers.2.self_attn.k_proj.weight", slice(16, 32), "heads", 2, (2, 3)),
        ("model.layers.3.self_attn.v_proj.weight", slice(0, 16), "heads", 3, (0, 1)),
        ("model.layers.1.self_attn.o_proj.weight", slice(5, 6), "attention", 1, ()),
        ("model.layers.2.post_attention_layernorm.weight", slice(None), "output", 2, ()),
        ("model.layers.3.mlp.down_proj.weight", slice(9, 10), "output", 3, ()),
        ("model.norm.weight", slice(None), "norm", None, ()),
        ("lm_head.weight", slice(3, 4), "logits", None, ()),
    ],
)
def test_a_bug_planted_in_layer_k_is_located(
    tensor: str,
    rows: slice,
    site: str,
    layer: int | None,
    heads: tuple[int, ...],
    oracles: Callable[..., Any],
) -> None:
    """I3: the first layer and site that differ, and the head where one is to blame."""
    model = random_model("llama", 2, num_hidden_layers=4, tie_word_embeddings=False)
    found = find(oracles(model), changed(model, tensor, rows))
    assert found is not None
    assert (found.site, found.layer) == (site, layer)
    assert found.head in (heads or (None,))
    assert (found.scores is None) == (found.head is None)
    assert f"{'outside the layers' if layer is None else f'layer {layer}'}, {site}" in str(found)


def test_a_window_off_by_one_is_found_where_it_first_hides_a_key(
    oracles: Callable[..., Any],
) -> None:
    """I3, D18: layer, head, position and the attention weights of both sides."""
    right = random_model("gemma3_text", 2)
    wide = random_model("gemma3_text", 2, sliding_window=right.raw["sliding_window"] + 1)
    found = find(oracles(right), wide)
    assert found is not None
    assert (found.site, found.layer, found.position, found.step) == ("heads", 0, 20, 0)
    assert found.scores is not None
    ours, theirs = found.scores
    assert theirs[0] == 0 < ours[0]
    assert len(ours) == len(theirs) == 21
    assert abs(sum(ours) - 1) < 1e-5


def test_a_bug_in_decoding_alone_is_found_at_its_step(
    oracles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18, S7: positions that lag behind from the third step on; the report names the step."""
    plan = runner.make_plan

    def late(rows: Any, **options: Any) -> Any:
        made = plan(rows, **options)
        lag = int(rows[0].start >= len(PROMPT) + 2)
        return made._replace(positions=made.positions - lag)

    monkeypatch.setattr(runner, "make_plan", late)
    oracle = oracles(random_model("qwen3", 2))
    found = find(oracle, oracle.model, num_steps=6)
    assert found is not None
    assert (found.site, found.layer, found.position, found.step) == ("heads", 0, 32, 3)
    assert "decode step 3" in str(found)


def test_values_that_are_no_numbers_count_as_differences(oracles: Callable[..., Any]) -> None:
    oracle = oracles(random_model("llama", 2))
    tensor = oracle.model.tensors["model.norm.weight"].clone()
    tensor[3] = torch.nan
    broken = {**oracle.model.tensors, "model.norm.weight": tensor}
    found = find(oracle, oracle.model._replace(tensors=broken))
    assert found is not None
    assert (found.site, found.error) == ("norm", float("inf"))
