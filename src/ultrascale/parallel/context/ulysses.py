"""Tokens for heads: each rank gets all tokens of its share of the heads, and gives them back (Jacobs et al. 2023).

Four all-to-alls a layer; attention between them is that of one rank, whatever the mask, with equal work on all ranks.
KV heads that the ranks outnumber are sent to each rank whose query heads read them; their gradients add up.
"""

from __future__ import annotations

from math import lcm

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group


class Exchange:
    """Between [tokens / n, batch, heads, dim] and [tokens, batch, heads / n, dim] over the n ranks of `group`.

    Its tokens come in the order of the ranks. n must divide the number of query heads; with one rank nothing happens.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens of this rank's heads, in one message for the three."""
        if self.group.size == 1:
            return q, k, v
        copies = self._copies(k)
        q, k, v = self._scattered(q, k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2))
        return q, k, v

    def to_heads_one(self, x: torch.Tensor) -> torch.Tensor:
        """The same of one tensor with the query heads: the gradient of `to_tokens`."""
        return x if self.group.size == 1 else self._scattered(x)[0]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens."""
        return x if self.group.size == 1 else self._gathered(x)[0]

    def to_tokens_gradients(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, kv_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The way back of `to_heads`: copies of a KV head add up."""
        if self.group.size == 1:
            return dq, dk, dv
        dq, dk, dv = self._gathered(dq, dk, dv)
        return dq, dk.unflatten(2, (kv_heads, -1)).sum(3), dv.unflatten(2, (kv_heads, -1)).sum(3)

    def _copies(self, k: torch.Tensor) -> int:
        return lcm(k.shape[2], self.group.size) // k.shape[2]

    def _scattered(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens / n, batch, heads, dim] each → [tokens, batch, heads / n, dim] each."""
        n = self.group.size
        # [n, tokens / n, batch, heads / n · dim]: piece i holds what rank i works on.
        pieces = [x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4).flatten(3) for x in tensors]
        received = self._exchanged(torch.cat(pieces, dim=3)).flatten(0, 1)
        parts = received.split([piece.shape[3] for piece in pieces], dim=2)
        return tuple(part.unflatten(2, (-1, x.shape[3])) for part, x in zip(parts, tensors, strict=True))

    def _gathered(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens, batch, heads / n, dim] each → [tokens / n, batch, heads, dim] each."""
        n = self.group.size
        received = self._exchanged(torch.cat([x.flatten(2) for x in tensors], dim=2).unflatten(0, (n, -1)))
        parts = received.split([x.shape[2] * x.shape[3] for x in tensors], dim=3)
        return tuple(
            # [n, tokens / n, batch, heads / n · dim]: piece i holds rank i's heads.
            part.unflatten(3, (-1, x.shape[3])).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for part, x in zip(parts, tensors, strict=True)
        )

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        with self.group.ledger.during("attention"):
            return collectives.all_to_all(x, self.group).wait()
