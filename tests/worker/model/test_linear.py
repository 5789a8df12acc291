"""Products with matrices of 8 bits: each against numpy's integers or float64, and the choice between them."""

import logging
import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.quantized import FORMS, Activations, Form, quantized_tensors
from mallee.worker.model.cpu.linear import FewRows, RoundedInt8
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.block_gemm import MOST_ROWS, ROWS
from mallee.worker.model.linear.choose import Machine, make_linear
from mallee.worker.model.linear.matrix import Quantized
from mallee.worker.model.linear.rounded import RoundedFloat8, rounded_rows
from mallee.worker.model.linear.scheme import BLOCK, Scheme
from mallee.worker.model.linear.weight_only import BlockScaled, RowScaled, weight_only
from support.deep_gemm import deep_gemm_tile
from support.recorded_graphs import RecordedGraphs

CPU, H100, B200, A100 = (
    Machine("cpu"),
    *(Machine("cuda", capability) for capability in ((9, 0), (10, 0), (8, 0))),
)
HALF, FLOAT = torch.bfloat16, torch.float32
UNPACKED = tuple(form for form in FORMS if form != "int8-packed")


def made(
    rows: int, width: int, form: Form, activations: Activations = "float", seed: int = 0
) -> Quantized:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) / width**0.5
    tensors = quantized_tensors({"o_proj.weight": weight}, form)
    kind, scales = form.split("-")
    scale = next(t for n, t in tensors.items() if "scale" in n)
    if scales != "block":
        scale = scale.reshape(-1, 1).expand(rows, 1).contiguous()
    values: Any = "float8_e4m3fn" if kind == "fp8" else "int8"
    scheme = Scheme(values, cast(Any, scales), activations)
    return Quantized(tensors["o_proj.weight"], scale, scheme)


def exact(matrix: Quantized) -> torch.Tensor:
    """W in float64."""
    values, scales, _ = matrix
    if matrix.has_blocks:
        rows, columns = np.indices(values.shape) // BLOCK
        return values.double() * scales.double()[rows, columns]
    return values.double() * scales.double()


