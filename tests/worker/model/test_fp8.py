"""KV in float8 (emulated on a CPU): half the bytes, nearly the same logits, forks as exact as ever.

Then checkpoints that store scales of it: what is written and read with them, and what is refused.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bench.doubles.quantized import quantized_model, with_kv_scales
from bench.doubles.random_model import RandomModel, random_model
from mallee.protocol.errors import ConfigError, WeightsMismatch
from mallee.protocol.messages import Sampling
from mallee.protocol.model import WeightVersion
from mallee.worker.forward import Draw
from mallee.worker.model.config import FAMILIES, resolve_kv_dtype
from mallee.worker.model.loading.weights import fuse_weights
from mallee.worker.model.ops import write
from mallee.worker.model.runner import load

DENSE = [name for name, family in FAMILIES.items() if not family.is_hybrid]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 128, n)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_bytes_hold_twice_or_four_times_the_tokens(dtype: str, tmp_path: Path) -> None:
    """D31, part, S9, I22: capacity at equal bytes; the spec's formula equals what is allocated."""
    random_model().save(tmp_path)
    budget = 50 * 16 * 2 * 2 * 2 * 16 * 4 + 100
    wide = load(tmp_path, kv_budget_bytes=budget, dtype=dtype)
    narrow = load(tmp_path, kv_budget_bytes=budget, dtype=dtype, kv_dtype="fp8")
    assert narrow.num_blocks == wide.num_blocks * {"bfloat16": 2, "float32": 4}[dtype]
    for forward, nbytes in ((wide, {"bfloat16": 2, "float32": 4}[dtype]), (narrow, 1)):
        per_token = 2 * 2 * 2 * 16 * nbytes
        assert forward.spec.kv_bytes_per_token == per_token
        assert forward.memory_stats().kv == forward.num_blocks * 16 * per_token
        forward.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_within_five_hundredths(
    family: str, dtype: str, sequences: Callable[..., Any]
) -> None:
    """D31, part: relative L2 distance from KV in the model's dtype, over prefill, chunks and decodes.

    Of tiny models whose projections are half as wide as our usual ones: with those, which make
    attention sharper than checkpoints do, it is 0.12 for Llama, 0.06 for Qwen 3, 0.03 for Gemma 3.
    """
    model = random_model(family, 4)
    for name, tensor in model.tensors.items():
        if "_proj" in name:
            tensor *= 0.5
    runs = [sequences(model.forward(dtype=dtype, kv_dtype=kv)) for kv in ("auto", "fp8")]
    tokens, done = prompt(70), 0
    found: list[list[torch.Tensor]] = [[], []]
    for n in (30, 12, *(1,) * 28):
        for own, run in zip(found, runs, strict=True):
            own += run.step(run.row("a", tokens[done : done + n]))
        done += n
    exact, rounded = (torch.stack(own).float() for own in found)
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 5e-2


def test_chunks_see_rounded_keys_of_their_own_step_too(sequences: Callable[..., Any]) -> None:
    """I6: what a token sees doesn't depend on how the prompt was cut."""
    model, tokens = random_model("qwen3", 5), prompt(50)
    whole, cut = (sequences(model.forward(kv_dtype="fp8")) for _ in range(2))
    expected = whole.step(whole.row("a", tokens))[0]
    for begin in range(0, 50, 10):
        found = cut.step(cut.row("a", tokens[begin : begin + 10]))[0]
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fork_holds_the_same_bytes_and_says_the_same_as_a_linear_run(
    family: str, sequences: Callable[..., Any]
) -> None:
    """D19, D31, part: the copied slots are the parent's bytes; sampled text and logits are bit-equal."""
    model = random_model(family, 6)
    forked, linear = (sequences(model.forward(kv_dtype="fp8", num_blocks=100)) for _ in range(2))
    sampling = Sampling(temperature=0.8)
    tokens = prompt(42)
    logits = forked.step(forked.row("parent", tokens))[0]
    copies = forked.fork("parent", "child")
    assert [copy.num_slots for copy in copies] == [2]
    expected = linear.step(linear.row("child", tokens))[0]
    for step in range(20):
        assert torch.equal(logits, expected)
        (token,) = forked.forward.sample([Draw(logits, sampling, 5, 42 + step)])
        expected = linear.step(linear.row("child", [token]))[0]
        logits = forked.step(forked.row("child", [token]), copies=copies)[0]
        copies = []
    held = [_bytes_of(run, "child") for run in (forked, linear)]
    assert torch.equal(*held)
    assert torch.equal(_bytes_of(forked, "parent"), held[0][:, :42])


