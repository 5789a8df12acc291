"""Attention over paged KV in torch operations, on any device.

The reference for other backends, and what runs where none of them applies. Doesn't know how rows were
split (`base.py`) or what surrounds attention (`decoder.py`).

Memory of one layer: [num_blocks * block_size, 2, num_kv_heads, head_dim], keys and values of a slot
side by side, so that one gather fetches both. Gathering a prefix costs little beside the product over
it, since it is done once for all its rows; blocks stay where they are.

Query heads that share a key head are folded into the query axis: keys are never repeated in memory.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mallee.worker.memory.transfer import sent
from mallee.worker.model.attention.base import MIN_SHARED_SAVING, AttentionSplit, Segment

Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys: outputs [n, num_heads, head_dim], logsumexp [n, num_heads] float32."""

MAX_PADDED_TOKENS = 16
"""Segments with at most this many tokens are padded together; longer ones that see all run alone."""
MAX_PADDED_BLOCKS = 256
"""One padded group reads at most this many blocks (if it has more than one segment), to stay in cache."""


class SharedKeys(NamedTuple):
    """A prefix."""

    blocks: torch.Tensor  # [num_blocks] block ids
    tokens: torch.Tensor | None  # [n] indices into the flat batch; None: all of it


class Chunk(NamedTuple):
    """A long segment: tokens begin .. end, all of which see `num_before` slots and then causally."""

    begin: int
    end: int
    blocks: torch.Tensor
    num_before: int


class Padded(NamedTuple):
    """Short segments side by side: `width` query places and `blocks.shape[1]` blocks for each."""

    blocks: torch.Tensor  # [num_segments, num_blocks] block ids, padded with the segment's first
    queries: torch.Tensor | None  # [num_segments * width] flat tokens; None: all of them, in order
    places: torch.Tensor | None  # [n] which of those are real; None: all
    real: torch.Tensor  # [n] flat tokens at those places
    mask: torch.Tensor  # [num_segments, 1, width, num_blocks * block_size] 0 or -inf
    width: int


class Parts(NamedTuple):
    """A split as this backend runs it."""

    shared: tuple[SharedKeys, ...]
    chunks: tuple[Chunk, ...]
    padded: tuple[Padded, ...]


