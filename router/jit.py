"""Compiling kernels: numba behind one typed decorator, and memory by address.

Kernels are compiled at their first call for each combination of argument types, or read from a cache
on disk. The structures that use them call each once when they are built, so never within a request.
numba checks a cached kernel against the file it is in, not against the files of the kernels it calls:
so the cache's folder is named after the text of all of them.

Kernels that change large structures take the address of a control block rather than arrays, and
read and write int64 words with `get` and `put`. Measured: an array passed to an inner function goes as
seven values with atomic reference counts, which made storing a block twice as slow and a call from
Python several times. The price is that nothing checks a bound; `check()` of the owner does, in tests.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import config as numba_config
from numba.extending import intrinsic

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _cache_folder() -> str | None:
    """The first folder that can be written: beside the source, or in the user's cache."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (Path(__file__), *sorted((here / "kernels").glob("*.py"))):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for parent in (here / "__pycache__", Path("~/.cache/mallee")):
        try:
            parent = parent.expanduser()
            (parent / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(parent / name, os.W_OK):
            return str(parent / name)
    return None


_CACHE_FOLDER = _cache_folder()


def kernel(function: _Function) -> _Function:
    """`function`, compiled by numba; without a folder to cache it in, anew in every process."""
    return _compiled(function, False)


def lane_kernel(function: _Function) -> _Function:
    """As `kernel`; without NaN or signed zeros, so that a minimum is taken several at a time."""
    return _compiled(function, {"nnan", "nsz"})


def _compiled(function: _Function, fastmath: bool | set[str]) -> _Function:
    config: Any = numba_config  # without types of its own
    before = config.CACHE_DIR
    config.CACHE_DIR = _CACHE_FOLDER or before  # read when caching is switched on: now
    try:
        compiled = numba.njit(
            cache=_CACHE_FOLDER is not None, error_model="numpy", fastmath=fastmath
        )(function)
    finally:
        config.CACHE_DIR = before
    return cast(_Function, compiled)


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


get = cast(Callable[[int, int], int], _get)
"""In a kernel: the int64 word `index` words after `address`."""
put = cast(Callable[[int, int, int], None], _put)
"""In a kernel: word `index` after `address` is `value`."""
trailing_zeros = cast(Callable[[int], int], _trailing_zeros)
"""In a kernel: how many low bits of a word, which is not 0, are 0."""
