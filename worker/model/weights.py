"""A checkpoint's tensors, checked name by name and fused for our layers.

Doesn't know attention or KV memory. A tensor that is missing, unexpected or of another shape stops
the load; nothing is skipped silently.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from mallee.protocol.errors import ModelNotFound, WeightsMismatch
from mallee.worker.model.config import ModelConfig, digest_of

_SHOWN = 8


class LayerWeights(NamedTuple):
    """One decoder layer; matrices are [in, out].

    On a CPU a product of 8 to 32 rows with such a matrix takes a third to a fifth of the time that
    it takes with the [out, in] form of checkpoints (measured, float32, MKL).
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [hidden, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values
    output: torch.Tensor  # [num_heads * head_dim, hidden]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [hidden, 2 * intermediate]: gate, up
    down: torch.Tensor  # [intermediate, hidden]


class ModelWeights(NamedTuple):
    """A decoder's weights. `head` is `embedding` itself when they are tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]


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
        shapes[p + "input_layernorm.weight"] = (hidden,)
        shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        shapes[p + "self_attn.q_proj.weight"] = (query, hidden)
        shapes[p + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[p + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[p + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[p + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[p + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[p + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: str
) -> ModelWeights:
    """The checkpoint in `folder`, as `dtype` on `device`. Raises ModelNotFound, WeightsMismatch."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                tensors[name] = opened.get_tensor(name)
    return fuse_weights(tensors, config, dtype=dtype, device=device)


def fuse_weights(
    tensors: dict[str, torch.Tensor], config: ModelConfig, *, dtype: torch.dtype, device: str
) -> ModelWeights:
    """`tensors`, by transformers' names, as our layers. Empties the dict. Raises WeightsMismatch."""
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # some files hold the tied copy
    for name in [n for n in tensors if n.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # old files store this constant
    _check_names(expected_shapes(config), tensors)

    def take(*names: str) -> torch.Tensor:
        found = [tensors.pop(name) for name in names]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        return joined.to(device=device, dtype=dtype).contiguous()

    def matrix(*names: str) -> torch.Tensor:
        return take(*names).t().contiguous()

    layers = []
    for i in range(config.num_layers):
        a, m = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layers.append(
            LayerWeights(
                input_norm=take(f"model.layers.{i}.input_layernorm.weight"),
                qkv=matrix(a + "q_proj.weight", a + "k_proj.weight", a + "v_proj.weight"),
                output=matrix(a + "o_proj.weight"),
                post_norm=take(f"model.layers.{i}.post_attention_layernorm.weight"),
                gate_up=matrix(m + "gate_proj.weight", m + "up_proj.weight"),
                down=matrix(m + "down_proj.weight"),
            )
        )
    embedding = take("model.embed_tokens.weight")
    head = embedding if config.tie_word_embeddings else take("lm_head.weight")
    return ModelWeights(embedding, tuple(layers), take("model.norm.weight"), head)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: the index's if there is one. Raises ModelNotFound."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ModelNotFound(f"{folder} lacks {', '.join(missing)}, named by {index.name}")
        return tuple(files)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{folder} holds no .safetensors file", path=str(folder))
    return tuple(files)


def weights_digest(folder: Path) -> str:
    """A cheap digest of the weights: each file's header, size, and 64 windows of 1 KiB.

    Not proof against an adversary: it tells checkpoints apart, it does not authenticate them.
    """
    return digest_of([part for file in weight_files(folder) for part in _samples(file)])


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of all bytes of `tensors`, for small models that never were files."""
    parts: list[bytes] = []
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        parts += [name.encode(), tensor.contiguous().view(torch.uint8).numpy().tobytes()]
    return digest_of(parts)


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
    if not missing and not unexpected and not wrong:
        return
    parts = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("shape", wrong))
        if names
    ]
    raise WeightsMismatch(
        "the weights don't fit config.json; " + "; ".join(parts),
        missing=missing,
        unexpected=unexpected,
        wrong_shapes=wrong,
    )


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
