"""Compiling kernels, memory by address, and running a kernel on torch's own threads.

A kernel is a C function of one argument, the address of its control block: words of 8 bytes, the first
of which is a counter that threads take tasks from. It is run by `GOMP_parallel` of the OpenMP library
that torch has loaded, so that it uses the threads that torch's operations use: those of a second pool
would wait for cores on which the first one's are spinning. Where that library lacks the entry, a kernel
runs on the calling thread.

Nothing checks an address or a bound: the classes in `worker.model` that call kernels do.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import config as numba_config
from numba.extending import intrinsic

from mallee.protocol.jit import cache_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_types: Any = numba.types


_CACHE_FOLDER = cache_folder(Path(__file__))
_compiling = threading.Lock()
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def inner(function: _Function) -> _Function:
    """`function`, to be called from kernels; sums in it may be taken in any order."""
    return cast(_Function, numba.njit(fastmath=_FASTMATH, error_model="numpy")(function))


def primitive(build: Callable[..., Any]) -> Any:
    """Code that `build` generates in LLVM's terms, to be called from kernels (without the typing context)."""
    return intrinsic(build)


def literal_primitive(build: Callable[..., Any]) -> Any:
    """As `primitive`, for arguments that must be literal numbers."""
    return intrinsic(prefer_literal=True)(build)


class Kernel:
    """A task to be compiled: its machine code takes the address of a control block."""

    __slots__ = ("_address", "_call", "_compiled", "_function")

    def __init__(self, function: Callable[[int], None]) -> None:
        """Nothing is compiled yet: a module of kernels can be imported where they could not run."""
        self._function = function
        self._compiled: Any = None  # owns the code at `_address`
        self._address = 0
        self._call: Any = None

    def compile(self) -> None:
        """Make it ready to run: compile it, or read it from the cache on disk. Classes do so when built."""
        with _compiling:
            if self._call is None:
                self._compile()

    def _compile(self) -> None:
        config: Any = numba_config  # without types of its own
        before = config.CACHE_DIR
        config.CACHE_DIR = _CACHE_FOLDER or before  # read when caching is switched on: now
        try:
            self._compiled = numba.cfunc(
                numba.types.void(numba.types.int64),
                cache=_CACHE_FOLDER is not None,
                fastmath=_FASTMATH,
                error_model="numpy",
            )(self._function)
        finally:
            config.CACHE_DIR = before
        self._address = self._compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    @property
    def is_ready(self) -> bool:
        """Whether it can run."""
        return self._call is not None

    def run(self, control: int, num_threads: int) -> None:
        """Run it with the control block at address `control`, on num_threads threads together."""
        assert self._call is not None, "a kernel is compiled before it runs"
        if num_threads > 1 and _parallel is not None:
            _parallel(self._address, control, num_threads, 0)
        else:
            self._call(control)


def _find_parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel of the OpenMP library that torch has loaded, GNU's or LLVM's; None if not found."""
    # One that isn't loaded has threads of its own.
    mode = os.RTLD_NOW | getattr(os, "RTLD_NOLOAD", 0)
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        try:
            function = ctypes.CDLL(str(path), mode=mode).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return cast(Callable[[int, int, int, int], None], function)
    return None


_parallel = _find_parallel()


def _unary(result: Any, argument: Any, emit: Callable[[Any, Any], Any]) -> Any:
    """A primitive of one argument, for which `emit` (builder, argument) gives the code."""

    @primitive
    def call(typing_context: Any, argument_type: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, args[0])

        return result(argument), generate

    return call


def _pointer(llvm_type: Any, numba_type: Any) -> Any:
    kind = llvm_type.as_pointer()
    return _unary(_types.CPointer(numba_type), _types.int64, lambda b, at: b.inttoptr(at, kind))


floats = _pointer(ir.FloatType(), _types.float32)
"""In a kernel: the float32 numbers at an address."""
halves = _pointer(ir.IntType(16), _types.uint16)
"""In a kernel: the bfloat16 numbers at an address, as their bits."""
pairs = _pointer(_I32, _types.uint32)
"""In a kernel: the 32-bit words at an address."""
words = _pointer(_I64, _types.int64)
"""In a kernel: the int64 words at an address."""


def _prefetch(locality: int) -> Any:
    def emit(builder: Any, address: Any) -> Any:
        line = builder.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32])
        call = builder.module.declare_intrinsic("llvm.prefetch", [line.type], kind)
        builder.call(call, [line, *(ir.Constant(_I32, n) for n in (0, locality, 1))])
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return _unary(_types.void, _types.int64, emit)


prefetch = _prefetch(2)
"""In a kernel: have the line at an address come to the second cache; it may lie in no memory of ours."""
prefetch_once = _prefetch(0)
"""In a kernel: the same, of what is used once."""


def _emit_claim(builder: Any, address: Any) -> Any:
    counter = builder.inttoptr(address, _I64.as_pointer())
    return builder.atomic_rmw("add", counter, ir.Constant(_I64, 1), "monotonic")


def _emit_from_half(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16))
    return builder.bitcast(wide, ir.FloatType())


def _emit_to_half(builder: Any, value: Any) -> Any:
    bits, shift = builder.bitcast(value, _I32), ir.Constant(_I32, 16)
    odd = builder.and_(builder.lshr(bits, shift), ir.Constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, shift), ir.IntType(16))


claim = _unary(_types.int64, _types.int64, _emit_claim)
"""In a kernel: the word at an address, which grows by one for the next caller, whatever its thread."""
from_half = _unary(_types.float32, _types.uint16, _emit_from_half)
"""In a kernel: the float32 of a bfloat16's bits."""
to_half = _unary(_types.uint16, _types.float32, _emit_to_half)
"""In a kernel: the bits of the bfloat16 nearest to a float32 (ties to even; NaN stays NaN)."""
from_bits = _unary(_types.float32, _types.int32, lambda b, bits: b.bitcast(bits, ir.FloatType()))
"""In a kernel: the float32 whose bits are an int32."""
to_bits = _unary(_types.int32, _types.float32, lambda b, value: b.bitcast(value, _I32))
"""In a kernel: the bits of a float32, as an int32."""


@inner
def fill(target: int, count: int, value: Any) -> None:
    """The `count` float32 numbers from an address on become `value`."""
    numbers = floats(target)
    for i in range(count):
        numbers[i] = value


@inner
def exp2(x: Any) -> Any:
    """2**x in float32, relative error below 2e-7 where the result is a normal number; 0 below."""
    x = max(min(x, np.float32(127.5)), np.float32(-127.0))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
