"""Checkpoints of 8 bits: what they mean to the last bit, what computes with them, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bench.doubles.quantized import FORMS, Form, quantization_config, quantized_model
from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.errors import WeightsMismatch
from mallee.worker.forward import ForwardBatch, Row
from mallee.worker.memory.budget import DeviceMemory, Room
from mallee.worker.model.config import FAMILIES, ModelConfig, model_spec
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.matrix import widened
from mallee.worker.model.linear.scheme import BLOCK
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.loading.stored import expected_tensors
from mallee.worker.model.loading.weights import ModelWeights, fuse_weights, load_weights
from mallee.worker.model.parity.compare import examine, load_oracle
from mallee.worker.model.runner import TorchForward, load, work_of

PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 128, 40)]
DENSE = [name for name, family in FAMILIES.items() if not family.is_hybrid]
ALL = [pytest.param(family, form) for family in DENSE for form in FORMS]
Floats = npt.NDArray[np.float32]


def wide_model(family: str, **overrides: Any) -> RandomModel:
    """A tiny model with more than one block a matrix; its queries end within a block."""
    shape = {"hidden_size": 192, "intermediate_size": 256, "vocab_size": 128}
    return random_model(family, 3, **{**shape, **overrides})


def e4m3(raw: npt.NDArray[np.uint8]) -> Floats:
    """float8 e4m3 by its definition: sign, exponent from 7, 3 bits of fraction, subnormals."""
    sign = np.where(raw >> 7, -1.0, 1.0)
    exponent, fraction = (raw >> 3 & 15).astype(np.int32), (raw & 7) / 8.0
    normal = (1 + fraction) * 2.0 ** (exponent - 7)
    return (sign * np.where(exponent, normal, fraction * 2.0**-6)).astype(np.float32)


def meant(module: str, tensors: dict[str, torch.Tensor]) -> Floats:
    """The float32 matrix that the stored tensors mean: value by value, in numpy."""
    name = next(n for n in tensors if n.startswith(module + ".weight_scale"))
    scales = tensors[name].float().numpy()
    if module + ".weight_packed" in tensors:
        packed = tensors[module + ".weight_packed"].numpy()
        rows, width = tensors[module + ".weight_shape"].tolist()
        by_byte = [(packed >> (8 * i) & 255) - 128 for i in range(4)]
        values = np.stack(by_byte, 2).reshape(rows, -1)[:, :width].astype(np.float32)
    else:
        stored = tensors[module + ".weight"]
        raw = stored.view(torch.uint8).numpy()
        is_float8 = stored.dtype == torch.float8_e4m3fn
        values = e4m3(raw) if is_float8 else raw.view(np.int8).astype(np.float32)
    if not name.endswith("_inv"):
        return cast(Floats, values * scales.reshape(-1, 1))
    row, column = np.indices(values.shape) // BLOCK
    return cast(Floats, values * scales[row, column])


def dequantized(model: RandomModel) -> RandomModel:
    """The plain checkpoint that `model`, of 8 bits, means."""
    plain = {
        n: t for n, t in model.tensors.items() if t.dtype == torch.float32 and "scale" not in n
    }
    for name in model.tensors:
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            module = name.rpartition(".")[0]
            plain[module + ".weight"] = torch.from_numpy(meant(module, model.tensors))
    raw = {name: value for name, value in model.raw.items() if name != "quantization_config"}
    return RandomModel(raw, plain)


def logits(forward: TorchForward) -> torch.Tensor:
    """After the prompt in two chunks."""
    table = np.arange(16, dtype=np.int32)
    found = None
    for begin, end in ((0, 23), (23, len(PROMPT))):
        row = Row(np.array(PROMPT[begin:end], dtype=np.uint32), begin, table, True)
        found = forward.forward(ForwardBatch((), [row]))[0]
    return cast(torch.Tensor, found)


def matrix_of(linear: Linear, num_inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return linear(torch.eye(num_inputs, dtype=dtype)).t()


def test_every_float8_is_widened_exactly() -> None:
    """I14, part: all 254 numbers, subnormals and both zeros, in both dtypes."""
    raw = np.array([i for i in range(256) if i & 127 != 127], dtype=np.uint8)
    values = torch.from_numpy(raw).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        found = widened(values, dtype)
        assert found.dtype == dtype
        assert found.float().numpy().tobytes() == e4m3(raw).tobytes()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "form"), ALL)
def test_matrices_mean_values_times_scales_to_the_last_bit(
    family: str, form: Form, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    """I14, part: fused or not, in float32, against numpy's; the queries end within a block.

    A head of its own may have 8 bits or not.
    """
    ignored = ("lm_head",) if scale_dtype == torch.bfloat16 else ()
    plain = wide_model(family, tie_word_embeddings=False)
    model = quantized_model(plain, form, scale_dtype=scale_dtype, ignored=ignored)
    model.save(tmp_path)
    weights = load_weights(tmp_path, model.config, dtype=torch.float32, device="cpu")
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    heads = model.config.num_heads * model.config.head_dim
    for i, layer in enumerate(weights.layers):
        for linear, width, names in (
            (layer.qkv, hidden, [f"self_attn.{x}_proj" for x in "qkv"]),
            (layer.output, heads, ["self_attn.o_proj"]),
            (layer.gate_up, hidden, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, inner, ["mlp.down_proj"]),
        ):
            oracle = [meant(f"model.layers.{i}.{name}", model.tensors) for name in names]
            assert np.array_equal(matrix_of(linear, width).numpy(), np.concatenate(oracle))
    head = matrix_of(weights.head, hidden)
    assert torch.equal(head, dequantized(model).tensors["lm_head.weight"])
    assert torch.equal(head, plain.tensors["lm_head.weight"]) == bool(ignored)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "form"), ALL)
def test_logits_are_those_of_the_dequantised_model(
    family: str, form: Form, dtype: str, tmp_path: Path
) -> None:
    """I14, part: through `load`, as `mallee serve` does it; prompt in two chunks."""
    model = quantized_model(wide_model(family), form)
    model.save(tmp_path / "quantized")
    dequantized(model).save(tmp_path / "plain")
    found, expected = (
        logits(load(tmp_path / name, num_blocks=16, dtype=dtype)) for name in ("quantized", "plain")
    )
    assert found.dtype == expected.dtype == getattr(torch, dtype)
    bound = 2e-5 if dtype == "float32" else 0.1
    assert float((found - expected).abs().max()) < bound * float(expected.abs().max())


@pytest.mark.parametrize("family", DENSE)
def test_transformers_reads_fp8_blocks_alike(family: str, tmp_path: Path) -> None:
    """I14, part: its own reader of such checkpoints, site by site, every layer."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_attention_heads": 4}
    model = quantized_model(wide_model(family, **shape), "fp8-block")
    model.save(tmp_path)
    found = examine(load(tmp_path, num_blocks=16), load_oracle(tmp_path, "float32"), PROMPT)
    assert found.first is None
    assert len(found.sites) == 3 + 3 * model.config.num_layers


