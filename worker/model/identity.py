"""The fields, by name, that decide whether stored KV fits a model as it is served."""

import hashlib
from pathlib import Path

from mallee.protocol.model import ModelSpec
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.loading.checkpoint import weights_digest

LAYOUT_VERSION = "1"
"""Of the bytes of a stored block: [layers, tokens, keys and values, KV heads, head_dim]."""

STATES_VERSION = "1"
"""Of the bytes of a stored state (`model/states.py`), and of the sums that lead to it (`model/delta.py`)."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def kv_identity(
    path: Path, config: ModelConfig, spec: ModelSpec, kv_dtype: str, *, is_scaled: bool = False
) -> dict[str, str]:
    """Everything that a token or a byte of KV depends on, of the model in folder `path`.

    Of two that differ in a field neither can go on from the other's capsules. `is_scaled`: KV is kept as
    shares of the checkpoint's scales, which are in the digest of its weights.
    """
    return {
        **({} if config.delta is None else {"states": f"{STATES_VERSION} {config.delta}"}),
        "family": config.family.model_type,
        "weights": weights_digest(path),
        "weight_version": spec.weights.label,
        "kv_dtype": kv_dtype,
        "kv_scales": "stored" if is_scaled else "1",
        "quantization": config.quantization.label if config.quantization else "none",
        "dtype_nbytes": str(spec.dtype_nbytes),
        "layers": str(spec.num_layers),
        "kv_heads": str(spec.num_kv_heads),
        "head_dim": str(spec.head_dim),
        "windows": str([layer.window for layer in config.layers]),
        "rope": str(config.ropes),
        "tokenizer": _digest(path),
        "layout": LAYOUT_VERSION,
        "fingerprint": spec.fingerprint,
    }


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in _TOKENIZER_FILES:
        file = path / name
        digest.update(file.read_bytes() if file.exists() else b"-")
    return digest.hexdigest()
