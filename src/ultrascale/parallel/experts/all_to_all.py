"""Tokens go to their experts and come back: one all-to-all each way, of exactly the tokens that are chosen.

Nothing is padded. Rows are sorted by expert (stably, so that their order is the tokens'), sent in pieces of any size,
and sorted by expert again where they arrive; the way back is the same in reverse. Sizes travel ahead in one small
all-to-all. A rank sends tokens · k · hidden elements each way, less what stays at home.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.comm import collectives
from ultrascale.comm.differentiable import Exchange, begin, exchange, finish
from ultrascale.parallel.experts.dispatch import Arrived, Dispatch, counts_of
from ultrascale.parallel.experts.weighted_sum import by_turns, turns, weighted_sum

Travelling = tuple[torch.Tensor, torch.Tensor]
"""Rows that have not arrived, and the weights, which stay."""


@dataclass(frozen=True, slots=True)
class ExchangeRoute:
    counts: list[int]
    """Rows of each expert that is here."""
    k: int
    """Experts of each token."""
    rows: torch.Tensor
    """int64 [sent]: which choice each sent row is (token · k + place)."""
    send: list[int]
    receive: list[int]
    """Rows to and from each rank of the group."""
    by_expert: torch.Tensor
    """int64 [received]: the received rows, sorted by expert."""
    under_way: Exchange
    slots: torch.Tensor
    fresh: torch.Tensor
    """In which order the rows of a token are added (`weighted_sum.by_turns`)."""


class AllToAll(Dispatch[ExchangeRoute]):
    """Dropless, and nothing travels that is not needed."""

    @torch.no_grad()
    def route(self, chosen: torch.Tensor) -> ExchangeRoute:
        size, k = chosen.shape
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        numbers = counts_of(flat, self.experts)
        by_share = numbers[1:].view(self.shares, -1)
        with self.group.ledger.during("dispatch"):
            arriving = collectives.all_to_all(by_share[self.share_of_place], self.group).wait()
        # The one synchronisation with the device.
        unsent, *own = torch.cat([numbers[:1], by_share.sum(1)]).tolist()
        received = arriving.tolist()
        pieces = order[unsent:].split(own)
        send = [own[share] for share in self.share_of_place]
        receive = [sum(row) for row in received]
        rows = torch.cat([pieces[share] for share in self.share_of_place])
        places = torch.arange(self.group.size, device=chosen.device)
        origins = places.repeat_interleave(torch.tensor(send, device=chosen.device), output_size=sum(send))
        experts = torch.arange(arriving.shape[1], device=chosen.device).repeat(self.group.size)
        slots, fresh = turns(rows // k, origins, size, k * (self.group.size // self.shares))
        return ExchangeRoute(
            k=k,
            rows=rows,
            send=send,
            receive=receive,
            by_expert=experts.repeat_interleave(arriving.flatten(), output_size=sum(receive)).argsort(stable=True),
            counts=[sum(column) for column in zip(*received, strict=True)],
            under_way=Exchange(self.group, send, receive),
            slots=slots,
            fresh=fresh,
        )

    def begin(self, x: torch.Tensor, weights: torch.Tensor, route: ExchangeRoute) -> Travelling:
        with self.group.ledger.during("dispatch"):
            return begin(x.index_select(0, route.rows // route.k), route.under_way), weights

    def arrive(self, travelling: Travelling, route: ExchangeRoute) -> Arrived:
        unfinished, weights = travelling
        rows = finish(unfinished, route.under_way).index_select(0, route.by_expert)
        return Arrived(rows, route.counts, weights)

    def combine(self, y: torch.Tensor, weights: torch.Tensor, route: ExchangeRoute) -> torch.Tensor:
        back = torch.empty_like(route.by_expert)
        back[route.by_expert] = torch.arange(back.numel(), device=back.device)
        with self.group.ledger.during("dispatch"):
            returned = exchange(y.index_select(0, back), self.group, route.receive, route.send)
        return weighted_sum(returned, weights, route.rows, by_turns(route.slots, route.fresh), self.sums)