def test_fused_parts_of_different_forms_stay_apart_in_one_product(tmp_path: Path) -> None:
    """I14, part: values in floats beside queries and keys in 8 bits."""
    ignored = ["lm_head", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"]
    model = quantized_model(wide_model("qwen3"), "int8-row", ignored=ignored)
    model.save(tmp_path)
    weights = load_weights(tmp_path, model.config, dtype=torch.float32, device="cpu")
    plain = dequantized(model)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    oracle = torch.cat([plain.tensors[name] for name in names])
    assert torch.equal(plain.tensors[names[2]], model.tensors[names[2]])
    assert torch.equal(matrix_of(weights.layers[0].qkv, 192), oracle)
    assert "beside" in weights.layers[0].qkv.label
    assert "beside" not in weights.layers[1].qkv.label
    x, residual = torch.randn(3, 192), torch.randn(3, len(oracle))
    added = weights.layers[0].qkv.add(x, residual)
    torch.testing.assert_close(added, residual + x @ oracle.t(), rtol=1e-5, atol=1e-5)


DOWN = "model.layers.1.mlp.down_proj"
OTHER_SHAPES = r"down_proj\.weight_scale \(191, 1\) instead of \(192,\) or \(192, 1\)"
OTHER_TYPE = r"down_proj\.weight torch\.%s instead of torch\.float8_e4m3fn"


def without_number(weight: torch.Tensor) -> torch.Tensor:
    spoilt = weight.clone()
    spoilt.view(torch.int8)[3, 5] = -1
    return spoilt


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (".weight_scale", lambda w, s: None, rf"missing: {DOWN}\.weight_scale$"),
        (".weight_scale_inv", lambda w, s: s.clone(), r"unexpected: .*weight_scale_inv$"),
        (".weight_scale", lambda w, s: s[:-1], OTHER_SHAPES),
        (".weight_scale", lambda w, s: s.expand(-1, 2).contiguous(), r"weight_scale \(192, 2\)"),
        (".weight_scale", lambda w, s: s.to(w.dtype), r"weight_scale torch\.float8_e4m3fn"),
        (".weight_scale", lambda w, s: s / 0, r"weight_scale holds a number that is infinite"),
        (".weight_scale", lambda w, s: -s, r"weight_scale holds a number that is .*negative"),
        (".weight", lambda w, s: without_number(w), r"down_proj\.weight holds a NaN"),
        (".weight", lambda w, s: w.float(), OTHER_TYPE % "float32"),
        (".weight", lambda w, s: w.view(torch.int8), OTHER_TYPE % "int8"),
        (".weight_zero_point", lambda w, s: s.to(torch.int8), r"unexpected: .*weight_zero_point"),
    ],
)
def test_scales_that_are_missing_or_odd_are_named(
    name: str, change: Callable[..., torch.Tensor | None], named: str, tmp_path: Path
) -> None:
    """I14, part, I2: nothing is computed with a matrix that config.json doesn't describe."""
    model = quantized_model(wide_model("llama"), "fp8-row")
    weight, scale = (model.tensors[DOWN + own] for own in (".weight", ".weight_scale"))
    tensors = {**model.tensors, DOWN + name: change(weight, scale)}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    model._replace(tensors=kept).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=named):
        load_weights(tmp_path, model.config, dtype=torch.float32, device="cpu")


