"""Checkpoints that store scales of FP8 KV: what is written and read with them, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mallee.protocol.errors import WeightsMismatch
from mallee.protocol.model import WeightVersion
from mallee.testing.quantized import quantized_model, with_kv_scales
from mallee.testing.random_model import RandomModel, random_model
from mallee.worker.model.config import FAMILIES
from mallee.worker.model.loading.weights import fuse_weights
from mallee.worker.model.ops import write
from mallee.worker.model.runner import TorchForward, load

FP8 = torch.float8_e4m3fn
PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 128, 60)]
FORMS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]
KV_SCHEME = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
}
"""As llm-compressor writes it."""


def e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest float8 e4m3 of each, ties to even fractions, saturated: by its definition."""
    size = np.abs(values.astype(np.float64))
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-40))), -6)
    step = 2.0 ** (exponent - 3)
    rounded = np.minimum(np.round(size / step) * step, 448.0)  # np.round: half to even
    return np.copysign(rounded, values).astype(np.float32)


def stored(forward: TorchForward) -> torch.Tensor:
    """[layers, slots, 2, kv_heads, head_dim], in float32."""
    return forward._memory.float()


def run_text(run: Any) -> torch.Tensor:
    """Logits of a prompt in two chunks, and of ten decode steps."""
    found = run.step(run.row("a", PROMPT[:30])) + run.step(run.row("a", PROMPT[30:50]))
    for token in PROMPT[50:]:
        found += run.step(run.row("a", [token]))
    return torch.stack(found).float()


