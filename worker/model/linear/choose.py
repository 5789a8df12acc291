"""Chooses the product for each matrix, once, when it is loaded."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.block_gemm import block_gemm
from mallee.worker.model.linear.int8_rows import FewRows
from mallee.worker.model.linear.matrix import Matrix, Quantized, fused, runs
from mallee.worker.model.linear.plain import plain_linear
from mallee.worker.model.linear.rounded import RoundedFloat8, RoundedInt8
from mallee.worker.model.linear.side_by_side import SideBySide
from mallee.worker.model.linear.weight_only import weight_only

log = logging.getLogger(__name__)

_FLOAT8_CAPABILITY = (8, 9)
_MOST_ERROR = 0.1  # of the largest number of a product with one row of rounded activations


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
    if isinstance(matrix, torch.Tensor):
        return plain_linear(matrix)
    if dtype == torch.bfloat16 and machine.kind == "cpu":
        return _on_cpu(matrix)
    reference = weight_only(matrix)
    if dtype == torch.bfloat16 and machine.kind == "cuda":
        fast = _on_gpu(matrix, machine.capability)
        return reference if fast is None else _proven(fast, reference, matrix)
    return reference


def _on_cpu(matrix: Quantized) -> Linear:
    if matrix.scheme.values != "int8" or matrix.has_blocks:
        return weight_only(matrix)
    return RoundedInt8(matrix) if matrix.scheme.activations == "dynamic" else FewRows(matrix)


def _on_gpu(matrix: Quantized, capability: tuple[int, int]) -> Linear | None:
    is_float8 = matrix.scheme.values == "float8_e4m3fn" and capability >= _FLOAT8_CAPABILITY
    if not is_float8 or matrix.scheme.activations != "dynamic":
        return None
    return block_gemm(matrix, capability) if matrix.has_blocks else RoundedFloat8(matrix)


def _proven(fast: Linear, reference: Linear, matrix: Quantized) -> Linear:
    """`fast` if it runs here and gives about what `reference` does for one row; else that, with a warning."""
    values = matrix.values
    x = torch.linspace(-1, 1, values.shape[1], device=values.device).to(torch.bfloat16)[None]
    expected = reference(x).float()
    try:
        error = float((fast(x).float() - expected).abs().max() / expected.abs().max())
    except (RuntimeError, ValueError) as e:
        log.warning("%s doesn't run here (%s); instead: %s", fast.label, e, reference.label)
        return reference
    if error < _MOST_ERROR:
        return fast
    log.warning("%s is wrong by %.2g here; instead: %s", fast.label, error, reference.label)
    return reference