def test_packed_values_need_their_true_shape(tmp_path: Path) -> None:
    model = quantized_model(wide_model("llama"), "int8-packed")
    name = "model.layers.0.mlp.down_proj.weight_shape"
    model._replace(tensors={**model.tensors, name: torch.tensor([192, 999])}).save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"down_proj\.weight_shape is \[192, 999\]"):
        load_weights(tmp_path, model.config, dtype=torch.float32, device="cpu")


def test_scales_have_either_name_and_any_of_their_shapes(tmp_path: Path) -> None:
    """I14, part: weight_scale or weight_scale_inv; [out] or [out, 1]; a scalar or [1]."""
    for i, form in enumerate(("fp8-block", "fp8-row", "fp8-tensor")):
        model = quantized_model(wide_model("llama"), cast(Form, form))
        expected = logits(model.forward())
        other = {}
        for name, tensor in model.tensors.items():
            stem = name.removesuffix("_inv")
            is_scale = stem.endswith(".weight_scale")
            swapped = stem if stem != name else name + "_inv"
            flat = tensor if form == "fp8-block" else tensor.flatten()
            other[swapped if is_scale else name] = (
                (flat.reshape(()) if form == "fp8-tensor" else flat) if is_scale else tensor
            )
        model._replace(tensors=other).save(tmp_path / str(i))
        assert torch.equal(logits(load(tmp_path / str(i), num_blocks=64, block_size=4)), expected)


def test_stored_scales_of_activations_are_read_and_not_used(tmp_path: Path) -> None:
    """I14, part: static activations stay floats, which loses nothing."""
    static = quantized_model(wide_model("llama"), "fp8-tensor", activations="static")
    assert any(name.endswith(".input_scale") for name in static.tensors)
    assert torch.equal(
        logits(static.forward()),
        logits(quantized_model(wide_model("llama"), "fp8-tensor").forward()),
    )
    name = "model.layers.0.mlp.down_proj.input_scale"
    odd = static._replace(tensors={**static.tensors, name: torch.ones(7)})
    with pytest.raises(WeightsMismatch, match=r"down_proj\.input_scale \(7,\)"):
        odd.forward()


