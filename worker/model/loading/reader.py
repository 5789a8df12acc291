"""Reads a checkpoint's tensors, checked name by name, in the form of which our layers are made.

Doesn't know files or products. A tensor that is missing, unexpected or of another shape is refused at
once; nothing is skipped silently.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from mallee.protocol.errors import WeightsMismatch
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.linear.matrix import Matrix, Quantized, is_number
from mallee.worker.model.linear.scheme import Scheme
from mallee.worker.model.loading.stored import (
    DELTA_BA,
    DELTA_CONV,
    DELTA_DECAY,
    DELTA_NORM,
    DELTA_QKVZ,
    QK_NORMS,
    Found,
    check_tensors,
    expected_tensors,
    expert_shapes,
    kv_scale_names,
    layer_norms,
    layer_products,
    scale_name,
    scheme_of,
)

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """Reads what the fields of a layer, or those of a model beside its layers, are made of, by field.

    A product has one matrix for each that is fused into it.
    """

    tensors: dict[str, Callable[[], torch.Tensor]]
    products: dict[str, Callable[[], list[Matrix]]]


class WeightReader:
    """The tensors `found`, each read by its name when it is wanted, as `dtype` on `device`."""

    def __init__(
        self,
        found: Mapping[str, Found],
        read: Callable[[str], torch.Tensor],
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: str,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Raises WeightsMismatch. Stored scales of KV are for KV in FP8, and left out for any other."""
        names = {name for name in found if not name.endswith("rotary_emb.inv_freq")}  # a constant
        if config.tie_word_embeddings:
            names.discard("lm_head.weight")  # some files hold the tied copy
        check_tensors(expected_tensors(config, names), {name: found[name] for name in names})
        kv_scales = kv_scale_names(config, names)
        if kv_scales and kv_dtype != torch.float8_e4m3fn:
            name, _ = next(iter(kv_scales.values()))
            log.info("scales of KV, %s and others, are not used: KV is not in FP8", name)
            kv_scales = {}
        self._config = config
        self._names = names
        self._read = read
        self._dtype = dtype
        self._device = device
        self._kv_scale_names = kv_scales

    @property
    def has_kv_scales(self) -> bool:
        """Whether layers have scales of KV."""
        return bool(self._kv_scale_names)

    @property
    def head_scheme(self) -> Scheme | None:
        """The 8-bit form of the head's own matrix; None if it has plain floats, or is the embedding."""
        is_own = not self._config.tie_word_embeddings
        return scheme_of(self._config, "lm_head", self._names) if is_own else None

    def model(self) -> Parts:
        """The fields of a model beside its layers. A tied head has no part of its own."""
        is_tied = self._config.tie_word_embeddings
        return Parts(
            {
                "embedding": partial(self._take, "model.embed_tokens.weight"),
                "norm": partial(self._norm, "model.norm.weight"),
            },
            {} if is_tied else {"head": partial(self._matrices, "lm_head")},
        )

    def layer(self, i: int) -> Parts:
        """The fields that layer `i` has."""
        prefix, family = f"model.layers.{i}.", self._config.family
        tensors: dict[str, Callable[[], torch.Tensor]] = {
            field: partial(self._norm, f"{prefix}{name}.weight")
            for field, name in layer_norms(family).items()
        }
        is_recurrent = self._config.layers[i].is_recurrent
        if is_recurrent:
            tensors["conv"] = partial(self._conv, prefix)
            tensors["decay"] = partial(self._decay, prefix)
            tensors["gate_norm"] = partial(self._take, f"{prefix}{DELTA_NORM}.weight")
        elif family.has_qk_norm:
            tensors["qk_norm"] = partial(self._qk_norm, prefix)
        if i in self._kv_scale_names:
            tensors["kv_scales"] = partial(self._kv_scales, *self._kv_scale_names[i])
        products: dict[str, Callable[[], list[Matrix]]] = {
            field: partial(self._matrices, *(prefix + name for name in matrices))
            for field, matrices in layer_products(self._config, i).items()
        }
        if family.is_hybrid and not is_recurrent:
            products["qkv"] = partial(self._gated_qkv, f"{prefix}self_attn.")
        elif is_recurrent and family.has_mixed_rows:
            products["qkv"] = partial(self._parted_qkv, prefix)
        if "experts" in products:
            products["experts"] = partial(self._experts, i, products["experts"])
        return Parts(tensors, products)

    def _take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = [self._read(name) for name in names]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        return joined.to(device=self._device, dtype=dtype or self._dtype).contiguous()

    def _matrices(self, *modules: str) -> list[Matrix]:
        return [self._matrix(module) for module in modules]

    def _matrix(self, module: str) -> Matrix:
        scheme = scheme_of(self._config, module, self._names)
        return self._take(module + ".weight") if scheme is None else self._quantized(module, scheme)

    def _quantized(self, module: str, scheme: Scheme) -> Quantized:
        name = scale_name(module, self._names)
        scales = self._take(name, dtype=torch.float32)
        stored = self._unpacked(module) if scheme.is_packed else self._read(module + ".weight")
        values = stored.to(self._device)
        if not values.is_meta:
            _check_numbers(module, values, name, scales)
        if scheme.scales != "block":
            scales = scales.reshape(-1, 1).expand(len(values), 1).contiguous()
        return Quantized(values, scales, scheme)

    def _unpacked(self, module: str) -> torch.Tensor:
        """Four values to an int32, the first in its lowest byte, each 128 too large."""
        packed = self._read(module + ".weight_packed")
        shape = self._read(module + ".weight_shape").tolist()
        if shape[0] != packed.shape[0] or -(-shape[1] // 4) != packed.shape[1]:
            raise WeightsMismatch(f"{module}.weight_shape is {shape}, packed {tuple(packed.shape)}")
        return packed.view(torch.uint8)[:, : shape[1]].bitwise_xor(0x80).view(torch.int8)

    def _kv_scales(self, *names: str) -> torch.Tensor:
        """Of keys and of values, whose names may be one. Raises WeightsMismatch."""
        found = {name: self._read(name).reshape(1).float() for name in dict.fromkeys(names)}
        scales = torch.cat([found[name] for name in names])
        for name, scale in zip(names, [] if scales.is_meta else scales.tolist(), strict=False):
            if not 0 < scale < math.inf:
                text = f"{name} is {scale}, a scale of KV is above 0 and finite; give kv_dtype auto"
                raise WeightsMismatch(text)
        return scales.to(self._device)

    def _norm(self, name: str) -> torch.Tensor:
        """A norm's weight, in float32 where there is an offset: bfloat16 would round the sum."""
        offset = self._config.family.norm_offset
        return self._take(name, dtype=torch.float32) + offset if offset else self._take(name)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = self._config
        names = (f"{prefix}{name}.weight" for name in QK_NORMS)
        own = self._take(*names, dtype=torch.float32).view(2, -1)
        counts = torch.tensor([config.num_heads, config.num_kv_heads], device=self._device)
        turned = own[:, self._order()]
        return turned.repeat_interleave(counts, 0) + config.family.norm_offset

    def _order(self) -> list[int]:
        """A head's dimensions as we keep them: those that turn together are half a head apart.

        Where only the first are turned, in pairs half of them apart, the others fill up both halves. Scores
        stay the same, as queries and keys are in one order.
        """
        head_dim, turned = self._config.head_dim, self._config.rotary_dim or self._config.head_dim
        middle = turned + (head_dim - turned) // 2
        parts = ((0, turned // 2), (turned, middle), (turned // 2, turned), (middle, head_dim))
        return [place for begin, end in parts for place in range(begin, end)]

    def _by_head(self, module: str, num_heads: int) -> torch.Tensor:
        """The rows of a matrix by head: [heads, parts, head_dim, in], of queries with their gates."""
        own = self._take(module + ".weight")
        return own.view(num_heads, -1, self._config.head_dim, own.shape[1])

    def _gated_qkv(self, prefix: str) -> list[Matrix]:
        queries, gates = self._by_head(f"{prefix}q_proj", self._config.num_heads).unbind(1)
        (keys,) = self._by_head(f"{prefix}k_proj", self._config.num_kv_heads).unbind(1)
        qk = [part[:, self._order()].flatten(0, 1) for part in (queries, keys)]
        return [*qk, self._take(f"{prefix}v_proj.weight"), gates.flatten(0, 1).contiguous()]

    def _parted_qkv(self, prefix: str) -> list[Matrix]:
        """Queries, keys, values, gates, rates and decays, from rows that lie by key head."""
        own = self._config.delta
        assert own is not None, "a model without recurrent layers"
        each = own.num_value_heads // own.num_key_heads
        values = each * own.value_dim
        parts: list[Matrix] = []
        for name, sizes in (
            (DELTA_QKVZ, (own.key_dim, own.key_dim, values, values)),
            (DELTA_BA, (each, each)),
        ):
            rows = self._take(f"{prefix}{name}.weight")
            by_head = rows.view(own.num_key_heads, -1, rows.shape[1])
            parts += [part.flatten(0, 1) for part in by_head.split_with_sizes(sizes, 1)]
        return parts

    def _experts(self, i: int, router: Callable[[], list[Matrix]]) -> list[Matrix]:
        """The router, and of each expert of layer `i` gate with up, and down."""
        names = list(expert_shapes(self._config, i, self._names))
        if len(names) == 2:
            both = zip(*(self._take(name) for name in names), strict=True)
            return [*router(), *(part for pair in both for part in pair)]
        found = router()
        for gate, up, down in zip(names[::3], names[1::3], names[2::3], strict=True):
            found += [self._take(gate, up), self._take(down)]
        return found

    def _conv(self, prefix: str) -> torch.Tensor:
        own = self._take(f"{prefix}{DELTA_CONV}.weight", dtype=torch.float32)
        return own.squeeze(1).T.contiguous()

    def _decay(self, prefix: str) -> torch.Tensor:
        names = (prefix + name for name in DELTA_DECAY)
        log, bias = self._take(*names, dtype=torch.float32).view(2, -1)
        return torch.stack((-log.exp(), bias))


def _check_numbers(
    module: str, values: torch.Tensor, scale_name: str, scales: torch.Tensor
) -> None:
    """Raises WeightsMismatch if no sense can be made of a matrix: one bad scale spoils every answer."""
    if not is_number(values):
        raise WeightsMismatch(f"{module}.weight holds a NaN; fetch the checkpoint again")
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise WeightsMismatch(
            f"{scale_name} holds a number that is infinite, negative or no number"
        )
