"""Attention by kernels for sequences of many lengths: all documents, rows and chunks of a round in one call.

What the implementations have in common: tiles become packed sequences (`rounds`), parts are joined, gradients added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from ultrascale.kernels.attention import even_heads, merge
from ultrascale.kernels.rounds import Mask, Round, rounds
from ultrascale.kernels.tiles import Tile
from ultrascale.precision.policy import wide

MULTIPLE = 8
"""Of the size of a head, in FlashAttention's kernels."""

Where = slice | torch.Tensor
"""Places in dim 0 of [seq · batch, heads, dim]; none twice."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a kernel: sequences of queries, one behind the other, each with keys of its own."""

    mask: Mask
    queries: Where
    keys: Where
    query_starts: torch.Tensor
    """int32 [sequences + 1]: where each begins among the queries of the call; the last is their number."""
    key_starts: torch.Tensor
    most_queries: int
    """In one sequence."""
    most_keys: int


class VarlenAttention(ABC):
    """bfloat16 and float16 on CUDA; grouped heads; any head sizes up to 256, padded to a common multiple of 8."""

    name = ""

    @abstractmethod
    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [queries, heads, dim], k and v [keys, kv_heads, dim] → output as q, log-sum-exp wide [heads, queries]."""

    @abstractmethod
    def call_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk and dv of the call, as q, k and v; `lse` is contiguous."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Sequence[Tile], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seq, batch, heads, _ = q.shape
        value_dim, dtype = v.shape[-1], wide(q.dtype)
        calls = _calls(tuple(tiles), batch, q.device)
        q, k, v = (x.flatten(0, 1) for x in even_heads(MULTIPLE, q, k, v))
        if len(calls) == 1 and calls[0].queries == slice(0, seq * batch):
            out, lse = self.call_forward(q, k[calls[0].keys], v[calls[0].keys], calls[0], scale)
            return out[..., :value_dim].unflatten(0, (seq, batch)), lse.t().unflatten(0, (seq, batch))
        out = torch.zeros(seq * batch, heads, value_dim, dtype=dtype, device=q.device)
        lse = torch.full((seq * batch, heads), -torch.inf, dtype=dtype, device=q.device)
        for call in calls:
            part, part_lse = self.call_forward(q[call.queries], k[call.keys], v[call.keys], call, scale)
            joined, joined_lse = out[call.queries], lse[call.queries]
            merge(joined, joined_lse, part[..., :value_dim], part_lse.t())
            if isinstance(call.queries, torch.Tensor):  # a slice is a view, and has it already
                out[call.queries], lse[call.queries] = joined, joined_lse
        return out.unflatten(0, (seq, batch)), lse.unflatten(0, (seq, batch))

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
        calls = _calls(tuple(tiles), q.shape[1], q.device)
        sums = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v)]
        compute = q.dtype
        q, k, v, dout, out = (
            x.flatten(0, 1) for x in even_heads(MULTIPLE, q, k, v, dout.to(compute), out.to(compute))
        )  # fmt: skip
        lse = lse.flatten(0, 1)
        for call in calls:
            queries, keys = call.queries, call.keys
            parts = self.call_backward(
                dout[queries], q[queries], k[keys], v[keys], out[queries], lse[queries].t().contiguous(), call, scale
            )
            for whole, where, part in zip(sums, (queries, keys, keys), parts, strict=True):
                whole.flatten(0, 1)[where] += part[..., : whole.shape[-1]]
        return sums[0], sums[1], sums[2]


@lru_cache(maxsize=128)
def _calls(tiles: tuple[Tile, ...], batch: int, device: torch.device) -> tuple[Call, ...]:
    """Kept, since all layers and both passes of a micro-batch have the same tiles."""
    return tuple(_call(one, batch, device) for one in rounds(tiles))


def _call(one: Round, batch: int, device: torch.device) -> Call:
    sequences = [(row, tile) for tile in one.tiles for row in range(*tile.rows)]
    queries, keys = zip(*(tile.shape for _, tile in sequences), strict=True)
    return Call(
        mask=one.mask,
        queries=_where([(row, tile.queries) for row, tile in sequences], batch, device),
        keys=_where([(row, tile.keys) for row, tile in sequences], batch, device),
        query_starts=_starts(queries, device),
        key_starts=_starts(keys, device),
        most_queries=max(queries),
        most_keys=max(keys),
    )


def _where(pieces: Sequence[tuple[int, tuple[int, int]]], batch: int, device: torch.device) -> Where:
    """Of [start, stop) in rows, one piece behind the other."""
    places = np.concatenate([np.arange(*piece) * batch + row for row, piece in pieces])
    first, count = int(places[0]), len(places)
    if np.array_equal(places, np.arange(first, first + count)):
        return slice(first, first + count)
    return torch.from_numpy(places).to(device)


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