def test_the_spec_and_the_stored_kv_tell_forms_apart(tmp_path: Path) -> None:
    """I14, part: fingerprint and KV identity; names of the matrices count too."""
    specs = []
    for i, form in enumerate(FORMS):
        for activations in ("float", "dynamic"):
            model = quantized_model(wide_model("llama"), form, activations=cast(Any, activations))
            folder = tmp_path / f"{i}{activations}"
            model.save(folder)
            specs.append(load(folder, num_blocks=16).spec)
    fingerprints = {spec.fingerprint for spec in specs}
    assert len(fingerprints) == 2 * len(FORMS) - 1  # FP8 blocks always round activations
    named = {dict(spec.kv_fields)["quantization"] for spec in specs}
    assert len(named) == len(fingerprints)
    same = [
        model_spec(
            quantized_model(wide_model("llama"), "int8-row", ignored=ignored).config,
            name="m",
            weights_digest="",
            dtype="float32",
            max_model_len=None,
        ).fingerprint
        for ignored in (("lm_head",), ("lm_head", "model.layers.0.mlp.up_proj"))
    ]
    assert same[0] != same[1]


def test_new_weights_must_have_the_same_form(tmp_path: Path) -> None:
    model = wide_model("llama")
    forward = quantized_model(model, "int8-row").forward()
    quantized_model(model, "fp8-row").save(tmp_path)
    with pytest.raises(WeightsMismatch, match="differs from the served model's in quantization"):
        forward.prepare_update(tmp_path, forward.spec.weights)


def test_loading_says_the_form_and_the_products(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """I14, part: one line at load."""
    model = quantized_model(wide_model("llama"), "int8-row", activations="dynamic")
    model.save(tmp_path)
    with caplog.at_level(logging.INFO):
        load(tmp_path, num_blocks=16, dtype="bfloat16")
    (line,) = [r.getMessage() for r in caplog.records if "in memory" in r.getMessage()]
    assert "compressed-tensors: INT8, a scale per row, dynamic activations" in line
    assert "8 of int8 times int8" in line


# Memory

LLAMA_31_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
NUM_TOKENS = 8192
SMALL_GPU = DeviceMemory("a GPU of 16 GB", total=16 * 10**9, free=16 * 10**9 - 600 * 2**20)


def weights_of_8b(form: Form) -> tuple[ModelConfig, ModelWeights]:
    """Llama 3.1 8B as the loader makes it, of tensors without memory."""
    config = parse_config({**LLAMA_31_8B, "quantization_config": quantization_config(form)})
    tensors = {
        name: torch.empty(own.shapes[-1], dtype=own.dtypes[len(own.dtypes) > 1])
        for name, own in expected_tensors(config, ()).items()
    }
    return config, fuse_weights(tensors, config, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("form", ["fp8-block", "fp8-row", "fp8-tensor", "int8-row"])
def test_an_8b_model_and_8k_tokens_fit_into_16_gb(form: Form) -> None:
    """I14, part: by the loader's own tensors and the budget that serves, all its reserves counted."""
    with torch.device("meta"):
        config, weights = weights_of_8b(form)
    linear = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    tables = 2 * 2 * 128256 * 4096  # bfloat16: embeddings, and a head that is left so
    norms = 65 * 4096 * 2
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)  # a scale of a tensor is kept by row
    scales = 4 * (linear // BLOCK**2 if form == "fp8-block" else rows)
    assert weights.nbytes == linear + tables + norms + scales
    spec = model_spec(
        config, name="m", weights_digest="", dtype="bfloat16", max_model_len=NUM_TOKENS
    )
    assert spec.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    room = Room(lambda _: SMALL_GPU)
    budget = room.split(SMALL_GPU, work_of(config, weights, spec, 16, room))
    assert sum(nbytes for _, nbytes in budget.lines()) == SMALL_GPU.total
    assert budget.kv >= NUM_TOKENS * spec.kv_bytes_per_token
