"""A checkpoint's tensors, checked name by name and fused for our layers.

Doesn't know attention or KV memory. A tensor that is missing, unexpected or of another shape stops
the load; nothing is skipped silently.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model.config import ModelConfig, digest_of
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.choose import Machine, Matrix, make_linear
from mallee.worker.model.linear.matrix import Quantized, is_number
from mallee.worker.model.linear.scheme import Scheme
from mallee.worker.model.loading.stored import (
    ACTIVATION_SCALES,
    check_tensors,
    expected_tensors,
    is_kv_scale,
    kv_scale_names,
    scale_name,
    scheme_of,
)

log = logging.getLogger(__name__)

_OF_SIGHT = ("vision_tower.", "multi_modal_projector.")


class LayerWeights(NamedTuple):
    """One decoder layer. Norm weights are what the norm multiplies by, the family's offset added."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Linear  # hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values
    qk_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim], float32
    output: Linear  # num_heads * head_dim -> hidden
    attention_norm: torch.Tensor | None  # [hidden], of attention's output before it is added
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate: gate, up
    down: Linear  # intermediate -> hidden
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
        return self.layers[0].kv_scales is not None

    @property
    def products(self) -> str:
        """The products that were chosen, and of each the number."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
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
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with _opened(file) as opened:
            for stored in opened.keys():  # noqa: SIM118  (not a dict)
                if config.weights_prefix and stored.startswith(_OF_SIGHT):
                    continue
                name = stored.removeprefix(config.weights_prefix)
                if name in tensors:
                    raise WeightsMismatch(f"{file}: {name} is in another file too", path=str(file))
                tensors[name] = opened.get_tensor(stored)
    weights = fuse_weights(tensors, config, dtype=dtype, device=device, kv_dtype=kv_dtype)
    stored = config.quantization.label if config.quantization else config.dtype
    log.info("%s: %s, %d bytes in memory; %s", folder, stored, weights.nbytes, weights.products)
    return weights


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises WeightsMismatch naming the file if it is cut short or no such file."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as e:
        raise WeightsMismatch(
            f"{file} can't be read as safetensors ({e}); fetch it again", path=str(file)
        ) from e


def fuse_weights(
    tensors: dict[str, torch.Tensor],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    kv_dtype: torch.dtype | None = None,
) -> ModelWeights:
    """`tensors`, by transformers' names, as our layers. Empties the dict. Raises WeightsMismatch.

    Stored scales of KV are for KV in FP8, and left out for any other.
    """
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some files hold the tied copy
    for name in [n for n in tensors if n.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # old files store this constant
    check_tensors(expected_tensors(config, tensors), tensors)

    kv_scales = kv_scale_names(config, tensors)
    if kv_scales and kv_dtype != torch.float8_e4m3fn:
        log.info("scales of KV, %s and others, are not used: KV is not in FP8", kv_scales[0][0])
        kv_scales = []
    source = _Source(tensors, config, dtype, device, Machine.of(device), kv_scales)
    layers = tuple(source.layer(i) for i in range(config.num_layers))
    embedding = source.take("model.embed_tokens.weight")
    if config.tie_word_embeddings:
        head = make_linear([embedding], dtype, source.machine)
    else:
        head = source.linear("lm_head")
    return ModelWeights(embedding, layers, source.norm("model.norm.weight"), head)


class _Source(NamedTuple):
    """A checkpoint's tensors, taken out one by one in the form that our layers need."""

    tensors: dict[str, torch.Tensor]
    config: ModelConfig
    dtype: torch.dtype
    device: str
    machine: Machine
    kv_scale_names: list[tuple[str, str]]  # by layer; empty if they are not wanted

    def layer(self, i: int) -> LayerWeights:
        p = f"model.layers.{i}."
        a, m = p + "self_attn.", p + "mlp."
        is_sandwich = self.config.family.has_sandwich_norms
        after_attention = self.norm(p + "post_attention_layernorm.weight")
        return LayerWeights(
            input_norm=self.norm(p + "input_layernorm.weight"),
            qkv=self.linear(a + "q_proj", a + "k_proj", a + "v_proj"),
            qk_norm=self._qk_norm(a) if self.config.family.has_qk_norm else None,
            output=self.linear(a + "o_proj"),
            attention_norm=after_attention if is_sandwich else None,
            mlp_norm=self.norm(p + "pre_feedforward_layernorm.weight")
            if is_sandwich
            else after_attention,
            gate_up=self.linear(m + "gate_proj", m + "up_proj"),
            down=self.linear(m + "down_proj"),
            output_norm=self.norm(p + "post_feedforward_layernorm.weight") if is_sandwich else None,
            kv_scales=self._kv_scales(*self.kv_scale_names[i]) if self.kv_scale_names else None,
        )

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = [self.tensors.pop(name) for name in names]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        return joined.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def linear(self, *modules: str) -> Linear:
        return make_linear([self._matrix(each) for each in modules], self.dtype, self.machine)

    def _matrix(self, module: str) -> Matrix:
        scheme = scheme_of(self.config, module, self.tensors)
        return self.take(module + ".weight") if scheme is None else self._quantized(module, scheme)

    def _quantized(self, module: str, scheme: Scheme) -> Quantized:
        """The matrix in memory of its own: safetensors maps the file, which may change."""
        name = scale_name(module, self.tensors)
        scales = self.take(name, dtype=torch.float32)
        stored = (
            self._unpacked(module) if scheme.is_packed else self.tensors.pop(module + ".weight")
        )
        values = stored.to(self.device, copy=True)
        for ending in ACTIVATION_SCALES:
            self.tensors.pop(module + ending, None)
        if not values.is_meta:
            _check_numbers(module, values, name, scales)
        if scheme.scales != "block":
            scales = scales.reshape(-1, 1).expand(len(values), 1).contiguous()
        return Quantized(values, scales, scheme)

    def _unpacked(self, module: str) -> torch.Tensor:
        """Four values to an int32, the first in its lowest byte, each 128 too large."""
        packed = self.tensors.pop(module + ".weight_packed")
        shape = self.tensors.pop(module + ".weight_shape").tolist()
        if shape[0] != packed.shape[0] or -(-shape[1] // 4) != packed.shape[1]:
            raise WeightsMismatch(f"{module}.weight_shape is {shape}, packed {tuple(packed.shape)}")
        return packed.view(torch.uint8)[:, : shape[1]].bitwise_xor(0x80).view(torch.int8)

    def _kv_scales(self, *names: str) -> torch.Tensor:
        """Of keys and of values, whose names may be one. Raises WeightsMismatch."""
        scales = torch.cat([self.tensors[name].reshape(1).float() for name in names])
        for name, scale in zip(names, [] if scales.is_meta else scales.tolist(), strict=False):
            if not 0 < scale < math.inf:
                text = f"{name} is {scale}, a scale of KV is above 0 and finite; give kv_dtype auto"
                raise WeightsMismatch(text)
        return scales.to(self.device)

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight, in float32 where there is an offset: bfloat16 would round the sum."""
        offset = self.config.family.norm_offset
        return self.take(name, dtype=torch.float32) + offset if offset else self.take(name)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = self.config
        own = self.take(prefix + "q_norm.weight", prefix + "k_norm.weight", dtype=torch.float32)
        counts = torch.tensor([config.num_heads, config.num_kv_heads], device=self.device)
        return own.view(2, -1).repeat_interleave(counts, 0) + config.family.norm_offset


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


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: the index's if there is one.

    Raises ModelNotFound, WeightsMismatch.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _indexed(index)]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {', '.join(missing)}, named by {index.name}")
        return tuple(files)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} holds no .safetensors file", path=str(folder))
    return tuple(files)


def _indexed(index: Path) -> list[str]:
    """The file names in the index. Raises WeightsMismatch if it doesn't name files beside it."""
    try:
        content = json.loads(index.read_text())
    except ValueError as e:
        raise WeightsMismatch(f"{index} is not JSON: {e}", path=str(index)) from e
    where = content.get("weight_map") if isinstance(content, dict) else None
    names = sorted({str(name) for name in where.values()}) if isinstance(where, dict) else []
    if not names or any(name != Path(name).name for name in names):
        raise WeightsMismatch(
            f"{index}: weight_map must name the file of each tensor, beside the index",
            path=str(index),
        )
    return names


def weights_digest(folder: Path) -> str:
    """A cheap digest of the weights: each file's header, size, scales of KV, and 64 windows of 1 KiB.

    Not proof against an adversary: it tells checkpoints apart, it does not authenticate them.
    """
    return digest_of([part for file in weight_files(folder) for part in _samples(file)])


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        yield file.read(header)
        for i in range(64):
            file.seek(8 + header + (size - 8 - header) * i // 64)
            yield file.read(1024)
    with _opened(path) as opened:  # a few bytes, which decide what every byte of KV means
        for name in filter(is_kv_scale, sorted(opened.keys())):
            yield opened.get_tensor(name).flatten().view(torch.uint8).numpy().tobytes()
