"""Kernels of the synthesizer: see `protocol.jit`. Those that call others live in `synth/kernels`."""

from typing import Final

from mallee.protocol.jit import Jit

_JIT: Final = Jit(__file__)

kernel = _JIT.kernel
