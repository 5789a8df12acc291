"""Copies in host memory past the caches, for targets that these don't hold.

An ordinary store reads the line that it overwrites first, which takes a third of the memory's bandwidth
where the caches don't hold it. One long `memcpy` stores past them by itself, but the pieces of a block, one a
layer, are too short for that: they took 1.5 times its time (measured).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import types

from mallee.worker.model.cpu.jit import Kernel, prefetch_once, primitive, words

ALIGNMENT = 16
"""Of addresses and sizes, in bytes."""
UNCACHED_NBYTES = 64 << 20
"""Copies to a memory that is larger go past the caches. Staged rows are read again at once."""
_AHEAD = 4096  # so many bytes ahead sources are fetched, the next piece's too

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I64, ALIGNMENT // 8)


@primitive
def _move(typing_context: Any, source: Any, target: Any) -> Any:
    """16 bytes from an address to another one, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there, here = (builder.inttoptr(each, _VECTOR.as_pointer()) for each in args)
        store = builder.store(builder.load(there, align=ALIGNMENT), here, align=ALIGNMENT)
        mark = builder.module.add_metadata([ir.Constant(_I32, 1)])
        store.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@primitive
def _fence(typing_context: Any) -> Any:
    """All of these stores come before what this thread does next, for other threads too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _copy_pieces(control: int) -> None:
    own = words(control)
    num, nbytes, addresses = own[0], own[1], words(own[2])
    whole = nbytes - nbytes % 64
    for i in range(num):
        source, target = addresses[2 * i], addresses[2 * i + 1]
        after = addresses[2 * min(i + 1, num - 1)] - nbytes
        for at in range(0, whole, 64):
            begin = source if at + _AHEAD < nbytes else after
            prefetch_once(begin + at + _AHEAD)
            _move(source + at, target + at)
            _move(source + at + 16, target + at + 16)
            _move(source + at + 32, target + at + 32)
            _move(source + at + 48, target + at + 48)
        for at in range(whole, nbytes, 16):
            _move(source + at, target + at)
    _fence()


_kernel = Kernel(_copy_pieces)


def prepare(nbytes: int) -> None:
    """Compile what copies to a memory of that size run."""
    if nbytes > UNCACHED_NBYTES:
        _kernel.compile()


def past_caches(
    raw: torch.Tensor, blocks: Sequence[int], rows: npt.NDArray[np.uint8], *, is_read: bool
) -> bool:
    """Whether this copies `blocks` of a KV memory to or from `rows`: the target is of more than caches hold.

    `raw` [layers, blocks, bytes of a layer's part of a block]; rows [blocks, layers * such bytes].
    """
    piece = raw.shape[2]
    whole = rows.base if isinstance(rows.base, np.ndarray) else rows
    if (whole if is_read else raw).nbytes <= UNCACHED_NBYTES or raw.device.type != "cpu":
        return False
    ends = (piece, raw.data_ptr(), rows.ctypes.data)
    if any(each % ALIGNMENT for each in ends) or not rows.flags.c_contiguous:
        return False
    layers, places = np.arange(len(raw)), np.asarray(blocks, np.int64)[:, None]
    own = raw.data_ptr() + places * raw.stride(1) + layers * raw.stride(0)
    there = rows.ctypes.data + np.arange(own.size).reshape(own.shape) * piece
    if is_read:  # in the order of its memory, which is fetched ahead
        by_block = np.argsort(places[:, 0])
        own, there = own[by_block].T, there[by_block].T
    copy_pieces(np.stack((own, there) if is_read else (there, own), -1), piece)
    return True


def copy_pieces(addresses: npt.NDArray[np.int64], nbytes: int) -> None:
    """Copy `nbytes` from each source to its target: `addresses` [..., 2]. Without Python's lock."""
    pairs = np.ascontiguousarray(addresses).reshape(-1, 2)
    control = np.array([len(pairs), nbytes, pairs.ctypes.data], np.int64)
    _kernel.run(control.ctypes.data, 1)