def random(*shape: int, seed: int = 1, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a share of the largest number."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("form", UNPACKED)
@pytest.mark.parametrize(("rows", "width"), [(128, 256), (200, 144), (16, 16), (1300, 1024)])
def test_the_reference_multiplies_by_values_times_scales(
    form: Form, dtype: torch.dtype, rows: int, width: int
) -> None:
    """I14, part: any shape, cut blocks, several chunks (1300 rows), with and without a residual.

    For int8 below 17 rows also by torch's own kernel.
    """
    matrix = made(rows, width, form)
    linears: list[Linear] = [weight_only(matrix)]
    assert isinstance(linears[0], BlockScaled if form == "fp8-block" else RowScaled)
    assert linears[0].nbytes_beside(torch.empty(1)) == rows * width + matrix.scales.nbytes
    if form == "int8-row" and dtype == HALF:
        linears.append(FewRows(matrix))
    for n, linear in product((1, 5, 16, 17, 33), linears):
        x, residual = random(n, width, dtype=dtype), random(n, rows, seed=2, dtype=dtype)
        expected = x.double() @ exact(matrix).t()
        bound = 1e-5 if dtype == FLOAT else 1e-2
        found = linear(x)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert error(found, expected) < bound
        kept = residual.clone()
        assert error(linear.add(x, residual), expected + residual.double()) < bound
        assert torch.equal(residual, kept)


def test_int8_times_int8_is_exact_in_whole_numbers() -> None:
    """I14, part: against numpy's 64-bit integers of the same rounded activations."""
    matrix = made(208, 144, "int8-row", "dynamic")
    x = random(9, 144, dtype=HALF)
    x[4] = 0
    rounded, scales = rounded_rows(x, torch.int8)
    whole = rounded.numpy().astype(np.int64) @ matrix.values.numpy().astype(np.int64).T
    expected = torch.from_numpy(whole).double() * scales.double() * matrix.scales.double().t()
    found = RoundedInt8(matrix)(x)
    assert error(found, expected) < 2**-8
    assert not found[4].any()
    assert 0 < error(found, x.double() @ exact(matrix).t()) < 0.03


@pytest.mark.parametrize("form", ["fp8-row", "fp8-tensor"])
def test_float8_times_float8_rounds_nothing_but_the_activations(form: Form) -> None:
    """I14, part: torch's operation on a CPU, as GPUs are to run it."""
    matrix = made(208, 144, form, "dynamic")
    x, residual = random(9, 144, dtype=HALF), random(9, 208, seed=2, dtype=HALF)
    rounded, scales = rounded_rows(x, torch.float8_e4m3fn)
    expected = (rounded.double() * scales.double()) @ exact(matrix).t()
    linear = RoundedFloat8(matrix)
    assert error(linear(x), expected) < 1e-2
    assert error(linear.add(x, residual), expected + residual.double()) < 1e-2
    assert 0 < error(linear(x), x.double() @ exact(matrix).t()) < 0.06


# Fused


@pytest.mark.parametrize(
    ("form", "heights", "num_products"),
    [
        ("fp8-block", (128, 256, 100), 1),
        ("fp8-block", (192, 64, 64), 3),  # a block would hold rows of two parts
        ("fp8-block", (64,), 1),
        *((form, (48, 16, 32), 1) for form in ("fp8-row", "fp8-tensor", "int8-row")),
    ],
)
def test_parts_are_fused_where_no_scale_is_of_two(
    form: Form, heights: tuple[int, ...], num_products: int
) -> None:
    """I14, part: fused scales stay right; what can't be fused is computed side by side."""
    parts = [made(rows, 144, form, seed=i) for i, rows in enumerate(heights)]
    linear = make_linear(parts, FLOAT, CPU)
    x, expected = random(3, 144), torch.cat([exact(part) for part in parts])
    assert error(linear(x), x.double() @ expected.t()) < 1e-5
    residual = random(3, len(expected), seed=3)
    assert error(linear.add(x, residual), residual + x.double() @ expected.t()) < 1e-5
    assert len(getattr(linear, "_parts", (linear,))) == num_products
    assert linear.nbytes_beside(x) == sum(part.nbytes for part in parts)


# Chosen


@pytest.mark.parametrize(
    ("form", "activations", "dtype", "machine", "chosen"),
    [
        ("int8-row", "float", HALF, CPU, FewRows),
        ("int8-row", "static", HALF, CPU, FewRows),
        ("int8-row", "dynamic", HALF, CPU, RoundedInt8),
        ("int8-row", "dynamic", FLOAT, CPU, RowScaled),
        ("fp8-row", "dynamic", HALF, CPU, RowScaled),
        ("fp8-block", "dynamic", HALF, CPU, BlockScaled),
        ("fp8-row", "dynamic", HALF, H100, RoundedFloat8),
        ("fp8-tensor", "dynamic", HALF, B200, RoundedFloat8),
        ("fp8-row", "dynamic", FLOAT, H100, RowScaled),
        ("fp8-row", "static", HALF, H100, RowScaled),
        ("fp8-row", "float", HALF, H100, RowScaled),
        ("fp8-row", "dynamic", HALF, A100, RowScaled),
        ("int8-row", "dynamic", HALF, H100, RowScaled),
        ("fp8-block", "dynamic", HALF, A100, BlockScaled),
    ],
)
def test_each_machine_has_its_product(
    form: Form, activations: Activations, dtype: torch.dtype, machine: Machine, chosen: type
) -> None:
    """I14, part: activations are rounded where the checkpoint asks and the hardware multiplies 8 bits."""
    found = make_linear([made(128, 144, form, activations)], dtype, machine)
    assert type(found) is chosen
    assert found.label


class _Broken:
    label = "broken"

    def __init__(self, matrix: Quantized) -> None:
        self._rows = len(matrix.values)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


class _Wrong(_Broken):
    label = "wrong"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(x), self._rows)


class _WrongForMany(RoundedFloat8):
    """In one row of 385 and more."""

    label = "wrong for many"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = super().__call__(x)
        if len(x) > 384:
            found[300] = torch.nan
        return found


