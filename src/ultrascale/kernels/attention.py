"""Attention behind one interface: softmax(q·kᵀ·scale)·v over tiles, with the log-sum-exp that joins parts of it.

Attention over some keys and over others is joined exactly when each part comes with the logarithm of its sum of
exponentials (Milakov and Gimelshein 2018; Liu et al. 2023, ring attention); backward of a part needs the joined output
and log-sum-exp alone (Dao 2023, FlashAttention-2 §3.1). An attention sink would be a part without keys: output 0, its
logit as log-sum-exp.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from ultrascale.kernels.tiles import Tile
from ultrascale.precision.policy import wide


class AttentionBackend(Protocol):
    """One implementation. Queries outside of all tiles give output 0 and log-sum-exp −∞; keys, gradient 0."""

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Sequence[Tile], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and natural log-sum-exp of the tiles.

        q        [queries, batch, heads, head_dim]
        k        [keys, batch, kv_heads, head_dim]; head h reads kv head h // (heads / kv_heads)
        v        [keys, batch, kv_heads, value_dim]
        returns  [queries, batch, heads, value_dim] in q's dtype or wider, [queries, batch, heads] wide
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Sequence[Tile],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This call's parts of dq, dk and dv, in their dtype or wider.

        out, lse   those of the whole: all tiles of all calls joined
        """


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Joins attention over further keys to what is there, in place.

    out   [..., value_dim] wide, with lse [...]; −∞ where nothing was seen yet
    """
    # Sigmoid and not a quotient of exponentials, which overflow; −∞ − −∞ has seen nothing on either side.
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.add_((part - out).mul_(weight.unsqueeze(-1)))
    torch.logaddexp(lse, part_lse, out=lse)


def even_heads(multiple: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """[..., dim] each → all with one dim, a multiple of `multiple`, by zeros behind; contiguous in it.

    For kernels that know one head size. Exact: zeros add nothing to a product, and outputs behind value_dim are 0.
    """
    size = -(-max(x.shape[-1] for x in tensors) // multiple) * multiple
    return [
        F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x if x.stride(-1) == 1 else x.contiguous()
        for x in tensors
    ]


class TileByTile(ABC):
    """An implementation that computes one tile at a time, of the three kinds that `Tile.simple` has."""

    name = ""

    @abstractmethod
    def tile_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward` of one tile, whose queries, keys and rows are all that is handed in."""

    @abstractmethod
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
        """`backward` of one tile."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Sequence[Tile], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        simple = [part for tile in tiles for part in tile.simple()]
        if len(simple) == 1 and _covers(simple[0], q, k):
            return self.tile_forward(q, k, v, simple[0], scale)
        dtype = wide(q.dtype)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        for tile in simple:
            queries, keys = _part(tile, queries=True), _part(tile, queries=False)
            part, part_lse = self.tile_forward(q[queries], k[keys], v[keys], tile, scale)
            merge(out[queries], lse[queries], part, part_lse)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Sequence[Tile],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        simple = [part for tile in tiles for part in tile.simple()]
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # probability 0 for a query that saw nothing, not NaN
        if len(simple) == 1 and _covers(simple[0], q, k):
            return self.tile_backward(dout, q, k, v, out, lse, simple[0], scale)
        dtype = wide(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for tile in simple:
            queries, keys = _part(tile, queries=True), _part(tile, queries=False)
            parts = self.tile_backward(
                dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries], tile, scale
            )
            dq[queries] += parts[0]
            dk[keys] += parts[1]
            dv[keys] += parts[2]
        return dq, dk, dv


def visible(tile: Tile, device: torch.device) -> torch.Tensor:
    """bool [queries, keys] of a tile: the definition of its mask."""
    queries, keys = tile.shape
    distance = tile.offset + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    return seen if tile.window is None else seen & (distance < tile.window)


def _covers(tile: Tile, q: torch.Tensor, k: torch.Tensor) -> bool:
    return tile.rows == (0, q.shape[1]) and tile.queries == (0, q.shape[0]) and tile.keys == (0, k.shape[0])


def _part(tile: Tile, queries: bool) -> tuple[slice, slice]:
    return slice(*(tile.queries if queries else tile.keys)), slice(*tile.rows)