def with_outliers(factor: float) -> RandomModel:
    """Keys and values that are large in a dimension or two of each head; the answers don't change by it."""
    model = random_model("llama", 4)
    dim = model.config.head_dim
    for name, tensor in model.tensors.items():
        if "_proj" in name:
            tensor *= 0.5  # as in test_fp8: attention as sharp as that of checkpoints
        if name.endswith("o_proj.weight"):
            tensor.view(tensor.shape[0], -1, dim)[:, :, 0] /= factor
        elif "self_attn" in name:  # those of keys and queries, which turn by pairs, cancel out
            for at in (0, dim // 2) if name[-13] in "qk" else (0,):
                own = 1 / factor if name[-13] == "q" else factor
                tensor.view(-1, dim, tensor.shape[1])[:, at] *= own
    return model


def calibrated(model: RandomModel, sequences: Callable[..., Any]) -> RandomModel:
    """`model` with the scales that its own largest keys and values ask for."""
    exact = model.forward()
    run_text(sequences(exact))
    largest = stored(exact).abs().amax((1, 3, 4)) / 448.0
    return with_kv_scales(model, [(k, v) for k, v in largest.tolist()])


def test_memory_holds_shares_of_the_scales_rounded_once() -> None:
    """D31, part: against float8 by its definition in numpy, byte by byte; beyond 448 shares saturate."""
    kv = torch.randn(4096, 2, 2, 16, generator=torch.Generator().manual_seed(1)) * 3
    kv[7, 0, 0, 0], kv[8, 1, 1, 1] = 1e9, -1e9
    for dtype in (torch.float32, torch.bfloat16):
        own, scales = kv.to(dtype), torch.tensor([0.013, 0.00047])
        memory = torch.zeros(4096, 2, 2, 16, dtype=FP8)
        write(memory, torch.arange(4096), own, scales)
        shares = own.float().numpy() / scales.numpy()[:, None, None]
        assert memory.float().numpy().tobytes() == e4m3(shares).tobytes()
        assert memory[7, 0, 0, 0].float() == 448


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_powers_of_two_give_the_bits_of_a_model_with_other_weights(
    family: str, dtype: str, sequences: Callable[..., Any]
) -> None:
    """D31, part: keys divided by 2 and values by 1/4 in a layer, or the weights that make them so.

    KV and logits are equal to the last bit, since powers of two round nothing. Gemma's keys are left
    alone: its norms add 1 to their weights, and that rounds.
    """
    model = random_model(family, 4)
    k_scale = 1.0 if family == "gemma3_text" else 2.0
    scales = [(k_scale, 0.25), (1 / k_scale, 8.0)] * (model.config.num_layers // 2)
    tensors = dict(model.tensors)
    side = "norm" if model.config.family.has_qk_norm else "proj"
    for i, (k, v) in enumerate(scales):
        factors = {f"k_{side}": 1 / k, f"q_{side}": k, "v_proj": 1 / v, "o_proj": v}
        for name, factor in factors.items():
            if factor != 1:
                tensors[f"model.layers.{i}.self_attn.{name}.weight"] *= factor
    other = RandomModel(model.raw, tensors)
    ours = with_kv_scales(random_model(family, 4), scales)
    runs = [sequences(each.forward(dtype=dtype, kv_dtype="fp8")) for each in (other, ours)]
    assert torch.equal(*map(run_text, runs))
    memories = [run.forward._memory.view(torch.uint8) for run in runs]
    assert torch.equal(*memories)
    assert bool(memories[0].any())


def test_with_outliers_scaled_fp8_is_far_closer_than_unscaled(
    sequences: Callable[..., Any],
) -> None:
    """D31, part: values of thousands saturate without scales: 0.15 against 0.019.

    Relative L2 distance of logits from those of KV in float32.
    """
    model = with_outliers(3000.0)
    exact = run_text(sequences(model.forward()))
    errors = []
    for each in (model, calibrated(model, sequences)):
        found = run_text(sequences(each.forward(kv_dtype="fp8")))
        errors.append(float((found - exact).norm() / exact.norm()))
    unscaled, scaled = errors
    assert unscaled > 0.1
    assert scaled < 0.03


@pytest.mark.parametrize("names", [*FORMS, ("kv_scale", "kv_scale")])
def test_scales_are_read_under_the_names_that_tools_give_them(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """D31, part: of compressed-tensors, vLLM, ModelOpt, llm-compressor, AutoFP8; any of their types."""
    pairs = [(0.5, 0.25), (3.0, 0.75)]
    if names[0] == names[1]:
        pairs = [(v, v) for _, v in pairs]
    model = with_kv_scales(random_model(), pairs, names)
    changed = {
        name: tensor.reshape(()).to(torch.bfloat16) if "layers.1" in name else tensor
        for name, tensor in model.tensors.items()
        if name.endswith("_scale")
    }
    RandomModel(model.raw, {**model.tensors, **changed}).save(tmp_path)
    forward = load(tmp_path, num_blocks=4, dtype="bfloat16", kv_dtype="fp8")
    found = [layer.kv_scales for layer in forward.decoder.weights.layers]
    assert [each.tolist() for each in found if each is not None] == [list(pair) for pair in pairs]


@pytest.mark.parametrize("form", ["fp8-tensor", "fp8-row", "int8-row"])
def test_a_checkpoint_of_8_bits_brings_them_too(form: Any, tmp_path: Path) -> None:
    """D31, part, I14, part: config.json says so: "static" in AutoFP8's, a scheme in llm-compressor's."""
    is_auto = form == "fp8-tensor"
    model = quantized_model(random_model(), form, activations="dynamic" if is_auto else "float")
    given = {
        **model.raw["quantization_config"],
        "kv_cache_scheme": "static" if is_auto else KV_SCHEME,
    }
    model = RandomModel({**model.raw, "quantization_config": given}, model.tensors)
    with_kv_scales(model).save(tmp_path)
    forward = load(tmp_path, num_blocks=4, kv_dtype="fp8")
    assert forward.decoder.weights.layers[1].kv_scales is not None
    assert "scales of FP8 KV" in forward.spec.kv_identity()["quantization"]
    model.save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"missing: .*layers\.0\.self_attn\.k_scale"):
        load(tmp_path, num_blocks=4, kv_dtype="fp8")


def test_a_checkpoint_may_have_nothing_else_of_8_bits(tmp_path: Path) -> None:
    """D31, part: config_groups are empty, the matrices plain."""
    given = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": KV_SCHEME,
    }
    plain = random_model()
    with_kv_scales(RandomModel({**plain.raw, "quantization_config": given}, plain.tensors)).save(
        tmp_path
    )
    forward = load(tmp_path, num_blocks=4, kv_dtype="fp8")
    assert forward.decoder.weights.layers[0].kv_scales is not None
    assert forward.spec.kv_identity()["quantization"] == "compressed-tensors: scales of FP8 KV"


def test_wider_kv_leaves_them_out_and_says_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, sequences: Callable[..., Any]
) -> None:
    """Even those that would be refused: nothing is divided by them."""
    caplog.set_level(logging.INFO)
    model = random_model()
    with_kv_scales(model, [(0.0, 1.0), (2.0, -1.0)]).save(tmp_path)
    forward = load(tmp_path, num_blocks=64, block_size=4)
    (line,) = [r.getMessage() for r in caplog.records if "scales of KV" in r.getMessage()]
    assert "model.layers.0.self_attn.k_scale and others, are not used: KV is not in FP8" in line
    assert torch.equal(run_text(sequences(forward)), run_text(sequences(model.forward())))
    assert forward.spec.kv_identity()["kv_scales"] == "1"


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_bad_scales_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    """D31, part: with the value, and the way to do without."""
    pairs = [(1.0, 1.0), (value, 1.0) if name == "k_scale" else (1.0, value)]
    with_kv_scales(random_model(), pairs).save(tmp_path)
    said = rf"model\.layers\.1\.self_attn\.{name} is {value}, .* give kv_dtype auto"
    with pytest.raises(WeightsMismatch, match=said):
        load(tmp_path, num_blocks=4, kv_dtype="fp8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers.1.self_attn.v_scale": None}, r"missing: model\.layers\.1\.self_attn\.v_scale$"),
        (
            {"layers.0.self_attn.k_scale": torch.ones(32)},
            r"k_scale \(32,\) instead of \(\) or \(1,\)",
        ),
        ({"layers.0.self_attn.k_scale": torch.ones(1, dtype=torch.int32)}, r"k_scale torch\.int32"),
        (
            {"layers.0.self_attn.k_proj.k_scale": torch.ones(1)},
            r"unexpected: model\.layers\.0\.self_attn\.k_proj\.k_scale$",
        ),
        ({"layers.0.self_attn.q_scale": torch.ones(1)}, r"unexpected: .*q_scale$"),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_missing_per_channel_and_double_scales_are_named(
    changes: dict[str, torch.Tensor | None], named: str, kv_dtype: str, tmp_path: Path
) -> None:
    """D31, part: a layer without, scales of channels, and two forms at once."""
    model = with_kv_scales(random_model())
    tensors: dict[str, torch.Tensor | None] = {**model.tensors}
    tensors |= {f"model.{name}": tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    RandomModel(model.raw, kept).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=named):
        load(tmp_path, num_blocks=4, kv_dtype=kv_dtype)


