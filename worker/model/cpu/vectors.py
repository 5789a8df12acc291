"""Vectors of 16 words for kernels, as calls into LLVM's intrinsics for AVX-512, and products by them.

Matrices are bfloat16, two numbers in a word: `multiply` adds to c [16, 16] float32 the products of a word
of a row of `a`, in all lanes, and a line of `b`. Without the instruction for that halves are widened first.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils as untyped_cgutils
from numba.core import config as untyped_config
from numba.core import types

from mallee.worker.model.cpu.jit import fill, inner, primitive
from mallee.worker.model.cpu.layout import LINE, VALUES, Scratch, run_at

LANES = 16

cgutils: Any = untyped_cgutils
numba_config: Any = untyped_config
_I16, _I32, _I64 = (ir.IntType(n) for n in (16, 32, 64))
_F32 = ir.FloatType()
_FLOATS = ir.VectorType(_F32, LANES)
_WORDS = ir.VectorType(_I32, LANES)


def has(*names: str) -> bool:
    """Whether the processor has all of these, and kernels are compiled for it."""
    if numba_config.CPU_NAME or numba_config.CPU_FEATURES:
        return False  # kernels are compiled for another machine than this one
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(name) for name in names)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
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
    whole = call(builder, "llvm.rint.v16f32", _FLOATS, [x])
    rest = builder.fsub(x, whole)
    value = _vector(_EXP2[3])
    for coefficient in _EXP2[2::-1]:
        value = call(builder, _FMA, _FLOATS, [value, rest, _vector(coefficient)])
    everywhere, current = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
    return call(
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
                p = _exp2(builder, call(builder, _FMA, _FLOATS, [row, factor, bottom]))
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


@primitive
def multiply(
    typing_context: Any, a: Any, row: Any, word: Any, b: Any, n: Any, c: Any, c_row: Any
) -> Any:
    """multiply(a, row, word, b, n, c, c_row): c [16, 16] += a @ b, of n words and lines.

    Word i of row r is at a + r * row + i * word, line i at b + 64 i, and row r of c at c + r * c_row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, row, word, b, n, c, c_row = args
        rows = [builder.mul(row, ir.Constant(_I64, r)) for r in range(LANES)]
        lines = [builder.add(c, builder.mul(c_row, ir.Constant(_I64, r))) for r in range(LANES)]
        sums = [cgutils.alloca_once_value(builder, _load(builder, line, _FLOATS)) for line in lines]
        with cgutils.for_range(builder, n) as loop:
            start = builder.add(a, builder.mul(loop.index, word))
            other = _load(builder, b, _WORDS, loop.index)
            for offset, total in zip(rows, sums, strict=True):
                own = _splat(builder, _load(builder, builder.add(start, offset), _I32))
                builder.store(_dot(builder, builder.load(total), own, other), total)
        for line, total in zip(lines, sums, strict=True):
            _store(builder, builder.load(total), line)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _dot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + the products of a's and b's low halves + those of their high halves."""
    if has("avx512_bf16"):
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, [total, a, b])
    shift, mask = (ir.Constant(_WORDS, [n] * LANES) for n in (16, -65536))
    low = [builder.bitcast(builder.shl(each, shift), _FLOATS) for each in (a, b)]
    high = [builder.bitcast(builder.and_(each, mask), _FLOATS) for each in (a, b)]
    return call(builder, _FMA, _FLOATS, [*high, call(builder, _FMA, _FLOATS, [*low, total])])


@inner
def score(
    keys: int, runs: Any, first: int, count: int, stride: int, queries: int, n: int, out: int
) -> None:
    """As `amx.score`."""
    fill(out, count * LANES, np.float32(0))
    for done in range(0, count, 16):
        k = run_at(keys, runs, first + done, stride)
        multiply(k, stride, 4, queries, n * LANES, out + done * LINE, LINE)


@inner
def weigh(own: Scratch, out: int, num_groups: int, dim: int) -> None:
    """As `amx.weigh`."""
    for i in range(dim // 16):
        values = own.packed + i * VALUES
        multiply(own.scores, 4, LINE, values, num_groups * LANES, out + i * LINE, dim * 4)
