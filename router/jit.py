"""Kernels of the router, and memory by address.

Kernels (see `protocol.jit`) are compiled or read from the cache when the structures that use them are
built: these call each once, so that it never happens within a request.

Kernels that change large structures take the address of a control block rather than arrays, and
read and write int64 words with `get` and `put`. Measured: an array passed to an inner function goes as
seven values with atomic reference counts, which made storing a block twice as slow and a call from
Python several times. The price is that nothing checks a bound; `check()` of the owner does, in tests.
"""

from collections.abc import Callable
from typing import Any, Final, cast

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from mallee.protocol.jit import Jit

_JIT: Final = Jit(__file__)

kernel = _JIT.kernel


def _word(builder: Any, address: Any, index: Any) -> Any:
    base = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.gep(base, [index])


@intrinsic
def _get(typing_context: Any, address: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_word(builder, args[0], args[1]))

    return numba.types.int64(numba.types.int64, numba.types.int64), generate


@intrinsic
def _put(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _word(builder, args[0], args[1]))
        return context.get_dummy_value()

    words = numba.types.int64
    return numba.types.void(words, words, words), generate


@intrinsic
def _trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.int64(numba.types.int64), generate


@intrinsic
def _fetch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # to read, to L1, data
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in (line, *flags)])
        call = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        builder.call(call, [line, *flags])
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64), generate


@intrinsic
def _places(typing_context: Any, line: Any, key: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        line = builder.inttoptr(args[0], ir.VectorType(word, 8).as_pointer())
        words, none = builder.load(line, align=8), ir.Constant(ir.VectorType(word, 8), ir.Undefined)
        index = ir.VectorType(ir.IntType(32), 4)
        keys = builder.shuffle_vector(words, none, ir.Constant(index, [0, 2, 4, 6]))
        wanted = builder.insert_element(none, args[1], ir.Constant(ir.IntType(32), 0))
        wanted = builder.shuffle_vector(wanted, none, ir.Constant(index, [0, 0, 0, 0]))
        equal = builder.bitcast(builder.icmp_signed("==", keys, wanted), ir.IntType(4))
        return builder.zext(equal, word)

    return numba.types.int64(numba.types.int64, numba.types.int64), generate


def _selected(operator: str) -> Any:
    @intrinsic
    def select(typing_context: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            flags = ("nnan", "nsz")
            is_one = builder.fcmp_ordered(operator, args[0], args[1], flags=flags)
            return builder.select(is_one, args[0], args[1], flags=flags)

        return one(one, one), generate

    return select


lesser = cast(Callable[[Any, Any], Any], _selected("<"))
"""In a kernel: the lesser of two floats of one type, none of them NaN: a minimum is taken in lanes so."""
greater = cast(Callable[[Any, Any], Any], _selected(">"))
"""As `lesser`."""
signed = cast(Callable[[Any], int], np.int64)
"""In a kernel: a hash as a key. numba makes floats of mixed signed and unsigned integers."""
get = cast(Callable[[int, int], int], _get)
"""In a kernel: the int64 word `index` words after `address`."""
put = cast(Callable[[int, int, int], None], _put)
"""In a kernel: word `index` after `address` is `value`."""
fetch = cast(Callable[[int], None], _fetch)
"""In a kernel: the line of memory at an address is on its way to the CPU's cache. Waits for nothing."""
places = cast(Callable[[int, int], int], _places)
"""In a kernel: bits of those of the four entries (key, value) at an address that have the key.

Without branches: where a key is can't be foreseen, and a wrong guess costs more than all four.
"""
trailing_zeros = cast(Callable[[int], int], _trailing_zeros)
"""In a kernel: how many low bits of a word, which is not 0, are 0."""
