"""Our decoder against transformers' on tiny random weights: the same logits, however we cut them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bench.doubles.random_model import RandomModel, random_model
from mallee.worker.model import runner
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.parity.compare import Difference, examine, load_oracle
from mallee.worker.model.parity.tolerance import TOLERANCES
from mallee.worker.model.runner import load
from support.examples import examples

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}


def turned(share: float, *sections: int) -> dict[str, Any]:
    """Rotary settings of a Qwen 3.5 that turns this share of a head."""
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": share,
            "mrope_section": list(sections),
        }
    }


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-no_groups": ("llama", {"num_key_value_heads": 4}),
    "llama-wide_heads": ("llama", {"head_dim": 32}),
    "llama-stretched": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3-one_kv_head": ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3-sliding": ("qwen3", SLIDING),
    "gemma3": ("gemma3_text", {}),
    "gemma3-capped": ("gemma3_text", {"final_logit_softcapping": 2.0}),
    "gemma3-all_sliding": (
        "gemma3_text",
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 3},
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5-half_turned": ("qwen3_5_text", {"linear_conv_kernel_dim": 2, **turned(0.5, 2, 1, 1)}),
    "qwen3_5-all_turned": ("qwen3_5_text", {"tie_word_embeddings": False, **turned(1.0, 4, 2, 2)}),
    "qwen3_5-one_key_head": (
        "qwen3_5_text",
        {"linear_num_key_heads": 1, "num_key_value_heads": 1},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-some_dense": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "linear_num_key_heads": 4,
        },
    ),
    "qwen3_5_moe-many_chosen": (
        "qwen3_5_moe_text",
        {"num_experts": 8, "num_experts_per_tok": 5, "tie_word_embeddings": False},
    ),
}
LENGTHS = (15, 16, 17, 31, 32, 33, 80)


@pytest.fixture(params=FAMILIES)
def plain(request: pytest.FixtureRequest, oracles: Callable[..., Any]) -> Any:
    """One model per family."""
    return oracles(random_model(request.param, 3))


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128, n)]


def check_near(oracle: Any, tokens: list[int], ours: torch.Tensor, dtype: str = "float32") -> None:
    """D18: on a mismatch the failure names the first layer, head and position that differ."""
    difference = float((ours.float() - oracle.last(tokens)).abs().max())
    if difference >= TOLERANCES[dtype].logits:
        found = examine(oracle.model.forward(dtype=dtype), oracle.hf, tokens, num_steps=0)
        pytest.fail(f"logits differ by {difference} after {len(tokens)} tokens; {found.first}")


FLOATS = [pytest.param(*own, "float32", 4, id=name) for name, own in VARIANTS.items()]
HALVES = [  # the larger shapes are those for which CPUs have kernels of their own
    pytest.param(family, {"head_dim": dim}, "bfloat16", size, marks=pytest.mark.slow)
    for family in FAMILIES
    for dim, size in ((16, 4), (32, 16), (64, 32))
]


@pytest.mark.parametrize(("family", "overrides", "dtype", "block_size"), [*FLOATS, *HALVES])
def test_chunks_decodes_and_forks_have_the_oracles_logits(
    family: str,
    overrides: dict[str, Any],
    dtype: str,
    block_size: int,
    oracles: Callable[..., Any],
    sequences: Callable[..., Any],
) -> None:
    """I1, I6: chunked prefill and decode over the cache equal a run without one; then four forks.

    In bfloat16 against transformers in bfloat16, which rounds in other places.
    """
    oracle = oracles(random_model(family, 3, **overrides), dtype)
    run = sequences(oracle.model.forward(dtype=dtype, block_size=block_size, num_blocks=100))
    tokens = prompt(75)
    done = 0
    for n in (33, 5, 1, 20, 1, 1, 9, *(1,) * 5):
        logits = run.step(run.row("a", tokens[done : done + n]))[0]
        done += n
        check_near(oracle, tokens[:done], logits, dtype)
    children = [f"child{i}" for i in range(4)]
    copies = [copy for child in children for copy in run.fork("a", child)]
    rows = [run.row(child, prompt(1 + 6 * i, i)) for i, child in enumerate(children)]
    for child, logits in zip(children, run.step(*rows, copies=copies), strict=True):
        check_near(oracle, run.tokens[child], logits, dtype)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_lengths_around_block_edges_have_the_oracles_logits(
    block_size: int, plain: Any, sequences: Callable[..., Any]
) -> None:
    """D1: 15/16/17, 31/32/33 and 80 tokens over scattered blocks equal a dense run."""
    run = sequences(plain.model.forward(block_size=block_size, num_blocks=100))
    tokens = prompt(81)
    expected = plain.all(tokens)
    rows = [run.row(str(n), tokens[:n]) for n in LENGTHS]
    first = run.step(*rows)
    second = run.step(*(run.row(str(n), [tokens[n]]) for n in LENGTHS))
    for n, whole, step in zip(LENGTHS, first, second, strict=True):
        for ours, theirs in ((whole, expected[n - 1]), (step, expected[n])):
            assert float((ours - theirs).abs().max()) < TOLERANCES["float32"].logits
            assert float((ours - theirs).norm()) < 1e-4


GROWTH = st.lists(
    st.lists(
        st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([1, 1, 1, 2, 5, 18, 33])),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


@examples(12)
@given(first=st.integers(1, 40) | st.just(170), steps=GROWTH, size=st.sampled_from([4, 8, 16]))
def test_random_trees_equal_linear_runs(
    plain: Any,
    sequences: Callable[..., Any],
    first: int,
    steps: list[list[tuple[int, bool, int]]],
    size: int,
) -> None:
    """D19, D6: in each step some nodes grow and some fork and grow; each equals its linear run."""
    run = sequences(plain.model.forward(num_blocks=400, block_size=size), seed=first)
    run.step(run.row("n0", prompt(first)))
    for step in steps:
        rows, copies, grown = [], [], []
        for choice, forks, n in step:
            names = sorted(set(run.tokens) - set(grown))  # what grows in this step has no KV yet
            if not names:
                continue
            name = names[choice % len(names)]
            if forks:
                name, parent = f"n{len(run.tokens)}", name
                copies += run.fork(parent, name)
            grown.append(name)
            rows.append((name, n))
        made = [run.row(name, prompt(n, i)) for i, (name, n) in enumerate(rows)]
        for name, logits in zip(grown, run.step(*made, copies=copies), strict=True):
            check_near(plain, run.tokens[name], logits)


_SIGHT = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}
_QWEN_SIGHT = {**_SIGHT, "depth": 1, "num_heads": 2, "out_hidden_size": 64}


@pytest.mark.parametrize(
    ("kind", "text", "fields"),
    [
        (
            "gemma3",
            "gemma3_text",
            {
                "vision_config": {
                    **_SIGHT,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "image_size": 28,
                },
                "mm_tokens_per_image": 4,
            },
        ),
        ("qwen3_5", "qwen3_5_text", {"vision_config": _QWEN_SIGHT}),
        ("qwen3_5_moe", "qwen3_5_moe_text", {"vision_config": _QWEN_SIGHT}),
    ],
)
def test_the_text_model_of_one_that_also_sees_agrees_at_every_site(
    kind: str, text: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """I1, I2: a tiny model that also sees, saved by transformers; its eyes are left out."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    raw = {name: v for name, v in random_model(text).raw.items() if name != "architectures"}
    tied = raw["tie_word_embeddings"]
    config = AutoConfig.for_model(kind, text_config=raw, tie_word_embeddings=tied, **fields)
    torch.manual_seed(0)
    made = AutoModelForImageTextToText.from_config(config)
    made.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert any("vision" in name or "visual" in name for name in opened.keys())  # noqa: SIM118
    forward = load(tmp_path, num_blocks=8)
    oracle = load_oracle(tmp_path, "float32")
    assert examine(forward, oracle, prompt(60), num_steps=4).first is None


