"""A checkpoint's tensors, checked name by name and fused for our layers.

Doesn't know attention or KV memory. A tensor that is missing, unexpected or of another shape stops
the load; nothing is skipped silently.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model.config import Family, ModelConfig, digest_of
from mallee.worker.model.linear import Linear, make_linear

_SHOWN = 8
_OF_SIGHT = ("vision_tower.", "multi_modal_projector.")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # others need scales


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


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of `config` must hold, under transformers' names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        p = f"model.layers.{i}."
        for name in _layer_norms(config.family):
            is_of_heads = name.startswith("self_attn.")
            shapes[p + name] = (config.head_dim if is_of_heads else hidden,)
        shapes[p + "self_attn.q_proj.weight"] = (query, hidden)
        shapes[p + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[p + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[p + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[p + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[p + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[p + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def _layer_norms(family: Family) -> list[str]:
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if family.has_sandwich_norms:
        names += ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]
    if family.has_qk_norm:
        names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    return names


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: str
) -> ModelWeights:
    """The checkpoint in `folder`, as `dtype` on `device`. Raises ModelNotFound, WeightsMismatch."""
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
    return fuse_weights(tensors, config, dtype=dtype, device=device)


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
    tensors: dict[str, torch.Tensor], config: ModelConfig, *, dtype: torch.dtype, device: str
) -> ModelWeights:
    """`tensors`, by transformers' names, as our layers. Empties the dict. Raises WeightsMismatch."""
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some files hold the tied copy
    for name in [n for n in tensors if n.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # old files store this constant
    _check_names(expected_shapes(config), tensors)

    source = _Source(tensors, config, dtype, device)
    layers = tuple(source.layer(i) for i in range(config.num_layers))
    embedding = source.take("model.embed_tokens.weight")
    is_tied = config.tie_word_embeddings
    head = make_linear(embedding) if is_tied else source.linear("lm_head.weight")
    return ModelWeights(embedding, layers, source.norm("model.norm.weight"), head)


class _Source(NamedTuple):
    """A checkpoint's tensors, taken out one by one in the form that our layers need."""

    tensors: dict[str, torch.Tensor]
    config: ModelConfig
    dtype: torch.dtype
    device: str

    def layer(self, i: int) -> LayerWeights:
        p = f"model.layers.{i}."
        a, m = p + "self_attn.", p + "mlp."
        is_sandwich = self.config.family.has_sandwich_norms
        after_attention = self.norm(p + "post_attention_layernorm.weight")
        return LayerWeights(
            input_norm=self.norm(p + "input_layernorm.weight"),
            qkv=self.linear(a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"),
            qk_norm=self._qk_norm(a) if self.config.family.has_qk_norm else None,
            output=self.linear(a + "o_proj.weight"),
            attention_norm=after_attention if is_sandwich else None,
            mlp_norm=self.norm(p + "pre_feedforward_layernorm.weight")
            if is_sandwich
            else after_attention,
            gate_up=self.linear(m + "gate_proj.weight", m + "up_proj.weight"),
            down=self.linear(m + "down_proj.weight"),
            output_norm=self.norm(p + "post_feedforward_layernorm.weight") if is_sandwich else None,
        )

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        found = [self.tensors.pop(name) for name in names]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        return joined.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def linear(self, *names: str) -> Linear:
        return make_linear(self.take(*names))

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight, in float32 where there is an offset: bfloat16 would round the sum."""
        offset = self.config.family.norm_offset
        return self.take(name, dtype=torch.float32) + offset if offset else self.take(name)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        config = self.config
        own = self.take(prefix + "q_norm.weight", prefix + "k_norm.weight", dtype=torch.float32)
        counts = torch.tensor([config.num_heads, config.num_kv_heads], device=self.device)
        return own.view(2, -1).repeat_interleave(counts, 0) + config.family.norm_offset


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
    """A cheap digest of the weights: each file's header, size, and 64 windows of 1 KiB.

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


def _check_names(expected: dict[str, tuple[int, ...]], found: dict[str, torch.Tensor]) -> None:
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(found[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    wrong += [
        f"{name} {found[name].dtype}"
        for name in expected
        if name in found and found[name].dtype not in _DTYPES
    ]
    if not missing and not unexpected and not wrong:
        return
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("shape or type", wrong),
        )
        if names
    ]
    raise WeightsMismatch(
        "the weights don't fit config.json; " + "; ".join(parts),
        missing=missing,
        unexpected=unexpected,
        wrong_tensors=wrong,
    )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
