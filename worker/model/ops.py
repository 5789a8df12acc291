"""The small operations between a layer's products, in torch: on any device, and the reference of others."""

import torch
from torch.nn.functional import gelu, rms_norm, silu

from mallee.worker.model.config import Activation
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.rotary import Rotation


def movable(memory: torch.Tensor) -> torch.Tensor:
    """`memory`, or its bytes where the dtype knows no index_copy_ (float8)."""
    return memory.view(torch.uint8) if memory.dtype.itemsize == 1 else memory


def write(
    memory: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """kv [n, 2, kv_heads, head_dim] goes to `slots` of `memory`, in its dtype; float8 saturates.

    With `scales` ([2], float32) keys and values are divided by theirs first.
    """
    if scales is not None:
        kv = kv / scales.view(2, 1, 1)  # in float32: rounded once, to memory's dtype
    if memory.dtype != kv.dtype:
        largest = torch.finfo(memory.dtype).max
        kv = kv.clamp(-largest, largest).to(memory.dtype)
    movable(memory).index_copy_(0, slots, movable(kv))


class Ops:
    """The operations of a decoder beside products and attention, in torch: on any device, and the reference.

    Results have their argument's dtype.
    """

    __slots__ = ()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension, in float32.

        `weight` [x.shape[-1]] has x's dtype, or float32 where x's would round it.
        """
        if weight.dtype == x.dtype:
            return rms_norm(x, (x.shape[-1],), weight, eps)
        return rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def added(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        own_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """residual + linear(x), which is normed by `own_norm` first if there is one."""
        if own_norm is None:
            return linear.add(x, residual)
        return residual + self.norm(linear(x), own_norm, eps)

    def added_norm(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        *,
        own_norm: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum as of `added`, and that normed by `norm`. `residual` may be overwritten by the sum."""
        total = self.added(linear, x, residual, own_norm=own_norm, eps=eps)
        return total, self.norm(total, norm, eps)

    def place(
        self,
        qkv: torch.Tensor,
        turn: Rotation,
        slots: torch.Tensor,
        memory: torch.Tensor,
        *,
        head_norm: torch.Tensor | None,
        eps: float,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Keys, turned, and values are written to their slots; queries and keys, turned, are returned.

        qkv [n, heads + 2 * kv_heads, head_dim] may be overwritten; slots [n]; memory [num_slots, 2,
        kv_heads, head_dim]; the result is [n, heads + kv_heads, head_dim]. With `head_norm` (a weight
        [heads + kv_heads, head_dim], float32) each of these heads is normed first. `kv_scales` as in `write`.
        """
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
        write(memory, slots, kv, kv_scales)
        return turned

    def fold(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        decay: torch.Tensor,
        rate: torch.Tensor,
        read: torch.Tensor,
        written: torch.Tensor,
        matrices: torch.Tensor,
    ) -> torch.Tensor:
        """Fold a token of each row into its state by the gated delta rule (`delta.py`); the states' answers.

        q, k [rows, heads, key_dim], v [rows, heads, value_dim], decay (its logarithm) and rate [rows, heads];
        states are read and written at slots of matrices [slots, heads, value_dim, key_dim]; the result is
        [rows, heads, value_dim]. All numbers are float32.
        """
        state = matrices.index_select(0, read).mul_(decay.exp()[..., None, None])
        missing = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * rate.unsqueeze(-1)
        flat = state.flatten(0, 1)
        flat.baddbmm_(missing.flatten(0, 1).unsqueeze(-1), k.flatten(0, 1).unsqueeze(-2))
        matrices.index_copy_(0, written, state)
        return (state @ q.unsqueeze(-1)).squeeze(-1)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(gate) * up, from both side by side: [n, 2 * inner] -> [n, inner]."""
        gate, up = gate_up.chunk(2, -1)
        bent = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
        return bent.mul_(up)
