"""`Forward` in torch: owns one model's weights and the KV memory of `num_blocks` blocks.

Doesn't know which sequence a row belongs to, who shares what, or when a block is free.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from mallee.protocol.errors import ConfigError
from mallee.protocol.model import ModelSpec
from mallee.worker.forward import BlockCopy, Draw, ForwardBatch, Logits
from mallee.worker.model.attention import PagedAttention
from mallee.worker.model.config import DTYPE_NBYTES, ModelConfig, model_spec, read_config
from mallee.worker.model.llama import Attention, Llama
from mallee.worker.model.plan import make_plan
from mallee.worker.model.sampler import sample
from mallee.worker.model.weights import ModelWeights, load_weights, weights_digest

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ForwardStats(NamedTuple):
    """Counts since the start. Key reads are slots fetched by attention in one layer, padding too.

    `num_flat_key_reads` is what they would be if every row read all its keys itself.
    """

    num_steps: int
    num_tokens: int
    num_key_reads: int
    num_flat_key_reads: int
    num_copied_slots: int
    kv_nbytes: int


class TorchForward:
    """Computes over paged KV on one device. Not thread-safe: one engine loop owns it."""

    __slots__ = (
        "_block_size",
        "_copied",
        "_decoder",
        "_device",
        "_flat_reads",
        "_memory",
        "_num_blocks",
        "_reads",
        "_spec",
        "_steps",
        "_tokens",
        "shares_reads",
    )

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int = 16,
        attention: Attention | None = None,
        shares_reads: bool = True,
    ) -> None:
        """KV memory is allocated here. `shares_reads` False reads every row's keys apart."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"num_blocks={num_blocks}, block_size={block_size}: need 1 or more")
        self._decoder = Llama(config, weights, attention=attention or PagedAttention(block_size))
        self._spec = spec
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._device = str(weights.embedding.device)
        self.shares_reads = shares_reads
        self._memory = _lazy_zeros(
            (config.num_layers, num_blocks * block_size, 2, config.num_kv_heads, config.head_dim),
            weights.embedding.dtype,
            self._device,
        )
        self._steps = self._tokens = self._reads = self._flat_reads = self._copied = 0

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def forward(self, batch: ForwardBatch) -> Sequence[Logits]:
        with torch.inference_mode():
            self._copy(batch.copies)
            if not batch.rows:
                return []
            plan = make_plan(
                batch.rows,
                block_size=self._block_size,
                device=self._device,
                is_shared=self.shares_reads,
            )
            logits = self._decoder.logits(plan, self._memory)
        self._steps += 1
        self._tokens += len(plan.tokens)
        self._reads += plan.key_reads
        self._flat_reads += plan.flat_key_reads
        return logits.unbind(0)

    def keep(self, logits: Logits) -> Logits:
        return logits.clone()

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        with torch.inference_mode():
            return sample(draws)

    def check(self) -> None:
        """Raises AssertionError if the memory is not what the spec and the counts say."""
        per_token = self._memory.nbytes // (self._num_blocks * self._block_size)
        assert per_token == self._spec.kv_bytes_per_token, "KV memory and spec disagree"
        assert self._decoder.weights.embedding.dtype == self._memory.dtype, "KV in another dtype"

    def stats(self) -> ForwardStats:
        return ForwardStats(
            num_steps=self._steps,
            num_tokens=self._tokens,
            num_key_reads=self._reads,
            num_flat_key_reads=self._flat_reads,
            num_copied_slots=self._copied,
            kv_nbytes=self._memory.nbytes,
        )

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Forks of one capsule copy the same count of slots: those go together."""
        by_size: dict[int, list[BlockCopy]] = {}
        for copy in copies:
            by_size.setdefault(copy.num_slots, []).append(copy)
            self._copied += copy.num_slots
        size = self._block_size
        for num_slots, same in by_size.items():
            offsets = torch.arange(num_slots)
            sources = (torch.tensor([c.src for c in same])[:, None] * size + offsets).flatten()
            targets = (torch.tensor([c.dst for c in same])[:, None] * size + offsets).flatten()
            sources, targets = sources.to(self._device), targets.to(self._device)
            self._memory.index_copy_(1, targets, self._memory.index_select(1, sources))


def load(
    path: Path,
    *,
    num_blocks: int | None = None,
    kv_budget_bytes: int | None = None,
    block_size: int = 16,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    name: str | None = None,
    max_model_len: int | None = None,
) -> TorchForward:
    """The model in the Hugging Face directory `path`, ready to run.

    Give `num_blocks`, or `kv_budget_bytes` to have as many as fit. `threads` sets torch's, for the
    whole process. dtype: "float32", "bfloat16", or "auto": the checkpoint's own, but float32 on a
    CPU without bfloat16 arithmetic, where bfloat16 is several times slower. The context served is
    the model's, cut to `max_model_len` and to what the blocks hold.
    Raises ModelNotFound, UnsupportedModel, WeightsMismatch, ConfigError.
    """
    if torch.device(device).type != "cpu":
        raise ConfigError(f"device={device!r}: only the CPU has an attention backend; give 'cpu'")
    if threads is not None:
        torch.set_num_threads(threads)
    config = read_config(path)
    dtype = resolve_dtype(dtype, config, device)
    weights = load_weights(path, config, dtype=_DTYPES[dtype], device=device)
    spec = model_spec(
        config,
        name=name or path.name,
        weights_digest=weights_digest(path),
        dtype=dtype,
        max_model_len=max_model_len,
    )
    if num_blocks is None:
        if kv_budget_bytes is None:
            raise ConfigError("give num_blocks or kv_budget_bytes")
        num_blocks = kv_budget_bytes // (spec.kv_bytes_per_token * block_size)
        if num_blocks < 1:
            raise ConfigError(
                f"kv_budget_bytes={kv_budget_bytes} is less than one block of"
                f" {spec.kv_bytes_per_token * block_size} bytes; raise it"
            )
    room = num_blocks * block_size
    if spec.max_model_len > room:
        log.warning("context cut from %d to the %d tokens the KV holds", spec.max_model_len, room)
        spec = msgspec.structs.replace(spec, max_model_len=room)
    return TorchForward(config, weights, spec, num_blocks=num_blocks, block_size=block_size)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros. In host memory a page costs nothing until it is used (torch.zeros writes them all)."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def resolve_dtype(dtype: str, config: ModelConfig, device: str) -> str:
    """ "float32" or "bfloat16". Raises ConfigError for any other."""
    if dtype == "auto":
        is_slow = device == "cpu" and not _has_bfloat16()
        return "bfloat16" if config.dtype == "bfloat16" and not is_slow else "float32"
    if dtype not in DTYPE_NBYTES:
        raise ConfigError(f"dtype={dtype!r}: give auto, {' or '.join(DTYPE_NBYTES)}")
    return dtype


def _has_bfloat16() -> bool:
    """Does this CPU multiply bfloat16 matrices natively?"""
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16"))