# The doctor: silent on a right model, and it finds a planted bug where it was planted


PROMPT = [int(t) for t in torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(1))]


def find(oracle: Any, ours: RandomModel, num_steps: int = 4) -> Difference | None:
    return examine(ours.forward(), oracle.hf, PROMPT, num_steps=num_steps).first


def changed(model: RandomModel, name: str, rows: slice, factor: float) -> RandomModel:
    """`model` with some rows of one tensor scaled."""
    tensor = model.tensors[name].clone()
    tensor[rows] *= factor
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
    assert all(0 <= r.mean_error <= r.max_error and r.of_tolerance < 1 for r in found.sites)
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
        ("model.norm.weight", slice(3, 4), "norm", None, ()),
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
    is_no_number = rows == slice(3, 4) and site == "norm"  # that counts as a difference, too
    found = find(oracles(model), changed(model, tensor, rows, torch.nan if is_no_number else 1.5))
    assert found is not None
    assert (found.site, found.layer) == (site, layer)
    assert found.head in (heads or (None,))
    assert (found.scores is None) == (found.head is None)
    assert f"{'outside the layers' if layer is None else f'layer {layer}'}, {site}" in str(found)


@pytest.mark.parametrize(
    ("tensor", "rows", "site", "head"),
    [
        ("0.linear_attn.in_proj_qkvz", slice(32, 64), "heads", None),
        ("0.linear_attn.in_proj_ba", slice(1, 2), "heads", None),
        ("0.linear_attn.norm", slice(3, 4), "heads", None),
        ("0.mlp.shared_expert.up_proj", slice(5, 6), "output", None),
        ("0.mlp.shared_expert_gate", slice(None), "output", None),
        ("1.self_attn.q_proj", slice(64, 72), "heads", 2),  # by head queries, and their gates
        ("1.self_attn.q_proj", slice(48, 64), "heads", 1),
        ("1.mlp.gate", slice(2, 3), "output", None),
        ("1.mlp.experts.gate_up_proj", slice(4, 5), "output", None),
        ("1.mlp.experts.down_proj", slice(4, 5), "output", None),
    ],
)
def test_a_bug_planted_in_a_recurrent_layer_or_in_experts_is_located(
    tensor: str, rows: slice, site: str, head: int | None, oracles: Callable[..., Any]
) -> None:
    """I3: recurrent layers have no query heads, and no attention to show."""
    model = random_model("qwen3_next", 2)
    name = f"model.layers.{tensor}" + ("" if ".experts." in tensor else ".weight")
    found = find(oracles(model), changed(model, name, rows, 1.5))
    assert found is not None
    assert (found.site, found.layer, found.head) == (site, int(tensor[0]), head)
    assert (found.scores is None) == (head is None)


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
