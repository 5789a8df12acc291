"""Attention of one layer over paged KV, by a plan; and the plain form that it must agree with.

Doesn't know how rows were grouped (`plan.py`) or what surrounds attention (`llama.py`).

Memory of one layer: [num_blocks * block_size, 2, num_kv_heads, head_dim], keys and values of a slot
side by side, so that one gather fetches both and one index_copy writes both. Gathering a trunk costs
little beside the product over it, since it is done once for all its rows; blocks stay where they are.

Query heads that share a key head are folded into the query axis or broadcast with stride 0: keys are
never repeated in memory.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mallee.worker.forward import Row
from mallee.worker.model.plan import Padded, Plan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(output, logsumexp) of softmax(q k^T / sqrt(d)) v over [batch, heads, tokens, head_dim]."""

MAX_PRODUCT_SCORES = 1 << 21
"""Up to this many float32 scores a trunk runs as two plain products: half the kernel's time for a
few dozen rows (measured); beyond it the scores would leave the cache, and the kernel wins."""

Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys: outputs [n, num_heads, head_dim], logsumexp [n, num_heads] float32."""


class PagedAttention:
    """Attention over blocks of `block_size` slots. Its only state is scratch memory for gathers.

    Scratch, since a fresh buffer of this size costs the kernel's page faults on every call: they
    took more time than the attention itself (measured).
    """

    __slots__ = ("_block_size", "_scratch")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._scratch = torch.empty(0)

    def attend(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """What every token of the batch sees: [n, num_heads, head_dim].

        q [n, num_heads, head_dim]; k, v [n, num_kv_heads, head_dim] are this step's, written to
        `memory` [num_slots, 2, num_kv_heads, head_dim] already.
        """
        out, lse = self._tails(plan, q, k, v, memory)
        for trunk in plan.trunks:
            queries = q if trunk.tokens is None else q.index_select(0, trunk.tokens)
            keys, values = self._fetch(trunk.blocks, memory)[: trunk.num_keys].unbind(1)
            part = _over_trunk(queries, keys, values)
            if trunk.tokens is None:
                out, lse = _merge((out, lse), part)
            else:
                merged = _merge((out[trunk.tokens], lse[trunk.tokens]), part)
                out.index_copy_(0, trunk.tokens, merged[0])
                lse.index_copy_(0, trunk.tokens, merged[1])
        return out

    def _fetch(self, blocks: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The slots of `blocks`, in order: [n, 2, heads, head_dim], valid until the next call."""
        pages = memory.view(memory.shape[0] // self._block_size, -1)
        shape = (len(blocks), pages.shape[1])
        numel = shape[0] * shape[1]
        if self._scratch.numel() < numel or self._scratch.dtype != memory.dtype:
            self._scratch = memory.new_empty(numel + numel // 4)
        out = self._scratch[:numel].view(shape)
        return torch.index_select(pages, 0, blocks, out=out).view(-1, *memory.shape[1:])

    def _tails(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: torch.Tensor
    ) -> Part:
        """Every token's attention over the keys that no trunk holds."""
        if len(plan.chunks) + len(plan.padded) == 1:
            if plan.chunks:
                return _over_itself(q, k, v)
            padded = plan.padded[0]
            if padded.queries is None and padded.places is None:
                return self._padded(padded, q, memory)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for begin, end in plan.chunks:
            part = _over_itself(q[begin:end], k[begin:end], v[begin:end])
            out[begin:end], lse[begin:end] = part
        for padded in plan.padded:
            part = self._padded(padded, q, memory)
            if padded.places is not None:
                part = (part[0][padded.places], part[1][padded.places])
            out.index_copy_(0, padded.real, part[0])
            lse.index_copy_(0, padded.real, part[1])
        return out, lse

    def _padded(self, padded: Padded, q: torch.Tensor, memory: torch.Tensor) -> Part:
        """Attention of each row's `width` queries over its own blocks, masked by position."""
        num_rows, width = len(padded.blocks), padded.width
        num_heads, dim = q.shape[1:]
        heads = memory.shape[2]
        group = num_heads // heads
        queries = q if padded.queries is None else q.index_select(0, padded.queries)
        kv = self._fetch(padded.blocks.view(-1), memory).view(num_rows, -1, 2, heads, dim)
        folded = queries.view(num_rows, width, heads, group, dim).transpose(1, 2)
        mask = padded.mask.to(q.dtype)
        if width > 1:
            mask = mask.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)
        out, lse = _flash(
            folded.reshape(num_rows, heads, width * group, dim),
            kv[:, :, 0].transpose(1, 2),
            kv[:, :, 1].transpose(1, 2),
            0.0,
            False,
            attn_mask=mask,
        )
        shape = (num_rows, heads, width, group)
        return (
            out.reshape(*shape, dim).transpose(1, 2).reshape(-1, num_heads, dim),
            lse.reshape(shape).transpose(1, 2).reshape(-1, num_heads),
        )


def _merge(a: Part, b: Part) -> Part:
    """Attention over two disjoint sets of keys, from the attention over each."""
    share = torch.sigmoid(b[1] - a[1]).unsqueeze(-1).to(a[0].dtype)
    return torch.lerp(a[0], b[0], share), torch.logaddexp(a[1], b[1])


def _over_itself(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Causal attention of consecutive tokens among themselves."""
    return _flash_folded(q, k, v, is_causal=True)


def _over_trunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Full attention of all of q's tokens over k and v [num_keys, heads, head_dim]."""
    is_small = q.shape[0] * q.shape[1] * k.shape[0] <= MAX_PRODUCT_SCORES
    if q.dtype != torch.float32 or not is_small:  # bfloat16 scores would lose too much
        return _flash_folded(q, k, v, is_causal=False)
    n, num_heads, dim = q.shape
    heads = k.shape[1]
    folded = (q * dim**-0.5).view(n, heads, -1, dim).transpose(0, 1).reshape(heads, -1, dim)
    scores = torch.bmm(folded, k.permute(1, 2, 0))
    highest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(-1, keepdim=True)
    out = torch.bmm(weights, v.transpose(0, 1)).div_(total)
    lse = highest.add_(total.log_())
    return (
        out.view(heads, n, -1, dim).transpose(0, 1).reshape(n, num_heads, dim),
        lse.view(heads, n, -1).transpose(0, 1).reshape(n, num_heads),
    )


def _flash_folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool) -> Part:
    """Key heads as the batch axis, their query heads broadcast over them."""
    n, num_heads, dim = q.shape
    heads = k.shape[1]
    group = num_heads // heads
    out, lse = _flash(
        q.view(n, heads, group, dim).permute(1, 2, 0, 3),
        k.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        v.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        is_causal,
    )
    return (
        out.permute(2, 0, 1, 3).reshape(n, num_heads, dim),
        lse.permute(2, 0, 1).reshape(n, num_heads),
    )


def attend_plain(
    rows: Sequence[Row], q: torch.Tensor, memory: torch.Tensor, size: int
) -> torch.Tensor:
    """The oracle for `PagedAttention`: row by row, every key read, softmax in float32. Slow."""
    heads, dim = memory.shape[2:]
    parts, begin = [], 0
    for row in rows:
        n = len(row.tokens)
        at = torch.arange(row.start + n)
        slots = torch.from_numpy(row.table.astype("int64"))[at // size] * size + at % size
        keys, values = memory[slots].float().repeat_interleave(q.shape[1] // heads, 2).unbind(1)
        own = q[begin : begin + n].float()
        scores = torch.einsum("qhd,khd->hqk", own, keys) / dim**0.5
        hidden = at[None, :] > torch.arange(row.start, row.start + n)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        begin += n
    return torch.cat(parts).to(q.dtype)
