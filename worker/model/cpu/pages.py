"""Large pages for weights in host memory.

Every step reads all weights, and each page of them costs a lookup of its address: with large pages decoding
steps of 1 and of 32 rows took 0.85 of the time on a virtual machine (measured). Since version 6.1 Linux
makes them of memory that is already written.
"""

import ctypes
import sys

PAGE_NBYTES = 1 << 21
_MIN_NBYTES = 1 << 18
_COLLAPSE = 25  # MADV_COLLAPSE of linux/mman.h


def take_large_pages(address: int, nbytes: int) -> bool:
    """Put memory into large pages, at once; whether all of it now lies in some.

    Neighbours in the same pages come along. Small tensors are left where they are. A False costs time and
    nothing else: another system, an older kernel, or the edge of what is mapped.
    """
    if nbytes < _MIN_NBYTES or not sys.platform.startswith("linux"):
        return False
    first = address // PAGE_NBYTES * PAGE_NBYTES
    end = -(-(address + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, end - first, _COLLAPSE) == 0)