def test_other_scales_are_another_model(tmp_path: Path) -> None:
    """F24, part: a last bit of one scale in a large file, between all that a digest samples else.

    So capsules, block hashes and files of one never meet the other's.
    """
    model = random_model("llama", 1, num_hidden_layers=6, vocab_size=4096)
    pairs = [(0.5, 0.25)] * 6
    other = [*pairs[:4], (float(np.nextafter(np.float32(0.5), np.float32(1))), 0.25), pairs[5]]
    for name, each in (("a", pairs), ("b", pairs), ("c", other)):
        with_kv_scales(model, each).save(tmp_path / name)
    a, b, c = (load(tmp_path / name, num_blocks=4, kv_dtype="fp8") for name in "abc")
    assert a.spec.fingerprint == b.spec.fingerprint != c.spec.fingerprint
    own, their = a.spec.kv_identity(), c.spec.kv_identity()
    assert {name for name in own if own[name] != their[name]} >= {"weights", "fingerprint"}
    assert own["kv_scales"] == "stored"
    assert a.spec.salt() != c.spec.salt()


def test_new_weights_bring_new_scales(tmp_path: Path, sequences: Callable[..., Any]) -> None:
    """A change of weights over the same KV memory reads and writes by the scales of the new ones."""
    for name, seed, factor in (("old", 1, 0.02), ("new", 2, 0.3)):
        with_kv_scales(random_model("llama", seed), [(factor, factor / 3)] * 2).save(
            tmp_path / name
        )
    old, alone = (load(tmp_path / name, num_blocks=8, kv_dtype="fp8") for name in ("old", "new"))
    run_text(sequences(old))
    new = old.with_weights(tmp_path / "new", WeightVersion(1, "new", str(tmp_path / "new")))
    assert torch.equal(run_text(sequences(new)), run_text(sequences(alone)))


def test_scales_of_a_model_without_bytes_are_not_looked_at() -> None:
    """The bytes of a checkpoint are known before it is loaded."""
    model = with_kv_scales(random_model())
    tensors = {name: tensor.to("meta") for name, tensor in model.tensors.items()}
    weights = fuse_weights(tensors, model.config, dtype=torch.float32, device="meta", kv_dtype=FP8)
    scales = weights.layers[0].kv_scales
    assert scales is not None
    assert scales.is_meta
