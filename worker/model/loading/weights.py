"""A model's weights, read from a checkpoint and fused for our layers.

Doesn't know attention or KV memory.
"""

import logging
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mallee.worker.model.config import ModelConfig
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.choose import Machine, make_linear
from mallee.worker.model.linear.experts import Experts
from mallee.worker.model.linear.matrix import Matrix
from mallee.worker.model.linear.scheme import Scheme
from mallee.worker.model.loading.checkpoint import Checkpoint
from mallee.worker.model.loading.reader import Parts, WeightReader

log = logging.getLogger(__name__)


class LayerWeights(NamedTuple):
    """One decoder layer. Norm weights are what the norm multiplies by, the family's offset added."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear
    """hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values; in a hybrid model behind
    these the gate of the heads' output, num_heads * head_dim. Of a recurrent layer: queries, keys and values,
    which are convolved, the gate of its output, values, and for each value head the rate at which it learns
    and what its decay depends on."""
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim], float32
    conv: torch.Tensor | None  # [conv_width, conv_inputs], float32, the last token last
    decay: torch.Tensor | None  # [2, num_value_heads], float32: the rate, below 0, and a bias
    gate_norm: torch.Tensor | None  # [value_dim], of a recurrent layer's output before its gate
    output: Linear  # num_heads * head_dim, or values of a recurrent layer, -> hidden
    attention_norm: torch.Tensor | None  # [hidden], of attention's output before it is added
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate: gate, up
    down: Linear  # intermediate -> hidden
    experts: Experts | None  # the routed ones: then `gate_up` and `down` are the shared one's
    output_norm: torch.Tensor | None  # [hidden], of the MLP's output before it is added
    kv_scales: torch.Tensor | None  # [2], float32: keys and values in memory are shares of these


class ModelWeights(NamedTuple):
    """A decoder's weights.

    Where a product keeps its own layout, tied weights are there twice: rows are looked up in one and
    multiplied by the other. Of Gemma 3's 262 144 tokens the second is 0.34 GB in bfloat16 for the 270M
    model, which spends most of a decode step on this product, and 2 GB for the 12B one, 8 % of its
    weights; multiplying by the first instead takes up to twice as long.
    """

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: Linear  # hidden -> vocab
    head_scheme: Scheme | None  # of the head's own matrix, if it has 8 bits

    @property
    def nbytes(self) -> int:
        """Memory of all weights."""
        table = self.embedding
        total = table.nbytes + self.norm.nbytes + self.head.nbytes_beside(table)
        for part in (each for layer in self.layers for each in layer if each is not None):
            own = part.nbytes if isinstance(part, torch.Tensor) else part.nbytes_beside(table)
            total += own
        return total

    @property
    def has_kv_scales(self) -> bool:
        """Whether KV is kept as shares of stored scales."""
        return any(layer.kv_scales is not None for layer in self.layers)

    @property
    def products(self) -> str:
        """The products that were chosen, and of each the number."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
            linears += [] if layer.experts is None else layer.experts.products
        counts = Counter(linear.label for linear in linears)
        return "; ".join(f"{count} of {label}" for label, count in counts.items())


def load_weights(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    kv_dtype: torch.dtype | None = None,
) -> ModelWeights:
    """The checkpoint in `folder`, as `dtype` on `device`, for KV in `kv_dtype` (None: in `dtype`).

    Raises ModelNotFound, WeightsMismatch.
    """
    checkpoint = Checkpoint(folder, config.weights_prefix, config.family.ignored)
    reader = WeightReader(
        *(checkpoint.tensors, checkpoint.read, config),
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
    )
    weights = _made(reader, config, dtype, device)
    stored = config.quantization.label if config.quantization else config.dtype
    log.info("%s: %s, %d bytes in memory; %s", folder, stored, weights.nbytes, weights.products)
    return weights


def fuse_weights(
    tensors: dict[str, torch.Tensor],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    kv_dtype: torch.dtype | None = None,
) -> ModelWeights:
    """Copies of `tensors`, by transformers' names, as our layers. Takes them out of the dict.

    Raises WeightsMismatch.
    """
    reader = WeightReader(
        *(dict(tensors), lambda name: tensors.pop(name).clone(), config),
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
    )
    return _made(reader, config, dtype, device)


def _made(
    reader: WeightReader, config: ModelConfig, dtype: torch.dtype, device: str
) -> ModelWeights:
    machine = Machine.of(device)

    def product(field: str, parts: list[Matrix]) -> Linear | Experts:
        if field == "experts" and config.experts is not None:
            return Experts(parts, config.experts, dtype, machine)
        return make_linear(parts, dtype, machine)

    def made(parts: Parts) -> dict[str, Any]:
        products = {field: product(field, read()) for field, read in parts.products.items()}
        return {**products, **{field: read() for field, read in parts.tensors.items()}}

    some = ("qk_norm", "attention_norm", "output_norm", "kv_scales")
    absent = dict.fromkeys((*some, "conv", "decay", "gate_norm", "experts"))
    layers = tuple(
        LayerWeights(**{**absent, **made(reader.layer(i))}) for i in range(config.num_layers)
    )
    own = made(reader.model())
    if "head" not in own:
        own["head"] = make_linear([own["embedding"]], dtype, machine)
    return ModelWeights(layers=layers, head_scheme=reader.head_scheme, **own)
