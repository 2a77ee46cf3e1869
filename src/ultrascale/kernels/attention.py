"""Causal attention behind one function."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q·kᵀ/√d + causal mask)·v with grouped heads.

    q        [seq, batch, heads, head_dim]
    k, v     [seq, batch, kv_heads, head_dim]; head h reads kv head h // (heads / kv_heads)
    returns  [seq, batch, heads, head_dim]
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3)