class TorchAttention:
    """Attention over blocks of `block_size` slots. Its only state is scratch memory for gathers.

    Scratch, since a fresh buffer of this size costs the page faults on every call: they
    took more time than the attention itself (measured).
    """

    __slots__ = ("_block_size", "_device", "_scratch")
    min_saving = MIN_SHARED_SAVING

    def __init__(self, block_size: int, device: str = "cpu") -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self._scratch = torch.empty(0)

    def prepare(self, split: AttentionSplit) -> Parts:
        """`split` as tensors on the device."""
        shared = tuple(
            SharedKeys(
                self._tensor(prefix.blocks),
                None if len(prefix.tokens) == split.num_tokens else self._tensor(prefix.tokens),
            )
            for prefix in split.shared
        )
        chunks, short = [], []
        for segment in split.segments:
            if segment.size > MAX_PADDED_TOKENS and segment.sees_all:
                blocks = self._tensor(segment.blocks)
                chunks.append(
                    Chunk(segment.begin, segment.begin + segment.size, blocks, segment.last)
                )
            else:
                short.append(segment)
        padded = tuple(self._pad(group, split.num_tokens) for group in _groups(short))
        return Parts(shared, tuple(chunks), padded)

    def attend(
        self, reads: Parts, q: torch.Tensor, memory: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        out, lse = self._segments(reads, q, memory, scale)
        for prefix in reads.shared:
            queries = q if prefix.tokens is None else q.index_select(0, prefix.tokens)
            keys, values = self._fetch(prefix.blocks, memory, q.dtype).unbind(1)
            part = over_all(queries, keys, values, scale)
            if prefix.tokens is None:
                out, lse = merge((out, lse), part)
            else:
                merged = merge((out[prefix.tokens], lse[prefix.tokens]), part)
                out.index_copy_(0, prefix.tokens, merged[0])
                lse.index_copy_(0, prefix.tokens, merged[1])
        return out

    def _tensor(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return sent(values.astype(np.int64), self._device)

    def _fetch(
        self, blocks: torch.Tensor, memory: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The slots of `blocks`, in order: [n, 2, heads, head_dim], valid until the next call."""
        pages = memory.view(memory.shape[0] // self._block_size, -1)
        shape = (len(blocks), pages.shape[1])
        numel = shape[0] * shape[1]
        if self._scratch.numel() < numel or self._scratch.dtype != memory.dtype:
            self._scratch = memory.new_empty(numel + numel // 4)
        out = self._scratch[:numel].view(shape)
        found = torch.index_select(pages, 0, blocks, out=out).view(-1, *memory.shape[1:])
        return found.to(dtype)

    def _segments(self, parts: Parts, q: torch.Tensor, memory: torch.Tensor, scale: float) -> Part:
        """Every token's attention over the keys that no prefix holds."""
        if not parts.chunks and len(parts.padded) == 1:
            padded = parts.padded[0]
            if padded.queries is None and padded.places is None:
                return self._side_by_side(padded, q, memory, scale)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for chunk in parts.chunks:
            span = slice(chunk.begin, chunk.end)
            out[span], lse[span] = self._alone(chunk, q[span], memory, scale)
        for padded in parts.padded:
            part = self._side_by_side(padded, q, memory, scale)
            if padded.places is not None:
                part = (part[0][padded.places], part[1][padded.places])
            out.index_copy_(0, padded.real, part[0])
            lse.index_copy_(0, padded.real, part[1])
        return out, lse

    def _alone(self, chunk: Chunk, q: torch.Tensor, memory: torch.Tensor, scale: float) -> Part:
        found = self._fetch(chunk.blocks, memory, q.dtype)[: chunk.num_before + len(q)]
        keys, values = found.unbind(1)
        n = chunk.num_before
        part = over_itself(q, keys[n:], values[n:], scale)
        return part if n == 0 else merge(part, over_all(q, keys[:n], values[:n], scale))

    def _side_by_side(
        self, padded: Padded, q: torch.Tensor, memory: torch.Tensor, scale: float
    ) -> Part:
        """Attention of each segment's `width` queries over its own blocks, masked by position."""
        num_rows, width = len(padded.blocks), padded.width
        num_heads, dim = q.shape[1:]
        heads = memory.shape[2]
        group = num_heads // heads
        queries = q if padded.queries is None else q.index_select(0, padded.queries)
        kv = self._fetch(padded.blocks.view(-1), memory, q.dtype)
        kv = kv.view(num_rows, -1, 2, heads, dim)
        folded = queries.view(num_rows, width, heads, group, dim).transpose(1, 2)
        mask = padded.mask.to(q.dtype)
        if width > 1:
            mask = mask.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)
        out, lse = softmax_part(
            folded.reshape(num_rows, heads, width * group, dim),
            kv[:, :, 0].transpose(1, 2),
            kv[:, :, 1].transpose(1, 2),
            scale,
            mask=mask,
        )
        shape = (num_rows, heads, width, group)
        return (
            out.reshape(*shape, dim).transpose(1, 2).reshape(-1, num_heads, dim),
            lse.reshape(shape).transpose(1, 2).reshape(-1, num_heads),
        )

    def _pad(self, group: list[Segment], num_tokens: int) -> Padded:
        group.sort(key=lambda segment: segment.begin)
        width = max(segment.size for segment in group)
        num_blocks = max(len(segment.blocks) for segment in group)
        blocks = np.empty((len(group), num_blocks), dtype=np.int64)
        at = np.arange(width)[None, :]
        counts = np.array([[segment.size] for segment in group])
        is_real = at < counts
        at = np.minimum(at, counts - 1)
        for g, segment in enumerate(group):
            blocks[g, : len(segment.blocks)] = segment.blocks
            blocks[g, len(segment.blocks) :] = segment.blocks[0]
        queries = np.array([[segment.begin] for segment in group]) + at
        first = np.array([[segment.first] for segment in group]) + at
        last = np.array([[segment.last] for segment in group]) + at
        slot = np.arange(num_blocks * self._block_size)
        hidden = (slot < first[:, :, None]) | (slot > last[:, :, None])
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        flat = queries.reshape(-1)
        is_whole = len(flat) == num_tokens and bool((flat == np.arange(len(flat))).all())
        return Padded(
            blocks=self._tensor(blocks),
            queries=None if is_whole else self._tensor(flat),
            places=None if is_real.all() else self._tensor(np.flatnonzero(is_real)),
            real=self._tensor(queries[is_real]),
            mask=sent(mask[:, None], self._device),
            width=width,
        )


def _groups(segments: list[Segment]) -> list[list[Segment]]:
    """Segments of like size together: padding at most doubles what one reads."""
    groups: list[list[Segment]] = []
    by_width: dict[int, list[Segment]] = {}
    for segment in segments:
        by_width.setdefault((segment.size - 1).bit_length(), []).append(segment)
    for same in by_width.values():
        same.sort(key=lambda segment: len(segment.blocks))
        group: list[Segment] = []
        for segment in same:
            size = len(segment.blocks)
            is_long = group and size > 2 * len(group[0].blocks) + 2
            if is_long or (group and size * (len(group) + 1) > MAX_PADDED_BLOCKS):
                groups.append(group)
                group = []
            group.append(segment)
        groups.append(group)
    return groups


# Attention over some of the keys, and how parts are merged. Doesn't know pages or plans.

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(output, logsumexp) of softmax(q k^T * scale) v over [batch, heads, tokens, head_dim]."""

MAX_PRODUCT_SCORES = 1 << 21
"""Up to this many float32 scores a prefix runs as two plain products: half the kernel's time for a
few dozen rows (measured); beyond it the scores would leave the cache, and the kernel wins."""


def merge(a: Part, b: Part) -> Part:
    """Attention over two disjoint sets of keys, from the attention over each."""
    share = torch.sigmoid(b[1] - a[1]).unsqueeze(-1).to(a[0].dtype)
    return torch.lerp(a[0], b[0], share), torch.logaddexp(a[1], b[1])


def over_itself(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Causal attention of consecutive tokens among themselves."""
    n, num_heads, dim = q.shape
    heads = k.shape[1]
    group = num_heads // heads
    out, lse = softmax_part(
        q.view(n, heads, group, dim).permute(1, 2, 0, 3),
        k.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        v.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        scale,
        is_causal=True,
    )
    return (
        out.permute(2, 0, 1, 3).reshape(n, num_heads, dim),
        lse.permute(2, 0, 1).reshape(n, num_heads),
    )


def over_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Part:
    """Full attention of all of q's tokens over k and v [num_keys, heads, head_dim]."""
    n, num_heads, dim = q.shape
    heads = k.shape[1]
    folded = q.view(n, heads, -1, dim).transpose(0, 1).reshape(1, heads, -1, dim)
    is_small = n * num_heads * len(k) <= MAX_PRODUCT_SCORES and q.dtype == torch.float32
    run = _softmax_products if is_small else softmax_part
    out, lse = run(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale)
    return (
        out.reshape(heads, n, -1, dim).transpose(0, 1).reshape(n, num_heads, dim),
        lse.reshape(heads, n, -1).transpose(0, 1).reshape(n, num_heads),
    )


def softmax_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> Part:
    """Attention over [batch, heads, tokens, head_dim], and its logsumexp [batch, heads, tokens]."""
    if q.device.type == "cpu":
        out, lse = _flash(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        return out, lse
    if is_causal:
        n = q.shape[-2]
        mask = torch.full((n, n), -torch.inf, device=q.device).triu(1)
    return _softmax_products(q, k, v, scale, mask=mask)


def _softmax_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
) -> Part:
    """The same by two products, in float32: bfloat16 scores would lose too much."""
    scores = torch.matmul(q.float() * scale, k.float().transpose(-1, -2))
    if mask is not None:
        scores += mask
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v.float()).div_(total)
    return out.to(q.dtype), highest.add_(total.log_()).squeeze(-1)
