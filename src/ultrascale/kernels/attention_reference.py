"""Attention in plain tensor operations: the definition that every other implementation is held to.

Any dtype, any head sizes (values may be narrower or wider than keys), any tile; holds all scores of a tile in memory.
"""

from __future__ import annotations

import torch

from ultrascale.kernels.attention import TileByTile, visible
from ultrascale.kernels.tiles import Tile
from ultrascale.precision.policy import wide


class ReferenceAttention(TileByTile):
    """Scores, softmax and products in max(float32, dtype)."""

    name = "reference"

    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _scores(q, k, tile, scale)
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        out = _matmul(probabilities, _by_head(v))
        return _by_token(out), lse.flatten(1, 2).permute(2, 0, 1)

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
        groups = k.shape[2]
        keys, values = _by_head(k), _by_head(v)
        probabilities = (_scores(q, k, tile, scale) - _grouped(lse.unsqueeze(-1), groups)).exp_()
        gradient = _grouped(dout, groups)
        dv = _matmul(probabilities.mT, gradient).sum(2)
        mean = (gradient * _grouped(out, groups)).sum(-1, keepdim=True)
        dscores = probabilities.mul_(_matmul(gradient, values.mT) - mean).mul_(scale)
        dq = _matmul(dscores, keys)
        dk = _matmul(dscores.mT, _grouped(q, groups)).sum(2)
        return _by_token(dq), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[seq, batch, heads, dim] → wide [batch, kv_heads, heads / kv_heads, seq, dim]"""
    return x.to(wide(x.dtype)).permute(1, 2, 0, 3).unflatten(1, (groups, -1))


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[keys, batch, kv_heads, dim] → wide [batch, kv_heads, 1, keys, dim]"""
    return x.to(wide(x.dtype)).permute(1, 2, 0, 3).unsqueeze(2)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, heads / kv_heads, seq, dim] → [seq, batch, heads, dim]"""
    return x.flatten(1, 2).permute(2, 0, 1, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    """Wide [batch, kv_heads, heads / kv_heads, queries, keys], −∞ where nothing is seen."""
    scores = _matmul(_grouped(q, k.shape[2]), _by_head(k).mT).mul_(scale)
    return scores if tile.full else scores.masked_fill_(~visible(tile, q.device), -torch.inf)
