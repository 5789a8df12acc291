"""The gated delta rule of recurrent layers, in torch but for `Ops.fold`: on any device.

A value head's state S, [value_dim, key_dim], takes a token's key k and value v by S <- a S, then
S <- S + b (v - S k) k^T, for its decay a in (0, 1) and its rate b in (0, 1); the token's output is S q.
Before that queries, keys and values are convolved over the last few tokens. All of it is float32.

One token a row is computed as it is written (`Ops.fold`). More are taken by turns of `FOLD` tokens, in whose
products the updates of a turn are condensed (the UT transform of Yang et al., Gated Delta Networks, 2024):
the same sums in another order. FlashInfer has kernels for both, which read and write slots. They were left
out: they bring CUTLASS's Python package, and on Hopper take no slots that lie apart, as ours do.
"""

from typing import TypeAlias

import torch
from torch.nn.functional import pad, silu, softplus

from mallee.worker.model.config import DeltaShape
from mallee.worker.model.loading.weights import LayerWeights
from mallee.worker.model.ops import Ops
from mallee.worker.model.states import Folds, LayerStates, Turns

_NORM_EPS = 1e-6  # of queries and keys


_Parts: TypeAlias = tuple[torch.Tensor, ...]
"""By token and value head its query, key, value, decay (the logarithm) and rate: [n, heads, ...]."""


class DeltaRule:
    """The recurrent layers' part of a decoder, between their products. Holds nothing between calls."""

    __slots__ = ("_eps", "_ops", "_shape")

    def __init__(self, shape: DeltaShape, norm_eps: float, ops: Ops) -> None:
        self._shape = shape
        self._eps = norm_eps
        self._ops = ops

    def __call__(
        self, mixed: torch.Tensor, layer: LayerWeights, folds: Folds, states: LayerStates
    ) -> torch.Tensor:
        """Fold tokens into `states`; the layer's output before its last product: [n, values].

        mixed: the outputs of `layer.qkv`, [n, ...].
        """
        own = self._shape
        assert layer.gate_norm is not None, "a layer that is not recurrent"
        folded = self.fold(mixed, layer, folds, states)
        gate = mixed[:, own.conv_inputs : own.conv_inputs + own.values].view_as(folded).float()
        scale = torch.rsqrt(folded.square().mean(-1, keepdim=True) + self._eps)
        found = folded * scale * layer.gate_norm * silu(gate)
        return found.to(mixed.dtype).flatten(1)

    def fold(
        self, mixed: torch.Tensor, layer: LayerWeights, folds: Folds, states: LayerStates
    ) -> torch.Tensor:
        """Fold tokens into `states`; what the states answer: [n, num_value_heads, value_dim], float32."""
        own = self._shape
        assert layer.decay is not None, "a layer that is not recurrent"
        n, heads = len(mixed), own.num_value_heads
        convolved = self._convolved(mixed[:, : own.conv_inputs], layer, folds, states.inputs)
        qk, v = convolved[:, : 2 * own.keys], convolved[:, 2 * own.keys :].view(n, heads, -1)
        q, k = (self._by_value_head(x) for x in qk.chunk(2, -1))
        b, a = mixed[:, -2 * heads :].float().chunk(2, -1)
        decay = layer.decay[0] * softplus(a + layer.decay[1])  # the logarithm
        parts = (q * own.key_dim**-0.5, k, v, decay, b.sigmoid())
        if folds.is_single:
            return self._single(parts, folds.read, folds.written, states)
        out = q.new_empty(n + 1, heads, own.value_dim)  # the last is that of no token
        for turns in folds.long:
            self._long(parts, turns, folds, states.matrices, out)
        if len(folds.singles):
            own_parts = tuple(x.index_select(0, folds.singles) for x in parts)
            slots = [x.index_select(0, folds.single_rows) for x in (folds.read, folds.written)]
            out.index_copy_(0, folds.singles, self._single(own_parts, slots[0], slots[1], states))
        return out[:n]

    def _convolved(
        self, x: torch.Tensor, layer: LayerWeights, folds: Folds, kept: torch.Tensor
    ) -> torch.Tensor:
        """Each of the batch's tokens with those before it, also from steps before: [n, conv_inputs]."""
        assert layer.conv is not None, "a layer that is not recurrent"
        width = self._shape.conv_width
        line = x.new_empty(folds.length, x.shape[1])
        line.index_copy_(0, folds.before, kept.index_select(0, folds.read).flatten(0, 1))
        line.index_copy_(0, folds.inputs, x)
        next_kept = line.index_select(0, folds.after).view(-1, width - 1, x.shape[1])
        kept.index_copy_(0, folds.written, next_kept)
        wide = line.float()
        num = folds.length - width + 1
        total = wide[:num] * layer.conv[0]
        for i in range(1, width):
            total.addcmul_(wide[i : i + num], layer.conv[i])
        return silu(total.index_select(0, folds.inputs - (width - 1)))

    def _by_value_head(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys of length 1, for each value head: [n, num_value_heads, key_dim]."""
        own = self._shape
        by_head = x.view(len(x), own.num_key_heads, own.key_dim)
        unit = by_head * torch.rsqrt(by_head.square().sum(-1, keepdim=True) + _NORM_EPS)
        return unit.repeat_interleave(own.num_value_heads // own.num_key_heads, 1)

    def _single(
        self, parts: _Parts, read: torch.Tensor, written: torch.Tensor, states: LayerStates
    ) -> torch.Tensor:
        q, k, v, decay, rate = parts
        return self._ops.fold(
            q,
            k,
            v,
            decay=decay,
            rate=rate,
            read=read,
            written=written,
            matrices=states.matrices,
        )

    def _long(
        self,
        parts: _Parts,
        turns: Turns,
        folds: Folds,
        matrices: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """The rows of `turns`, whose outputs go to `out`."""
        num, width = turns.tokens.shape
        flat = turns.tokens.flatten()
        # [turns, heads, tokens, ...]; tokens that fill a turn up change nothing: they learn at rate 0.
        q, k, v, decay, rate = (
            pad(x, [0, 0] * (x.dim() - 1) + [0, 1])
            .index_select(0, flat)
            .view(num, width, *x.shape[1:])
            .transpose(1, 2)
            for x in parts
        )
        total = decay.cumsum(-1)
        among = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        k_learned, v_learned = k * rate.unsqueeze(-1), v * rate.unsqueeze(-1)
        system = (k_learned @ k.mT) * among
        own = (q @ k.mT) * among
        both = torch.cat((v_learned, k_learned * total.exp().unsqueeze(-1)), -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        news, seen = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        q = q * total.exp().unsqueeze(-1)
        k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
        rest = total[..., -1].exp()[..., None, None]
        state = matrices.index_select(0, folds.read.index_select(0, turns.rows))
        answers, begin = [], 0
        for count in turns.counts:
            turn = slice(begin, begin + count)
            before = state[:count]
            learned = news[turn] - seen[turn] @ before.mT
            answers.append(q[turn] @ before.mT + own[turn] @ learned)
            flat_state = before.mul_(rest[turn]).flatten(0, 1)  # in its place: many are large
            flat_state.baddbmm_(learned.mT.flatten(0, 1), k[turn].flatten(0, 1))
            begin += count
        matrices.index_copy_(0, folds.written.index_select(0, turns.rows), state)
        found = torch.cat(answers).transpose(1, 2).flatten(0, 1)
        out.index_copy_(0, flat, found)
