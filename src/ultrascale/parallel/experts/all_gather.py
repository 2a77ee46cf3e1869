"""Every rank gathers all tokens, computes those of its own experts, and what ranks made of a token is added on its way
back: an all-gather there, a reduce-scatter back.

For groups so small that a token goes to most of their ranks anyway: a rank sends tokens · hidden elements to each other
rank, each way, however many experts a token has, and messages are of one size. With N ranks that is less than the
all-to-all's tokens · k · hidden · (N − 1)/N where k is above N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.comm import collectives
from ultrascale.comm.differentiable import Gather, begin, finish, scatter_sum
from ultrascale.parallel.experts.dispatch import Arrived, Dispatch, ExpertGroups, counts_of
from ultrascale.parallel.experts.weighted_sum import by_expert, weighted_sum

Travelling = tuple[torch.Tensor, torch.Tensor]
"""Tokens and weights that have not arrived."""


@dataclass(frozen=True, slots=True)
class GatherRoute:
    counts: list[int]
    """Rows of each expert that is here."""
    rows: torch.Tensor
    """int64 [rows here]: which of everyone's choices each row is (token · k + place), by expert."""
    tokens: torch.Tensor
    """int64 [rows here]: of which of everyone's tokens."""
    everyone: int
    """Tokens of the whole group."""
    x_under_way: Gather
    weights_under_way: Gather


class AllGather(Dispatch[GatherRoute]):
    """Dropless, by messages of one size."""

    def __init__(self, groups: ExpertGroups, experts: int, sums: torch.dtype) -> None:
        super().__init__(groups, experts, sums)
        self.here = experts // self.shares
        self.first = self.here * self.share_of_place[self.group.index]

    @torch.no_grad()
    def route(self, chosen: torch.Tensor) -> GatherRoute:
        with self.group.ledger.during("dispatch"):
            gathered = collectives.all_gather(chosen.to(torch.int32), self.group).wait().long()
        own = gathered.flatten() - self.first
        own = own.masked_fill((own < 0) | (own >= self.here), self.here)  # sorted behind those that are here
        counts = counts_of(own, self.here + 1)[1:-1].tolist()
        rows = own.argsort(stable=True)[: sum(counts)]
        return GatherRoute(
            counts=counts,
            rows=rows,
            tokens=rows // chosen.shape[1],
            everyone=gathered.shape[0],
            x_under_way=Gather(self.group),
            weights_under_way=Gather(self.group),
        )

    def begin(self, x: torch.Tensor, weights: torch.Tensor, route: GatherRoute) -> Travelling:
        with self.group.ledger.during("dispatch"):
            return begin(x, route.x_under_way), begin(weights, route.weights_under_way)

    def arrive(self, travelling: Travelling, route: GatherRoute) -> Arrived:
        x, weights = travelling
        rows = finish(x, route.x_under_way).index_select(0, route.tokens)
        return Arrived(rows, route.counts, finish(weights, route.weights_under_way))

    def combine(self, y: torch.Tensor, weights: torch.Tensor, route: GatherRoute) -> torch.Tensor:
        add = by_expert(route.tokens, route.counts, route.everyone)
        parts = weighted_sum(y, weights, route.rows, add, self.sums)
        with self.group.ledger.during("dispatch"):
            return scatter_sum(parts, self.group, in_rank_order=True)