@pytest.mark.parametrize(
    ("fast", "said"),
    [
        (_Broken, "broken doesn't run here (no kernel"),
        (_Wrong, "wrong is wrong by"),
        (_WrongForMany, "wrong for many is wrong by inf here, for 512 rows"),
    ],
)
def test_a_product_that_fails_its_trial_gives_way_with_a_warning(
    fast: type, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I14, part: what never ran on this GPU is tried when the model is loaded."""
    monkeypatch.setattr("mallee.worker.model.linear.choose.RoundedFloat8", fast)
    with caplog.at_level(logging.WARNING):
        found = make_linear([made(128, 144, "fp8-row", "dynamic")], HALF, H100)
    assert type(found) is RowScaled
    assert said in caplog.text


# FlashInfer, by a stand-in with the signatures and layouts of its source


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A `flashinfer.gemm` in torch; the names of the calls."""
    calls: list[str] = []

    def by_groups(a: Any, b: Any, a_scale: Any, b_scale: Any) -> torch.Tensor:
        left = a.double().view(len(a), -1, BLOCK) * a_scale.double()[:, :, None]
        return left.flatten(1) @ exact(Quantized(b, b_scale, _BLOCKS)).t()

    def fp8_blockscale_gemm_sm90(
        input: Any, weight: Any, input_scale: Any, weight_scale: Any, out: Any
    ) -> torch.Tensor:
        rows, width = weight.shape
        calls.append(f"sm90 {deep_gemm_tile(len(input), rows, width)}")
        assert input.dtype == out.dtype == HALF
        assert input.is_contiguous()
        assert out.is_contiguous()
        assert out.shape == (len(input), rows)
        assert input_scale is None
        assert weight_scale.shape == (-(-len(weight) // BLOCK), weight.shape[1] // BLOCK)
        rounded, own = rounded_rows(input.reshape(-1, BLOCK), torch.float8_e4m3fn)
        shape = (len(input), -1)
        out.copy_(by_groups(rounded.view(shape), weight, own.view(shape), weight_scale))
        return out

    def gemm_fp8_nt_groupwise(
        a: Any, b: Any, a_scale: Any, b_scale: Any, *, scale_major_mode: Any, out_dtype: Any
    ) -> torch.Tensor:
        calls.append("groupwise")
        assert len(a) % 4 == 0
        assert scale_major_mode == "K"
        assert a_scale.shape == (len(a), a.shape[1] // BLOCK)
        assert b_scale.shape == (len(b) // BLOCK, b.shape[1] // BLOCK)
        return by_groups(a, b, a_scale, b_scale).to(out_dtype)

    module = SimpleNamespace(
        fp8_blockscale_gemm_sm90=fp8_blockscale_gemm_sm90,
        gemm_fp8_nt_groupwise=gemm_fp8_nt_groupwise,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, SimpleNamespace(gemm=module)))
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", cast(Any, module))
    return calls


_BLOCKS = Scheme("float8_e4m3fn", "block", "dynamic")


@pytest.mark.parametrize(("machine", "call"), [(H100, "sm90"), (B200, "groupwise")])
def test_blocks_go_to_flashinfers_kernel_of_the_gpu(
    machine: Machine, call: str, kernels: list[str]
) -> None:
    """I14, part: arguments, layouts and rows filled up; on a stand-in."""
    matrix = made(256, 384, "fp8-block", "dynamic")
    linear = make_linear([matrix], HALF, machine)
    assert "FlashInfer" in linear.label
    tried = set(kernels)
    assert all(each.startswith(call) for each in tried)
    for n in (1, 4, 7, 31, 32, 128, 511, 512, 513, 1400):
        x, residual = random(n, 384, dtype=HALF), random(n, 256, seed=2, dtype=HALF)
        expected = x.double() @ exact(matrix).t()
        assert linear(x).shape == (n, 256)
        assert error(linear(x), expected) < 0.06
        assert error(linear.add(x, residual), expected + residual.double()) < 0.06
    assert set(kernels) == tried, "a kernel is compiled in a step"


@given(
    st.integers(1, 320),
    st.integers(1, 160),
    st.sampled_from([132, 114, 78]),
)
def test_each_number_of_rows_has_a_kernel_that_was_tried(rows: int, width: int, sms: int) -> None:
    """I14, part: for matrices of any shape, on several GPUs of Hopper's."""
    shape = (128 * rows, 128 * width)
    tried = {deep_gemm_tile(n, *shape, num_sms=sms) for n in ROWS}
    assert {deep_gemm_tile(n, *shape, num_sms=sms) for n in range(1, MOST_ROWS + 1)} == tried


@pytest.mark.parametrize(
    ("rows", "width", "capability"),
    [(200, 384, (9, 0)), (256, 144, (9, 0)), (256, 384, (8, 9)), (128, 384, (9, 0))],
)
def test_blocks_without_a_kernel_are_widened(
    rows: int,
    width: int,
    capability: tuple[int, int],
    kernels: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of other shapes, on other GPUs, and where FlashInfer is not installed."""
    if rows == 128:
        monkeypatch.setitem(sys.modules, "flashinfer.gemm", None)
    linear = make_linear(
        [made(rows, width, "fp8-block", "dynamic")], HALF, Machine("cuda", capability)
    )
    assert type(linear) is BlockScaled
    assert not kernels


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("form", UNPACKED)
def test_a_product_can_be_part_of_a_graph(form: Form, n: int) -> None:
    """I13, part: none waits for the device, takes numbers from the host, or reads where it read by chance."""
    matrix = made(128, 256, form)
    products: list[Linear] = [weight_only(matrix)]
    if form.startswith("fp8") and not matrix.has_blocks:
        products.append(RoundedFloat8(matrix))
    for linear in products:
        x = random(n, 256, dtype=HALF)
        out = torch.zeros(n, 128, dtype=HALF)
        graph = RecordedGraphs().capture(partial(_copied, linear, x, out), None)
        x.copy_(random(n, 256, seed=7))
        graph.replay()
        assert torch.equal(out, linear(x))


def _copied(linear: Linear, x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(linear(x))
