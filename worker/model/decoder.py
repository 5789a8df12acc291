"""The decoder over a flat batch: all rows' tokens side by side, one product per matrix.

One class for all families: `ModelConfig` and its `Family` say what differs. Doesn't know requests,
block tables or sampling; attention and KV writes go by the step's plan.
For small models on a CPU the count of operations decides: a plain layer has nine.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch
from torch.nn.functional import embedding

from mallee.worker.model.attention.base import Attention
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.delta import DeltaRule
from mallee.worker.model.loading.weights import ModelWeights
from mallee.worker.model.ops import Ops
from mallee.worker.model.plan import Plan
from mallee.worker.model.rotary import Rotary, Rotation
from mallee.worker.model.states import Folds, LayerStates

Site: TypeAlias = Literal["embed", "turned", "heads", "attention", "output", "norm", "logits"]
"""Places at which a forward pass can be watched: embeddings; a layer's queries and keys after turning,
the output of its heads, the stream after its attention, the stream after its MLP; last norm; logits."""


LayerMemory: TypeAlias = torch.Tensor | LayerStates
"""The KV of a layer by slot, [num_slots, 2, num_kv_heads, head_dim], or its states."""


class Tap(Protocol):
    """Sees the values at every site of a layer, or of none (None); must neither change nor keep them."""

    def __call__(self, site: Site, layer: int | None, values: torch.Tensor) -> None: ...


class Decoder:
    """A decoder with its weights; holds no state between calls. `tap`, if set, watches each pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        attention: Attention,
        ops: Ops,
        max_positions: int,
    ) -> None:
        """Serves positions below `max_positions`: the rotary tables end there."""
        self.config = config
        self.weights = weights
        self.tap: Tap | None = None
        self._attention = attention
        self._ops = ops
        self._gated = partial(ops.gated, activation=config.activation)
        self._delta = (
            None if config.delta is None else DeltaRule(config.delta, config.norm_eps, ops)
        )
        self._verified: dict[int, torch.Tensor] = {}  # by recurrent layer, of the last pass
        table = weights.embedding
        self._embedding_scale = None
        if config.family.scales_embedding:  # rounded to the model's dtype, as it was in training
            self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=table.dtype))
        self._rotaries = tuple(
            Rotary(
                rope,
                head_dim=config.head_dim,
                max_positions=max_positions,
                dtype=table.dtype,
                device=str(table.device),
                rotary_dim=config.rotary_dim,
            )
            for rope in config.ropes
        )
        self._kv_scales: list[list[float]] = []
        self.read_kv_scales()
        numbers = {rope: i for i, rope in enumerate(config.ropes)}
        self._ropes = tuple(
            0 if layer.rope is None else numbers[layer.rope] for layer in config.layers
        )

    def read_kv_scales(self) -> bool:
        """Go by the scales of KV that the weights have now; whether they are others than before."""
        before, own = self._kv_scales, (layer.kv_scales for layer in self.weights.layers)
        self._kv_scales = [[1.0, 1.0] if each is None else each.tolist() for each in own]
        return self._kv_scales != before

    def logits(self, plan: Plan, memory: Sequence[LayerMemory]) -> torch.Tensor:
        """Write the batch's KV into `memory`, by layer; scores after each of `plan.outputs`: [k, vocab]."""
        self._verified.clear()  # those of the pass before are of no use any more
        hidden = embedding(plan.tokens, self.weights.embedding)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self.tap is not None:
            self.tap("embed", None, hidden)
        turns = [rotary.at(plan.positions) for rotary in self._rotaries]
        x = self._ops.norm(hidden, self.weights.layers[0].input_norm, self.config.norm_eps)
        for index, own in enumerate(memory):
            hidden, x = self._layer(index, hidden, x, turns[self._ropes[index]], plan, own)
        return self._head(hidden.index_select(0, plan.outputs))

    def refold(self, folds: Folds, tokens: torch.Tensor, memory: Sequence[LayerMemory]) -> None:
        """Write states anew by `folds`, of `tokens` among `Folds.verified` of the last pass."""
        assert self._delta is not None, "no layer is recurrent"
        for index, mixed in self._verified.items():
            states, layer = memory[index], self.weights.layers[index]
            assert isinstance(states, LayerStates), "a layer that is not recurrent"
            self._delta.fold(mixed.index_select(0, tokens), layer, folds, states)

    def _head(self, last: torch.Tensor) -> torch.Tensor:
        last = self._ops.norm(last, self.weights.norm, self.config.norm_eps)
        logits = self.weights.head(last)
        cap = self.config.logit_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.tap is not None:
            self.tap("norm", None, last)
            self.tap("logits", None, logits)
        return logits

    def _layer(
        self,
        index: int,
        hidden: torch.Tensor,
        x: torch.Tensor,
        turn: Rotation,
        plan: Plan,
        memory: LayerMemory,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden` after one layer, which reads it normed, as `x`; and what the next one reads.

        After the last layer that is `hidden` itself: only some of its tokens are normed. The layer's KV
        is written to `memory`.
        """
        layers, ops, eps = self.weights.layers, self._ops, self.config.norm_eps
        layer = layers[index]
        if isinstance(memory, LayerStates):
            assert self._delta is not None, "states of a model without recurrent layers"
            assert plan.folds is not None, "a plan without states"
            mixed = layer.qkv(x)
            if len(plan.folds.verified):
                self._verified[index] = mixed.index_select(0, plan.folds.verified)
            seen = self._delta(mixed, layer, plan.folds, memory)
        else:
            seen = self._attend(index, x, turn, plan, memory)
        hidden, x = ops.added_norm(
            layer.output,
            seen,
            hidden,
            own_norm=layer.attention_norm,
            norm=layer.mlp_norm,
            eps=eps,
        )
        if self.tap is not None:
            self.tap("heads", index, seen)
            self.tap("attention", index, hidden)
        inner = ops.gated(layer.gate_up(x), self.config.activation)
        if layer.experts is not None:
            hidden, share = layer.experts(x, hidden, self._gated)
            inner = inner * share
        if index + 1 < len(layers):
            hidden, x = ops.added_norm(
                layer.down,
                inner,
                hidden,
                own_norm=layer.output_norm,
                norm=layers[index + 1].input_norm,
                eps=eps,
            )
        else:
            hidden = x = ops.added(layer.down, inner, hidden, own_norm=layer.output_norm, eps=eps)
        if self.tap is not None:
            self.tap("output", index, hidden)
        return hidden, x

    def _attend(
        self,
        index: int,
        x: torch.Tensor,
        turn: Rotation,
        plan: Plan,
        memory: torch.Tensor,
    ) -> torch.Tensor:
        """The output of the layer's heads: [n, num_heads * head_dim]; KV is written to `memory`."""
        config, layer = self.config, self.weights.layers[index]
        n = len(x)
        window = config.layers[index].window
        qkv = layer.qkv(x)
        gate = None
        if config.family.is_hybrid:
            qkv, gate = qkv.tensor_split((-config.num_heads * config.head_dim,), 1)
            qkv = qkv.contiguous()
        turned = self._ops.place(
            qkv.view(n, -1, config.head_dim),
            turn,
            plan.window_slots.get(window, plan.slots),
            memory,
            head_norm=layer.qk_norm,
            eps=config.norm_eps,
            kv_scales=layer.kv_scales,
        )
        if self.tap is not None:
            self.tap("turned", index, turned)
        q = turned[:, : config.num_heads]
        # Scores are linear in keys, outputs in values: no backend has to know the scales of KV.
        k_scale, v_scale = self._kv_scales[index]
        scale = config.query_scale * k_scale
        seen = self._attention.attend(plan.reads[window], q, memory, scale=scale)
        seen = (seen if v_scale == 1 else seen * v_scale).reshape(n, -1)
        return seen if gate is None else seen * gate.sigmoid()
