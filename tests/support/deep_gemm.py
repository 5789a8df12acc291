"""The kernel that FlashInfer's FP8 block GEMM takes on Hopper, by its source.

Source: FlashInfer 0.7.2, gemm_dispatch of fp8_blockscale_gemm_kernel.cuh, get_best_gemm_config and
get_smem_size of deep_gemm/jit_utils.cuh.
"""

from typing import NamedTuple

_SHARED_MEMORY = 232_448


class Tile(NamedTuple):
    """With the matrix's shape, the parameters that a kernel is compiled for."""

    is_swapped: bool
    m: int
    n: int
    num_stages: int
    num_multicast: int


def deep_gemm_tile(num_rows: int, rows: int, width: int, *, num_sms: int = 132) -> Tile:
    """The kernel of a product of `num_rows` activations with a matrix [rows, width]."""
    is_swapped = num_rows < 32
    m, n = (rows, num_rows) if is_swapped else (num_rows, rows)
    tile_m = 64 if m <= 64 else 128

    def cost(tile_n: int) -> tuple[int, int, int]:
        """Waves of thread blocks, those that the last one lacks, and the tile itself."""
        num_tiles = -(-m // tile_m) * -(-n // tile_n)
        return -(-num_tiles // num_sms), -(num_tiles % num_sms or num_sms), tile_n

    tile_n = min(range(16, 129, 8), key=cost)
    stages = (8, 7, 6, 5, 4) if 128 % tile_n == 0 else (6, 5, 4)
    num_stages = next(
        (
            each
            for each in stages
            if _nbytes(each, width, tile_m, tile_n, is_swapped) <= _SHARED_MEMORY
        ),
        0,
    )
    is_wide, whole, tile = (n >= 1024, m, tile_m) if is_swapped else (m >= 1024, n, tile_n)
    is_shared = is_wide and whole % (2 * tile) == 0 and num_sms % 2 == 0
    return Tile(is_swapped, tile_m, tile_n, num_stages, 2 if is_shared else 1)


def _nbytes(num_stages: int, width: int, m: int, n: int, is_swapped: bool) -> int:
    """Shared memory of a thread block."""
    scales = -(-width // 128) * 4
    if is_swapped:
        own = 128 * m + -(-4 * n // 128) * 128 + 128 * n
    else:
        own = 128 * m + 4 * m + 128 * n
        scales *= 1 if 128 % n == 0 else 2
    return 2 * m * n + num_stages * (own + 16) + -(-scales // 8) * 8
