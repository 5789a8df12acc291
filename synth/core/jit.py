"""Kernels of the synthesizer: see `protocol.jit`."""

from typing import Final

from mallee.protocol.jit import Jit

_JIT: Final = Jit(__file__)

kernel = _JIT.kernel
