"""Tiles and vectors for kernels: Intel AMX (bfloat16) and AVX-512, as calls into LLVM's intrinsics.

A tile register holds 16 rows of 64 bytes. `tile_dot(c, a, b)` adds to c [16, 16] float32 the product of
a [16, 32] bfloat16, rows as in memory, and b [32, 16] bfloat16 with rows 2 i and 2 i + 1 interleaved
(word c of line i holds b[2 i, c] in its low and b[2 i + 1, c] in its high half). Tile numbers must be
literals. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, chapter 18.
"""

from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.core import config as untyped_config
from numba.core import types

from mallee.worker.model.cpu.jit import literal_primitive, primitive

LANES = 16
"""Words of 32 bits in a vector; rows and columns of a tile of float32."""

cgutils: Any = untyped_cgutils
numba_config: Any = untyped_config
_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)


def is_available() -> bool:
    """Whether this process may use AMX's bfloat16 tiles; asks the operating system for them."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES:
        return False  # kernels are compiled for another machine than this one
    capabilities = torch.cpu.get_capabilities()
    has_both = capabilities.get("amx_bf16") and capabilities.get("avx512_f")
    return bool(has_both and torch.cpu._init_amx())


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _at(builder: Any, address: Any, kind: Any, offset: Any = None) -> Any:
    pointer = builder.inttoptr(address, kind.as_pointer())
    return pointer if offset is None else builder.gep(pointer, [offset])


def _load(builder: Any, address: Any, kind: Any, offset: Any = None) -> Any:
    return builder.load(_at(builder, address, kind, offset), align=4)


def _store(builder: Any, value: Any, address: Any, offset: Any = None) -> None:
    builder.store(value, _at(builder, address, value.type, offset), align=4)


def _splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, first, zeros)


def _vector(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


# Tiles


@literal_primitive
def tile_zero(typing_context: Any, tile: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.Constant(_I8, signature.args[0].literal_value)
        _call(builder, "llvm.x86.tilezero", ir.VoidType(), [number])
        return context.get_dummy_value()

    return (types.void(tile), generate) if isinstance(tile, types.IntegerLiteral) else None


def _tile_move(name: str) -> Any:
    @literal_primitive
    def move(typing_context: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = ir.Constant(_I8, signature.args[0].literal_value)
            memory = builder.inttoptr(args[1], _I8.as_pointer())
            stride = context.cast(builder, args[2], signature.args[2], types.int64)
            _call(builder, name, ir.VoidType(), [number, memory, stride])
            return context.get_dummy_value()

        if not isinstance(tile, types.IntegerLiteral):
            return None
        return types.void(tile, types.int64, types.int64), generate

    return move


tile_load = _tile_move("llvm.x86.tileloadd64")
"""tile_load(tile, address, stride): 16 lines of 64 bytes, `stride` bytes apart."""
tile_store = _tile_move("llvm.x86.tilestored64")


@literal_primitive
def tile_dot(typing_context: Any, c: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = [ir.Constant(_I8, tile.literal_value) for tile in signature.args]
        _call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), numbers)
        return context.get_dummy_value()

    if not all(isinstance(tile, types.IntegerLiteral) for tile in (c, a, b)):
        return None
    return types.void(c, a, b), generate


def _configuration(name: str) -> Any:
    @primitive
    def configure(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = builder.inttoptr(args[0], _I8.as_pointer())
            _call(builder, name, ir.VoidType(), [memory])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return configure


tiles_configure = _configuration("llvm.x86.ldtilecfg")
"""Set up the tiles as the 64 bytes at an address say; all of them become 0."""
tiles_save = _configuration("llvm.x86.sttilecfg")
"""Write the present configuration there: a thread's other users of tiles expect to find theirs."""


