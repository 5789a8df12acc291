"""The small operations between a layer's products, in torch operations: on any device."""

from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import gelu, rms_norm, silu

from mallee.worker.model.config import Activation


class Turn(NamedTuple):
    """How each of a batch's tokens is turned, [n, 1, head_dim] each: see `rotary.Rotary`."""

    cos: torch.Tensor
    sin: torch.Tensor


class Ops(Protocol):
    """What a decoder does beside products and attention. Results have their argument's dtype."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension, in float32.

        `weight` [x.shape[-1]] has x's dtype, or float32 where x's would round it.
        """
        ...

    def place(
        self,
        qkv: torch.Tensor,
        turn: Turn,
        slots: torch.Tensor,
        memory: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Keys, turned, and values are written to their slots; queries and keys, turned, are returned.

        qkv [n, heads + 2 * kv_heads, head_dim] may be overwritten; slots [n]; memory [num_slots, 2,
        kv_heads, head_dim]; the result is [n, heads + kv_heads, head_dim]. With `head_norm` (a weight
        [heads + kv_heads, head_dim], float32) each of these heads is normed first.
        """
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up, from both side by side: [n, 2 * inner] -> [n, inner]."""
        ...


def movable(memory: torch.Tensor) -> torch.Tensor:
    """`memory`, or its bytes where the dtype knows no index_copy_ (float8)."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory


def write(memory: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """kv [n, 2, kv_heads, head_dim] goes to `slots` of `memory`, in its dtype; float8 saturates."""
    if memory.dtype != kv.dtype:
        largest = torch.finfo(memory.dtype).max
        kv = kv.clamp(-largest, largest).to(memory.dtype)
    movable(memory).index_copy_(0, slots, movable(kv))


class TorchOps:
    """The reference."""

    __slots__ = ()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dtype == x.dtype:
            return rms_norm(x, (x.shape[-1],), weight, eps)
        return rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def place(
        self,
        qkv: torch.Tensor,
        turn: Turn,
        slots: torch.Tensor,
        memory: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        kv_heads = memory.shape[2]
        qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        if head_norm is not None:
            wide = qk.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            qk = (wide * scale * head_norm).to(qk.dtype)
        n, heads, dim = qk.shape
        swapped = qk.view(n, heads, 2, dim // 2).flip(2).view(n, heads, dim)
        turned = torch.addcmul(qk * turn.cos, swapped, turn.sin)
        kv = torch.stack((turned[:, -kv_heads:], v), 1)
        write(memory, slots, kv)
        return turned

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        bent = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
        return bent.mul_(up)
