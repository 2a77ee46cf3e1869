"""Tokens go to their experts and come back: one all-to-all each way, of exactly the tokens that are chosen.

Nothing is dropped or padded. Rows are sorted by expert (stably, so that their order is the tokens'), sent in pieces of
any size, and sorted by expert again where they arrive; the way back is the same in reverse. Sizes travel ahead in one
small all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.comm import collectives
from ultrascale.comm.differentiable import UnderWay, begin_exchange, exchange, finish_exchange
from ultrascale.comm.group import Group
from ultrascale.parallel.experts.placement import Placement


@dataclass(frozen=True, slots=True)
class Route:
    """How the rows of one layer and micro-batch travel."""

    choices: int
    """Tokens here · experts of each."""
    rows: torch.Tensor
    """int64 [sent]: which choice each sent row is (token · experts of each + place)."""
    send: list[int]
    receive: list[int]
    """Rows to and from each rank of the group."""
    by_expert: torch.Tensor
    """int64 [received]: the received rows, sorted by expert."""
    counts: list[int]
    """Rows of each expert that is here."""
    under_way: UnderWay
    chosen: torch.Tensor
    """int64 [experts]: how many of this rank's tokens go to each expert."""


@dataclass(frozen=True)
class ExpertGroups:
    """What the layers of a rank know about where experts are."""

    placement: Placement
    holders: tuple[tuple[int, ...], ...]
    """Of each share of the experts the places in `travel` of the ranks that hold (parts of) it."""
    travel: Group
    """The ranks among which tokens travel."""
    rows: Group
    """The ranks that hold the other tokens of this rank's rows: cp and tp."""


class Dispatch:
    """Of the experts of a layer."""

    def __init__(self, groups: ExpertGroups, experts: int) -> None:
        self.group, self.experts, holders = groups.travel, experts, groups.holders
        self.shares = len(holders)
        share_of = {place: share for share, places in enumerate(holders) for place in places}
        self._share_of_place = [share_of[place] for place in range(self.group.size)]

    @torch.no_grad()
    def route(self, chosen: torch.Tensor) -> Route:
        """Where the tokens of a micro-batch go; exchanges the numbers of rows, and waits for them.

        chosen   int64 [tokens, k]: each token's experts; −1 = none
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        numbers = flat.add(1).bincount(minlength=self.experts + 1)
        unsent, numbers = numbers[0], numbers[1:].view(self.shares, -1)
        with self.group.ledger.during("dispatch"):
            arriving = collectives.all_to_all(numbers[self._share_of_place], self.group).wait()
        per_share, received = numbers.sum(1).tolist(), arriving.tolist()  # the one synchronisation with the device
        pieces = order[int(unsent) :].split(per_share)
        send, receive = [per_share[share] for share in self._share_of_place], [sum(row) for row in received]
        places = torch.arange(arriving.shape[1], device=chosen.device).repeat(self.group.size)
        return Route(
            choices=flat.numel(),
            rows=torch.cat([pieces[share] for share in self._share_of_place]),
            send=send,
            receive=receive,
            under_way=UnderWay(self.group, send, receive),
            by_expert=places.repeat_interleave(arriving.flatten()).argsort(stable=True),
            counts=[sum(column) for column in zip(*received, strict=True)],
            chosen=numbers.flatten(),
        )

    def begin(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        """x [tokens, hidden] sets out; what comes back goes to `arrive`, unread."""
        k = route.choices // x.shape[0]
        with self.group.ledger.during("dispatch"):
            return begin_exchange(x.index_select(0, route.rows // k), route.under_way)

    def arrive(self, unfinished: torch.Tensor, route: Route) -> torch.Tensor:
        """[received, hidden], the rows of each expert together."""
        return finish_exchange(unfinished, route.under_way).index_select(0, route.by_expert)

    def to_tokens(self, y: torch.Tensor, route: Route) -> torch.Tensor:
        """y [received, hidden] of the experts → [choices, hidden]; parts of one expert's output are added up."""
        back = torch.empty_like(route.by_expert)
        back[route.by_expert] = torch.arange(back.numel(), device=back.device)
        with self.group.ledger.during("dispatch"):
            returned = exchange(y.index_select(0, back), self.group, route.receive, route.send)
        whole = returned.new_zeros(route.choices, y.shape[1])
        return whole.index_add(0, route.rows, returned)