def _bytes_of(run: Any, name: str) -> torch.Tensor:
    """[num_layers, tokens, ...] as the pool holds them."""
    memory, size = run.forward._memory.view(torch.uint8), run.forward.block_size
    at = torch.arange(len(run.tokens[name]))
    slots = torch.tensor(run.tables[name])[at // size] * size + at % size
    return memory[:, slots]


@pytest.mark.parametrize(
    ("kv_dtype", "fields", "says"),
    [
        ("fp4", {}, "'fp4' is planned, .* until then give fp8"),
        ("mxfp8", {}, "is planned"),
        ("int8", {}, "give auto .* or fp8"),
        ("fp8", {"head_dim": 24}, "head_dim in multiples of 16, this model has 24"),
    ],
)
def test_other_formats_and_odd_dimensions_are_refused(
    kv_dtype: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """D39: the message names the plan; FP8 asks for dimensions in multiples of 16."""
    model = random_model(**fields)
    model.save(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, num_blocks=2, kv_dtype=kv_dtype)
    assert resolve_kv_dtype("auto", model.config, "float32") == "float32"


# Stored scales

FP8 = torch.float8_e4m3fn
PROMPT = prompt(60, 3)
FORMS = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
]
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def e4m3(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest float8 e4m3 of each, ties to even fractions, saturated: by its definition."""
    size = np.abs(values.astype(np.float64))
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-40))), -6)
    step = 2.0 ** (exponent - 3)
    rounded = np.minimum(np.round(size / step) * step, 448.0)  # np.round: half to even
    return np.copysign(rounded, values).astype(np.float32)


def run_text(run: Any) -> torch.Tensor:
    """Logits of a prompt in two chunks, and of ten decode steps."""
    found = run.step(run.row("a", PROMPT[:30])) + run.step(run.row("a", PROMPT[30:50]))
    for token in PROMPT[50:]:
        found += run.step(run.row("a", [token]))
    return torch.stack(found).float()


def test_memory_holds_shares_of_the_scales_rounded_once() -> None:
    """D31, part: against float8 by its definition in numpy, byte by byte; beyond 448 shares saturate.

    Never a NaN, which would spoil every token that sees it. Without scales the values are their own shares.
    """
    kv = torch.randn(4096, 2, 2, 16, generator=torch.Generator().manual_seed(1)) * 3
    kv[7, 0, 0, 0], kv[8, 1, 1, 1] = 1e9, -1e9
    for dtype in (torch.float32, torch.bfloat16):
        for scales in (torch.tensor([0.013, 0.00047]), None):
            own, memory = kv.to(dtype), torch.zeros(4096, 2, 2, 16, dtype=FP8)
            write(memory, torch.arange(4096), own, scales)
            divisors = torch.ones(2) if scales is None else scales
            shares = own.float().numpy() / divisors.numpy()[:, None, None]
            assert memory.float().numpy().tobytes() == e4m3(shares).tobytes()
            assert memory[7, 0, 0, 0].float() == 448


@pytest.mark.parametrize("family", DENSE)
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


@pytest.mark.parametrize("form", ["fp8-tensor", "fp8-row", "int8-row", None])
def test_a_config_json_says_that_there_are_scales(form: Any, tmp_path: Path) -> None:
    """D31, part, I14, part: "static" in AutoFP8, a scheme in llm-compressor, which may say nothing else."""
    model = random_model()
    given = {"quant_method": "compressed-tensors", "config_groups": {}}
    is_auto = form == "fp8-tensor"
    if form is not None:
        model = quantized_model(model, form, activations="dynamic" if is_auto else "float")
        given = model.raw["quantization_config"]
    given = {**given, "kv_cache_scheme": "static" if is_auto else KV_SCHEME}
    model = RandomModel({**model.raw, "quantization_config": given}, model.tensors)
    with_kv_scales(model).save(tmp_path)
    forward = load(tmp_path, num_blocks=4, kv_dtype="fp8")
    assert forward.decoder.weights.layers[1].kv_scales is not None
    named = forward.spec.kv_identity()["quantization"]
    assert named.endswith("scales of FP8 KV")
    assert (named == "compressed-tensors: scales of FP8 KV") == (form is None)
    model.save(tmp_path)
    with pytest.raises(WeightsMismatch, match=r"missing: .*layers\.0\.self_attn\.k_scale"):
        load(tmp_path, num_blocks=4, kv_dtype="fp8")


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
    old.update(old.prepare_update(tmp_path / "new", WeightVersion(1, "new", str(tmp_path / "new"))))
    assert torch.equal(run_text(sequences(old)), run_text(sequences(alone)))


def test_scales_of_a_model_without_bytes_are_not_looked_at() -> None:
    """The bytes of a checkpoint are known before it is loaded."""
    model = with_kv_scales(random_model())
    tensors = {name: tensor.to("meta") for name, tensor in model.tensors.items()}
    weights = fuse_weights(tensors, model.config, dtype=torch.float32, device="meta", kv_dtype=FP8)
    scales = weights.layers[0].kv_scales
    assert scales is not None
    assert scales.is_meta
