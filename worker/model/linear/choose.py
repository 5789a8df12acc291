"""Chooses the product for each matrix, once, when it is loaded."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mallee.worker.model.cpu.linear import cpu_linear
from mallee.worker.model.kernels.triton_launch import NoTriton, TritonKernels
from mallee.worker.model.linear.base import Linear, SideBySide
from mallee.worker.model.linear.block_gemm import ROWS, block_gemm
from mallee.worker.model.linear.matrix import Matrix, Quantized, fused, runs
from mallee.worker.model.linear.plain import Plain
from mallee.worker.model.linear.rounded import RoundedFloat8
from mallee.worker.model.linear.weight_only import weight_only

log = logging.getLogger(__name__)

_FLOAT8_CAPABILITY = (8, 9)
_MOST_ERROR = 0.1
"""Of a row, by the root of its mean square: activations that are rounded to float8 cost 0.03."""


class Machine(NamedTuple):
    """The device that multiplies: "cpu" or "cuda", whose compute capability tells its kernels."""

    kind: str
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, device: str | torch.device) -> "Machine":
        kind = torch.device(device).type
        return cls(kind, torch.cuda.get_device_capability(device)) if kind == "cuda" else cls(kind)


def make_linear(parts: Sequence[Matrix], dtype: torch.dtype, machine: Machine) -> Linear:
    """The product with the rows of all `parts`, in order, for activations of `dtype`.

    Parts are fused where one matrix can mean the same as both; plain ones come in `dtype`.
    """
    products = [_product(fused(run), dtype, machine) for run in runs(parts)]
    return products[0] if len(products) == 1 else SideBySide(products)


def _product(matrix: Matrix, dtype: torch.dtype, machine: Machine) -> Linear:
    """In float32 the exact one: activations are rounded to 8 bits only where they are rounded already."""
    if machine.kind == "cpu":
        return cpu_linear(matrix, dtype)
    if isinstance(matrix, torch.Tensor):
        return Plain.view(matrix)
    reference = weight_only(matrix)
    if dtype == torch.bfloat16 and machine.kind == "cuda":
        return _proven(_on_gpu(matrix, machine.capability), reference, matrix)
    return reference


def _on_gpu(matrix: Quantized, capability: tuple[int, int]) -> list[Linear]:
    """The products of 8 bits that this GPU may have, the best first."""
    is_float8 = matrix.scheme.values == "float8_e4m3fn" and capability >= _FLOAT8_CAPABILITY
    if not is_float8 or matrix.scheme.activations != "dynamic":
        return []
    if matrix.has_blocks:
        blocks = block_gemm(matrix, capability)
        return [] if blocks is None else [blocks]
    try:
        return [RoundedFloat8(matrix, TritonKernels.load()), RoundedFloat8(matrix)]
    except NoTriton:  # `choose_ops` tells why
        return [RoundedFloat8(matrix)]


def _proven(products: Sequence[Linear], reference: Linear, matrix: Quantized) -> Linear:
    """The first of `products` that runs here and gives about what `reference` does, for each of `ROWS`.

    If there is none, `reference`. A warning tells of each that fails. All that a product compiles for later
    numbers of rows is compiled here.
    """
    if not products:
        return reference
    values = matrix.values
    generator = torch.Generator(values.device).manual_seed(0)
    shape = (max(ROWS), values.shape[1])
    x = torch.randn(shape, generator=generator, device=values.device).to(torch.bfloat16)
    expected = reference(x).float()
    for product in products:
        try:
            errors = [_error(product(x[:n]), expected[:n]) for n in ROWS]
            worst, n = max(zip(torch.stack(errors).tolist(), ROWS, strict=True))
        except (RuntimeError, ValueError) as e:
            log.warning("%s doesn't run here (%s): another is tried", product.label, e)
            continue
        if worst < _MOST_ERROR:
            return product
        text = "%s is wrong by %.2g here, for %d rows: another is tried"
        log.warning(text, product.label, worst, n)
    return reference


def _error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest of a row; infinite where a number is none."""
    size = expected.norm(dim=1).clamp_min(1e-30)
    worst: torch.Tensor = ((found.float() - expected).norm(dim=1) / size).max()
    return worst.nan_to_num(nan=torch.inf)
