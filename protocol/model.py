"""Shape and identity of a model, for parts of the system that don't load it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and identity of one servable model.

    `fingerprint` changes with anything that changes a token or a KV byte: config, weights, dtype.
    Capsules and block hashes of different fingerprints never meet.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_nbytes: int
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """2 (keys, values) x layers x kv heads x head_dim x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_nbytes

    def salt(self, tenant: str = "", adapter: str = "") -> str:
        """The salt of block hashes: blocks of other models, adapters (LoRA) or tenants never match."""
        # With its length, or adapter "a" with tenant "b/c" would be adapter "a/b" with tenant "c".
        of_adapter = f"+{len(adapter)}:{adapter}" if adapter else ""
        return f"{self.fingerprint}{of_adapter}/{tenant}"


def fingerprint(config: Mapping[str, Any], weights_digest: str, dtype: str) -> str:
    """16 hex digits over config, weights digest and dtype; key order does not matter."""
    text = json.dumps([dict(config), weights_digest, dtype], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
