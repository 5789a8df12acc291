"""Products of bfloat16 by Intel AMX's tiles, as calls into LLVM's intrinsics.

A tile register holds 16 rows of 64 bytes. `tile_dot(c, a, b)` adds to c [16, 16] float32 the product of
a [16, 32] bfloat16, rows as in memory, and b [32, 16] bfloat16 with rows 2 i and 2 i + 1 interleaved
(word c of line i holds b[2 i, c] in its low and b[2 i + 1, c] in its high half). Tile numbers must be
literals. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, chapter 18.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from mallee.worker.model.cpu.jit import fill, halves, inner, literal_primitive, primitive
from mallee.worker.model.cpu.layout import LINE, TILE, VALUES, Scratch, run_at
from mallee.worker.model.cpu.vectors import call, transpose

_I8 = ir.IntType(8)


@literal_primitive
def tile_zero(typing_context: Any, tile: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.Constant(_I8, signature.args[0].literal_value)
        call(builder, "llvm.x86.tilezero", ir.VoidType(), [number])
        return context.get_dummy_value()

    return types.void(tile), generate


def _tile_move(name: str) -> Any:
    @literal_primitive
    def move(typing_context: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = ir.Constant(_I8, signature.args[0].literal_value)
            memory = builder.inttoptr(args[1], _I8.as_pointer())
            stride = context.cast(builder, args[2], signature.args[2], types.int64)
            call(builder, name, ir.VoidType(), [number, memory, stride])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    return move


tile_load = _tile_move("llvm.x86.tileloadd64")
"""tile_load(tile, address, stride): 16 lines of 64 bytes, `stride` bytes apart."""
tile_store = _tile_move("llvm.x86.tilestored64")


@literal_primitive
def tile_dot(typing_context: Any, c: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = [ir.Constant(_I8, tile.literal_value) for tile in signature.args]
        call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), numbers)
        return context.get_dummy_value()

    return types.void(c, a, b), generate


def _configuration(name: str) -> Any:
    @primitive
    def configure(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = builder.inttoptr(args[0], _I8.as_pointer())
            call(builder, name, ir.VoidType(), [memory])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return configure


tiles_configure = _configuration("llvm.x86.ldtilecfg")
"""Set up the tiles as the 64 bytes at an address say; all of them become 0."""
tiles_save = _configuration("llvm.x86.sttilecfg")
"""Write the present configuration there: a thread's other users of tiles expect to find theirs."""


@inner
def score(
    keys: int, runs: Any, first: int, count: int, stride: int, queries: int, n: int, out: int
) -> None:
    """out [count, 16] = scores of slots first .. first + count; n is dim / 32.

    Four runs at a time: as many sums are under way at once as the unit needs to be busy.
    """
    done = 0
    while done + 64 <= count:
        k0 = run_at(keys, runs, first + done, stride)
        k1 = run_at(keys, runs, first + done + 16, stride)
        k2 = run_at(keys, runs, first + done + 32, stride)
        k3 = run_at(keys, runs, first + done + 48, stride)
        tile_zero(0)
        tile_zero(1)
        tile_zero(2)
        tile_zero(3)
        for i in range(n):
            tile_load(6, queries + i * TILE, LINE)
            tile_load(4, k0 + i * LINE, stride)
            tile_dot(0, 4, 6)
            tile_load(5, k1 + i * LINE, stride)
            tile_dot(1, 5, 6)
            tile_load(4, k2 + i * LINE, stride)
            tile_dot(2, 4, 6)
            tile_load(5, k3 + i * LINE, stride)
            tile_dot(3, 5, 6)
        tile_store(0, out + done * LINE, LINE)
        tile_store(1, out + done * LINE + TILE, LINE)
        tile_store(2, out + done * LINE + 2 * TILE, LINE)
        tile_store(3, out + done * LINE + 3 * TILE, LINE)
        done += 64
    while done < count:
        k0 = run_at(keys, runs, first + done, stride)
        tile_zero(0)
        for i in range(n):
            tile_load(6, queries + i * TILE, LINE)
            tile_load(4, k0 + i * LINE, stride)
            tile_dot(0, 4, 6)
        tile_store(0, out + done * LINE, LINE)
        done += 16


@inner
def weigh(own: Scratch, out: int, num_groups: int, dim: int) -> None:
    """out [16, dim] += weights @ packed values: scores hold 32 num_groups weights of each column."""
    for i in range(num_groups):
        transpose(own.scores + i * TILE, LINE, own.weights + i * TILE)
    width, row, done = dim // 16, dim * 4, 0
    while done + 4 <= width:
        target = out + done * LINE
        tile_load(0, target, row)
        tile_load(1, target + LINE, row)
        tile_load(2, target + 2 * LINE, row)
        tile_load(3, target + 3 * LINE, row)
        for i in range(num_groups):
            source = own.packed + done * VALUES + i * TILE
            tile_load(6, own.weights + i * TILE, LINE)
            tile_load(4, source, LINE)
            tile_dot(0, 6, 4)
            tile_load(5, source + VALUES, LINE)
            tile_dot(1, 6, 5)
            tile_load(4, source + 2 * VALUES, LINE)
            tile_dot(2, 6, 4)
            tile_load(5, source + 3 * VALUES, LINE)
            tile_dot(3, 6, 5)
        tile_store(0, target, row)
        tile_store(1, target + LINE, row)
        tile_store(2, target + 2 * LINE, row)
        tile_store(3, target + 3 * LINE, row)
        done += 4
    while done < width:
        tile_load(0, out + done * LINE, row)
        for i in range(num_groups):
            tile_load(6, own.weights + i * TILE, LINE)
            tile_load(4, own.packed + done * VALUES + i * TILE, LINE)
            tile_dot(0, 6, 4)
        tile_store(0, out + done * LINE, row)
        done += 1


@inner
def enter(own: Scratch) -> None:
    """This thread's tiles become ours."""
    tiles_save(own.saved)
    fill(own.ours, 16, np.float32(0))
    settings = halves(own.ours)  # palette 1; eight tiles of 16 rows, 64 bytes each
    settings[0] = np.uint16(1)
    for i in range(8, 16):
        settings[i] = np.uint16(LINE)
    for i in range(24, 28):
        settings[i] = np.uint16(0x1010)
    tiles_configure(own.ours)


@inner
def leave(own: Scratch) -> None:
    tiles_configure(own.saved)