@primitive
def prefetch(typing_context: Any, address: Any) -> Any:
    """The line of memory at `address` is on its way to the second cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memory = builder.inttoptr(args[0], _I8.as_pointer())
        flags = [ir.Constant(_I32, flag) for flag in (0, 2, 1)]  # to read, to L2, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [memory, *flags])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# Vectors


@primitive
def transpose(typing_context: Any, source: Any, stride: Any, target: Any) -> Any:
    """transpose(source, stride, target): target [16, 16] words = source, lines `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, stride, target = args
        rows = [
            _load(builder, builder.add(source, builder.mul(stride, ir.Constant(_I64, i))), _WORDS)
            for i in range(LANES)
        ]
        for bit in (1, 2, 4, 8):  # exchange the off-diagonal squares of this width
            low = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
            high = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for i in range(LANES):
                if not i & bit:
                    a, b = rows[i], rows[i | bit]
                    rows[i] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, low))
                    rows[i | bit] = builder.shuffle_vector(a, b, ir.Constant(_WORDS, high))
        for i, row in enumerate(rows):
            _store(builder, row, target, ir.Constant(_I64, i))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@primitive
def interleave(typing_context: Any, low: Any, high: Any, target: Any) -> Any:
    """interleave(low, high, target): word i there is the 16 bits i at low, then those at high."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = ir.VectorType(_I16, LANES)
        low, high = (builder.zext(_load(builder, a, narrow), _WORDS) for a in args[:2])
        shift = ir.Constant(_WORDS, [16] * LANES)
        _store(builder, builder.or_(low, builder.shl(high, shift)), args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@primitive
def raise_tops(
    typing_context: Any, rows: Any, num_rows: Any, scale: Any, tops: Any, alpha: Any
) -> Any:
    """raise_tops(rows, num_rows, scale, tops, alpha): each lane of `tops` is the highest of itself and
    its column's row * scale; `alpha` is 2**(what it was - what it is). A multiple of 4 rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, num_rows, scale, tops, alpha = args
        bests = [cgutils.alloca_once_value(builder, _vector(-3e38)) for _ in range(_CHAINS)]
        num_turns = builder.sdiv(num_rows, ir.Constant(_I64, _CHAINS))
        with cgutils.for_range(builder, num_turns) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, _CHAINS))
            for i, best in enumerate(bests):
                row = _load(builder, rows, _FLOATS, builder.add(first, ir.Constant(_I64, i)))
                builder.store(_larger(builder, row, builder.load(best)), best)
        best = builder.load(bests[0])
        for other in bests[1:]:
            best = _larger(builder, builder.load(other), best)
        before = _load(builder, tops, _FLOATS)
        after = _larger(builder, builder.fmul(best, _splat(builder, scale)), before)
        _store(builder, after, tops)
        # Not what the cubic says of 0: that would shrink old sums with every call.
        is_same = builder.fcmp_ordered("==", before, after)
        change = _exp2(builder, builder.fsub(before, after))
        _store(builder, builder.select(is_same, _vector(1.0), change), alpha)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, i64, i64), generate


_CHAINS = 4
"""Highest rows that are sought side by side: one comparison takes as long as four that need not wait."""


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


_FMA = "llvm.fma.v16f32"
_EXP2 = (0.99992809, 0.69326099, 0.24261081, 0.05517144)
"""2**f on -0.5 .. 0.5 by a cubic, relative error 7.5e-5, far below the rounding to bfloat16."""


def _exp2(builder: Any, x: Any) -> Any:
    """2**x for x <= 0; 0 far below."""
    whole = _call(builder, "llvm.rint.v16f32", _FLOATS, [x])
    rest = builder.fsub(x, whole)
    value = _vector(_EXP2[3])
    for coefficient in _EXP2[2::-1]:
        value = _call(builder, _FMA, _FLOATS, [value, rest, _vector(coefficient)])
    everywhere, current = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
    return _call(
        builder,
        "llvm.x86.avx512.mask.scalef.ps.512",
        _FLOATS,
        [value, whole, value, everywhere, current],
    )


@primitive
def exponents(
    typing_context: Any,
    rows: Any,
    num_pairs: Any,
    scale: Any,
    tops: Any,
    alpha: Any,
    target: Any,
    sums: Any,
) -> Any:
    """exponents(rows, num_pairs, scale, tops, alpha, target, sums): p = 2**(row * scale - tops).

    `sums` becomes sums * alpha + the sum of p's rows. Rows 2 i and 2 i + 1 of p become line i of `target`
    (which may be `rows`): as bfloat16, side by side in a word.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows, num_pairs, scale, tops, alpha, target, sums = args
        factor, bottom = _splat(builder, scale), builder.fneg(_load(builder, tops, _FLOATS))
        before = builder.fmul(*(_load(builder, a, _FLOATS) for a in (sums, alpha)))
        total = cgutils.alloca_once_value(builder, before)
        with cgutils.for_range(builder, num_pairs) as loop:
            first = builder.mul(loop.index, ir.Constant(_I64, 2))
            both = []
            for offset in (first, builder.add(first, ir.Constant(_I64, 1))):
                row = _load(builder, rows, _FLOATS, offset)
                p = _exp2(builder, _call(builder, _FMA, _FLOATS, [row, factor, bottom]))
                builder.store(builder.fadd(builder.load(total), p), total)
                bits = builder.bitcast(p, _WORDS)
                both.append(builder.add(bits, ir.Constant(_WORDS, [0x8000] * LANES)))
            low = builder.lshr(both[0], ir.Constant(_WORDS, [16] * LANES))
            high = builder.and_(both[1], ir.Constant(_WORDS, [-65536] * LANES))
            _store(builder, builder.or_(low, high), target, loop.index)
        _store(builder, builder.load(total), sums)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, types.float32, i64, i64, i64, i64), generate
