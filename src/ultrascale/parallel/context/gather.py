"""Attention with the keys and values of the whole sequence gathered on every rank (Llama 3, Grattafiori et al. 2024).

Three collectives a layer and whole documents for the kernel, at the cost of holding all keys while they are used; they
are gathered again in backward rather than kept.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.kernels.attention import AttentionBackend
from ultrascale.parallel.context.plan import Rows, gathered_plan
from ultrascale.parallel.context.split import Cut, order, ring_runs
from ultrascale.precision.policy import wide


class Gathered:
    """Attention over the ranks of `group`, each with its tokens as the cut says."""

    def __init__(self, group: Group, cut: Cut, backend: AttentionBackend) -> None:
        self.group, self.cut, self.backend = group, cut, backend

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, window: int | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, batch, heads, …] of this rank → output and log-sum-exp over all keys of the sequence."""
        tiles = gathered_plan(q.shape[0] * self.group.size, rows, self.cut, self.group.index, window)
        return self.backend.forward(q, *self._whole(k, v, rows), tiles, scale)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        rows: Rows,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's q, k and v, in their dtype or wider."""
        group = self.group
        tiles = gathered_plan(q.shape[0] * group.size, rows, self.cut, group.index, window)
        dq, dk, dv = self.backend.backward(dout, q, *self._whole(k, v, rows), out, lse, tiles, scale)
        whole = torch.cat([dk.flatten(2), dv.flatten(2)], dim=2).to(wide(q.dtype))
        by_rank = _taken(whole, _place_of_rank_order(whole.shape[0], rows, self.cut))
        with group.ledger.during("attention"):
            piece = collectives.reduce_scatter(by_rank, group).wait()
        dk, dv = piece.split([k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]], dim=2)
        return dq, dk.unflatten(2, k.shape[2:]), dv.unflatten(2, v.shape[2:])

    def _whole(self, k: torch.Tensor, v: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all ranks, in the order of the sequence."""
        with self.group.ledger.during("attention"):
            by_rank = collectives.all_gather(torch.cat([k.flatten(2), v.flatten(2)], dim=2), self.group).wait()
        whole = _taken(by_rank, _place_of_sequence(by_rank.shape[0], rows, self.cut))
        keys, values = whole.split([k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]], dim=2)
        return keys.unflatten(2, k.shape[2:]), values.unflatten(2, v.shape[2:])


def _taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """x [seq, batch, …] at places [seq] (all rows alike) or [seq, batch] of dim 0."""
    places = places.to(x.device)
    if places.dim() == 1:
        return x.index_select(0, places)
    return x[places, torch.arange(x.shape[1], device=x.device)]


@lru_cache(maxsize=64)
def _place_of_rank_order(length: int, rows: Rows, cut: Cut) -> torch.Tensor:
    """int64 [seq] or [seq, batch]: where in the sequence stands what lies here, rank after rank."""

    def of(documents: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([order(runs) for runs in ring_runs(length, documents, cut)])

    places = of((0,)) if isinstance(rows, int) else np.stack([of(documents) for documents in rows], axis=1)
    return torch.from_numpy(places)


@lru_cache(maxsize=64)
def _place_of_sequence(length: int, rows: Rows, cut: Cut) -> torch.Tensor:
    """int64 [seq] or [seq, batch]: where, rank after rank, lies each token of the sequence."""
    return _place_of_rank_order(length, rows, cut).argsort(dim=0)
