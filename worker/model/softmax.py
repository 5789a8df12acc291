"""Attention over some of the keys, and how parts are merged. Doesn't know pages or plans.

Query heads that share a key head are folded into the query axis: keys are never repeated in memory.
"""

from typing import TypeAlias

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(output, logsumexp) of softmax(q k^T * scale) v over [batch, heads, tokens, head_dim]."""

MAX_PRODUCT_SCORES = 1 << 21
"""Up to this many float32 scores a trunk runs as two plain products: half the kernel's time for a
few dozen rows (measured); beyond it the scores would leave the cache, and the kernel wins."""
Part: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys: outputs [n, num_heads, head_dim], logsumexp [n, num_heads] float32."""


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
