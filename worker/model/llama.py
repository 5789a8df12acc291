"""The Llama decoder over a flat batch: all rows' tokens side by side, one product per matrix.

Doesn't know requests, block tables or sampling; attention and KV writes go by the step's plan.
For small models on a CPU the count of operations decides, so a layer has about fifteen.
"""

from typing import Protocol

import torch
from torch.nn.functional import embedding, rms_norm, silu

from mallee.worker.model.config import ModelConfig
from mallee.worker.model.plan import Plan
from mallee.worker.model.weights import LayerWeights, ModelWeights


class Attention(Protocol):
    """Attention of one layer; see `attention.PagedAttention`."""

    def attend(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor: ...


class Rotary:
    """Cosines and signed sines of every position: [max_positions, 1, head_dim] each.

    x rotated is x * cos + halves_swapped(x) * sin; the sign of transformers' rotate_half is in sin.
    """

    __slots__ = ("_cos", "_sin")

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: str) -> None:
        frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
        positions = torch.arange(config.max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).unsqueeze(1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), -1).unsqueeze(1).to(device=device, dtype=dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of `positions` [n]: [n, 1, head_dim] each."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [n, heads, head_dim] turned by each token's position."""
    n, heads, dim = x.shape
    swapped = x.view(n, heads, 2, dim // 2).flip(2).view(n, heads, dim)
    return torch.addcmul(x * cos, swapped, sin)


class Llama:
    """A decoder with its weights; holds no state between calls."""

    __slots__ = ("_attention", "_rotary", "config", "weights")

    def __init__(self, config: ModelConfig, weights: ModelWeights, *, attention: Attention) -> None:
        self.config = config
        self.weights = weights
        self._attention = attention
        table = weights.embedding
        self._rotary = Rotary(config, dtype=table.dtype, device=str(table.device))

    def logits(self, plan: Plan, memory: torch.Tensor) -> torch.Tensor:
        """Write the batch's KV into `memory`; scores after each of `plan.outputs`: [k, vocab].

        memory: [num_layers, num_slots, 2, num_kv_heads, head_dim].
        """
        hidden = embedding(plan.tokens, self.weights.embedding)
        angles = self._rotary.at(plan.positions)
        for layer, own in zip(self.weights.layers, memory.unbind(0), strict=True):
            hidden = self._layer(hidden, layer, angles, plan, own)
        last = hidden.index_select(0, plan.outputs)
        # The head is [vocab, hidden], being mostly the embedding: this order is the faster one.
        return torch.mm(self.weights.head, self._norm(last, self.weights.norm).t()).t().contiguous()

    def _layer(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: Plan,
        memory: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        n, queries, heads = len(hidden), config.num_heads, config.num_kv_heads
        qkv = torch.mm(self._norm(hidden, layer.input_norm), layer.qkv)
        qkv = qkv.view(n, queries + 2 * heads, config.head_dim)
        turned = rotate(qkv[:, : queries + heads], *angles)
        q, k, v = turned[:, :queries], turned[:, queries:], qkv[:, queries + heads :]
        memory.index_copy_(0, plan.slots, torch.stack((k, v), 1))
        seen = self._attention.attend(plan, q, k, v, memory)
        hidden = torch.addmm(hidden, seen.reshape(n, -1), layer.output)
        gate, up = torch.mm(self._norm(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
        return torch.addmm(hidden, silu(gate).mul_(up), layer.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
