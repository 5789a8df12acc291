"""Products with FP8 blocks by FlashInfer's kernels, which round activations by groups of 128 to FP8.

An optional package, imported when such a matrix is loaded. Names and arguments are those of FlashInfer
0.7.2, read in its source. No kernel of these has run yet: a product is tried before it is taken.

On Hopper it compiles a kernel for each shape of the matrix and each tile that it takes for a number of rows
(get_best_gemm_config of deep_gemm/jit_utils.cuh), some seconds each, and keeps it on disk. `ROWS` have one of
each tile up to `MOST_ROWS`; more rows go in pieces. So what is tried for `ROWS` compiles nothing later.
"""

import importlib
from types import ModuleType
from typing import Final

import torch

from mallee.worker.model.linear.base import Linear, QuantizedLinear
from mallee.worker.model.linear.matrix import Quantized
from mallee.worker.model.linear.rounded import rounded_rows
from mallee.worker.model.linear.scheme import BLOCK

_HOPPER = (9, 0)
_BLACKWELL = ((10, 0), (10, 3), (12, 0), (12, 1))
_MULTIPLE = 4  # of rows, for the Blackwell kernel
MOST_ROWS: Final = 512
ROWS: Final = (1, 16, 17, 24, 25, 31, 32, 64, 65, 128, 129, 256, 257, 384, 385, MOST_ROWS)
"""The least and the most rows of each tile: by 8 rows from 16 on, from 32 on by 64, then 128."""


def block_gemm(matrix: Quantized, capability: tuple[int, int]) -> Linear | None:
    """None if the package is absent, or has no kernel for this GPU or this shape."""
    rows, width = matrix.values.shape
    if rows % BLOCK or width % BLOCK or capability not in (_HOPPER, *_BLACKWELL):
        return None
    try:
        kernels = importlib.import_module("flashinfer.gemm")
    except ImportError:
        return None
    return _Hopper(matrix, kernels) if capability == _HOPPER else _Blackwell(matrix, kernels)


class _BlockGemm(QuantizedLinear):
    __slots__ = ("_kernels",)

    def __init__(self, matrix: Quantized, kernels: ModuleType) -> None:
        super().__init__(matrix)
        self._kernels = kernels

    @property
    def label(self) -> str:
        return "float8 times float8 in blocks, by FlashInfer"


class _Hopper(_BlockGemm):
    """The kernel rounds the activations itself."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        x, out = x.contiguous(), x.new_empty((len(x), len(values)))
        for i in range(0, len(x), MOST_ROWS):
            piece = slice(i, i + MOST_ROWS)
            self._kernels.fp8_blockscale_gemm_sm90(x[piece], values, None, scales, out=out[piece])
        return out


class _Blackwell(_BlockGemm):
    """The activations are rounded here; rows are filled up to a multiple of 4."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales, _ = self._matrix
        n, width = x.shape
        filled = torch.nn.functional.pad(x, (0, 0, 0, -n % _MULTIPLE))
        rounded, own = rounded_rows(filled.reshape(-1, BLOCK), torch.float8_e4m3fn)
        found: torch.Tensor = self._kernels.gemm_fp8_nt_groupwise(
            rounded.view(-1, width),
            values,
            own.view(-1, width // BLOCK),
            scales,
            scale_major_mode="K",
            out_dtype=x.dtype,
        )
        return found[:n]
