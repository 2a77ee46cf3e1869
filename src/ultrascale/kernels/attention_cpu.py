"""Attention by PyTorch's flash kernel for CPUs, called below `scaled_dot_product_attention` for its log-sum-exp."""

from __future__ import annotations

from functools import lru_cache

import torch

from ultrascale.kernels.attention import TileByTile, even_heads, visible
from ultrascale.kernels.private_torch import cpu_flash_backward, cpu_flash_forward
from ultrascale.kernels.tiles import Tile


class CpuFlashAttention(TileByTile):
    """float64, float32, bfloat16 and float16; grouped heads; any head sizes, padded to the larger."""

    name = "sdpa"

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        causal, mask = _kind(tile, q.dtype)
        by_head = (_by_head(x) for x in even_heads(1, q, k, v))
        out, lse = cpu_flash_forward(*by_head, 0.0, causal, attn_mask=mask, scale=scale)
        lse = lse.permute(2, 0, 1)
        if mask is not None:
            # The kernel says 0 where a query sees no key; joined to other parts that would be a key of logit 0.
            first, last = tile.without_keys()
            lse[:first] = -torch.inf
            lse[last:] = -torch.inf
        return _by_token(out)[..., : v.shape[-1]], lse

    def tile_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tile: Tile,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        causal, mask = _kind(tile, q.dtype)
        by_head = (_by_head(x) for x in even_heads(1, dout.to(q.dtype), q, k, v, out.to(q.dtype)))
        # The kernel reads it as memory [batch, queries, heads].
        lse = lse.permute(1, 0, 2).contiguous().permute(0, 2, 1)
        parts = cpu_flash_backward(*by_head, lse, 0.0, causal, attn_mask=mask, scale=scale)
        dq, dk, dv = (_by_token(part)[..., : x.shape[-1]] for part, x in zip(parts, (q, k, v), strict=True))
        return dq, dk, dv


def _kind(tile: Tile, dtype: torch.dtype) -> tuple[bool, torch.Tensor | None]:
    """(causal, mask) as the kernel wants them."""
    if tile.full:
        return False, None
    if not tile.windowed and tile.offset == 0:
        return True, None
    queries, keys = tile.shape
    window = Tile((0, 1), (0, queries), (0, keys), tile.offset, tile.window)
    return False, _additive_mask(window, dtype)


@lru_cache(maxsize=16)
def _additive_mask(tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """[queries, keys]: 0 where a key is seen, −∞ elsewhere. Pieces of one window are of few shapes."""
    device = torch.device("cpu")
    return torch.zeros(tile.shape, dtype=dtype, device=device).masked_fill_(~visible(tile, device), -torch.inf)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 2, 0, 3)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3)
