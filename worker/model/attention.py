"""Attention of one layer over paged KV, by a plan; and the plain form that it must agree with.

Doesn't know how rows were grouped (`plan.py`) or what surrounds attention (`llama.py`).

Memory of one layer: [num_blocks * block_size, 2, num_kv_heads, head_dim], keys and values of a slot
side by side, so that one gather fetches both and one index_copy writes both. Gathering a trunk costs
little beside the product over it, since it is done once for all its rows; blocks stay where they are.

Query heads that share a key head are folded into the query axis or broadcast with stride 0: keys are
never repeated in memory.
"""

from collections.abc import Sequence

import torch

from mallee.worker.forward import Row
from mallee.worker.model.plan import Padded, Plan, Trunk

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(output, logsumexp) of softmax(q k^T / sqrt(d)) v over [batch, heads, tokens, head_dim]."""


def attend(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memory: torch.Tensor, size: int
) -> torch.Tensor:
    """What every token of the batch sees: [n, num_heads, head_dim].

    q [n, num_heads, head_dim]; k, v [n, num_kv_heads, head_dim] are this step's, already written to
    `memory` [num_slots, 2, num_kv_heads, head_dim]; `size` slots make a block.
    """
    blocks = memory.view(memory.shape[0] // size, -1)
    out, lse = _tails(plan, q, k, v, blocks)
    for trunk in plan.trunks:
        queries = q if trunk.tokens is None else q.index_select(0, trunk.tokens)
        part, part_lse = _trunk(trunk, queries, blocks, k.shape[1])
        if trunk.tokens is None:
            out, lse = _merge(out, lse, part, part_lse)
        else:
            merged, merged_lse = _merge(out[trunk.tokens], lse[trunk.tokens], part, part_lse)
            out = out.index_copy(0, trunk.tokens, merged)
            lse = lse.index_copy(0, trunk.tokens, merged_lse)
    return out


def _merge(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each."""
    share = torch.sigmoid(b_lse - a_lse).unsqueeze(-1).to(a.dtype)
    return torch.lerp(a, b, share), torch.logaddexp(a_lse, b_lse)


def _tails(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token's attention over the keys that no trunk holds, with its logsumexp."""
    if len(plan.chunks) + len(plan.padded) == 1:
        if plan.chunks:
            return _chunk(q, k, v)
        padded = plan.padded[0]
        if padded.queries is None and padded.places is None:
            return _padded(padded, q, blocks, k.shape[1])
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for begin, end in plan.chunks:
        out[begin:end], lse[begin:end] = _chunk(q[begin:end], k[begin:end], v[begin:end])
    for padded in plan.padded:
        queries = q if padded.queries is None else q.index_select(0, padded.queries)
        part, part_lse = _padded(padded, queries, blocks, k.shape[1])
        where = padded.queries
        if padded.places is not None:
            part, part_lse = part[padded.places], part_lse[padded.places]
            where = padded.places if where is None else where[padded.places]
        assert where is not None
        out.index_copy_(0, where, part)
        lse.index_copy_(0, where, part_lse)
    return out, lse


def _chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of consecutive tokens among themselves."""
    n, num_heads, dim = q.shape
    heads = k.shape[1]
    group = num_heads // heads
    out, lse = _flash(
        q.view(n, heads, group, dim).permute(1, 2, 0, 3),
        k.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        v.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        True,
    )
    return (
        out.permute(2, 0, 1, 3).reshape(n, num_heads, dim),
        lse.permute(2, 0, 1).reshape(n, num_heads),
    )


def _trunk(
    trunk: Trunk, q: torch.Tensor, blocks: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Full attention of all of q's tokens over the trunk's keys, which are fetched once."""
    n, num_heads, dim = q.shape
    group = num_heads // heads
    kv = blocks.index_select(0, trunk.blocks).view(-1, 2, heads, dim)[: trunk.num_keys]
    out, lse = _flash(
        q.view(n, heads, group, dim).permute(1, 2, 0, 3),
        kv[:, 0].permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        kv[:, 1].permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1),
        0.0,
        False,
    )
    return (
        out.permute(2, 0, 1, 3).reshape(n, num_heads, dim),
        lse.permute(2, 0, 1).reshape(n, num_heads),
    )


def _padded(
    padded: Padded, q: torch.Tensor, blocks: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row's `width` queries over its own blocks, masked by position."""
    num_rows, num_blocks = padded.blocks.shape
    _, num_heads, dim = q.shape
    group, width = num_heads // heads, padded.width
    kv = blocks.index_select(0, padded.blocks.view(-1)).view(num_rows, -1, 2, heads, dim)
    folded = q.view(num_rows, width, heads, group, dim).transpose(1, 2)
    mask = padded.mask
    if width > 1:
        mask = mask.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)
    out, lse = _flash(
        folded.reshape(num_rows, heads, width * group, dim),
        kv[:, :, 0].transpose(1, 2),
        kv[:, :, 1].transpose(1, 2),
        0.0,
        False,
        attn_mask=mask.to(q.dtype),
    )
    shape = (num_rows, heads, width, group)
    return (
        out.reshape(*shape, dim).transpose(1, 2).reshape(-1, num_heads, dim),
        lse.reshape(shape).transpose(1, 2).reshape(-1, num_heads),
    )


def attend_plain(
    rows: Sequence[Row], q: torch.Tensor, memory: torch.Tensor, size: int
) -> torch.Tensor:
    """The oracle for `attend`: row by row, every key read, softmax in float32. Slow."""
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
