"""What a checkpoint's config.json means for us: shapes, rotary frequencies, end-of-sequence ids.

Doesn't know weights or tensors. Refuses, by name, everything that we would compute wrongly.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mallee.protocol.errors import ModelNotFound, UnsupportedModel
from mallee.protocol.model import ModelSpec, fingerprint

SUPPORTED = ("llama",)
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretched rotary frequencies (rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder. `dtype` is the checkpoint's own, by torch's name."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Rotary angle per position, one per pair of dimensions: head_dim / 2 values."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        if self.rope_scaling is None:
            return tuple(plain)
        return tuple(_llama3_frequency(f, self.rope_scaling) for f in plain)


def _llama3_frequency(frequency: float, scaling: Llama3Scaling) -> float:
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions / wavelength
    if turns < low:
        return frequency / scaling.factor
    if turns > high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`. Raises ModelNotFound, UnsupportedModel."""
    raw = _read_json(folder / "config.json")
    eos = _ids(raw.get("eos_token_id"))
    extra = folder / "generation_config.json"
    if extra.is_file():
        eos += tuple(i for i in _ids(_read_json(extra).get("eos_token_id")) if i not in eos)
    return parse_config(raw, eos_token_ids=eos)


def parse_config(
    raw: Mapping[str, Any], *, eos_token_ids: tuple[int, ...] | None = None
) -> ModelConfig:
    """The config that config.json's content describes. Raises UnsupportedModel naming the field."""
    _refuse_unsupported(raw)
    num_heads = _positive(raw, "num_attention_heads")
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    hidden_size = _positive(raw, "hidden_size")
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModel(
            f"{num_heads} query heads over {num_kv_heads} key heads of {head_dim} dimensions"
            " don't divide evenly"
        )
    rope = _rope_fields(raw)
    eos = _ids(raw.get("eos_token_id")) if eos_token_ids is None else eos_token_ids
    return ModelConfig(
        model_type=str(raw["model_type"]),
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=eos,
        dtype=_dtype_name(raw),
    )


def model_spec(
    config: ModelConfig, *, name: str, weights_digest: str, dtype: str, max_model_len: int | None
) -> ModelSpec:
    """What the rest of the system learns of this model when it is computed in `dtype`.

    `max_model_len` can only lower the model's own limit.
    """
    limit = config.max_positions
    shape = {field: getattr(config, field) for field in ModelConfig.__slots__}
    return ModelSpec(
        name=name,
        fingerprint=fingerprint(shape, weights_digest, dtype),
        vocab_size=config.vocab_size,
        max_model_len=limit if max_model_len is None else min(limit, max_model_len),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype_nbytes=DTYPE_NBYTES[dtype],
        eos_token_ids=config.eos_token_ids,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json's content for `config`, as transformers reads it."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": None,
        "dtype": config.dtype,
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return raw


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}",
            model_type=str(kind),
        )
    for field in ("attention_bias", "mlp_bias", "quantization_config"):
        if raw.get(field):
            raise UnsupportedModel(f"{field} is not supported", field=field)
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: silu")


def _rope_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings from the top level, `rope_scaling` (old files) and `rope_parameters`."""
    fields: dict[str, Any] = {}
    if raw.get("rope_theta") is not None:
        fields["rope_theta"] = raw["rope_theta"]
    fields.update(raw.get("rope_scaling") or {})
    fields.update(raw.get("rope_parameters") or {})
    return fields


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; supported: default, llama3", rope_type=str(kind)
        )
    try:
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as e:
        raise UnsupportedModel(f"rope type llama3 without {e.args[0]}", rope_type="llama3") from e


def _dtype_name(raw: Mapping[str, Any]) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def _positive(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {field}={value!r} must be a positive whole number")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list | tuple) else (int(str(value)),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise ModelNotFound(f"{path}: no such file", path=str(path)) from e
    except ValueError as e:
        raise UnsupportedModel(f"{path} is not JSON: {e}", path=str(path)) from e
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} holds no JSON object", path=str(path))
    return content


def digest_of(parts: list[bytes]) -> str:
    """32 hex digits over `parts`, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
