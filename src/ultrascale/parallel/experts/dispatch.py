"""What every way of bringing tokens to their experts, and back, has in common.

A layer asks in this order: `route` says where tokens go, `begin` sends them off, `arrive` waits for them, `combine`
brings back what their experts made of them, weighted and added up. Between `begin` and `arrive` something else may run.

Outputs of a token's experts are added in one order, whoever adds: first those of one rank, by expert, then the ranks'
sums, in the order of the group. So two ways come to the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ultrascale.comm.group import Group
from ultrascale.parallel.experts.placement import Placement


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
    dispatch: str
    """How tokens travel: all_to_all, all_gather or deep_ep (`choice.py`)."""
    seed: int
    """Of the run, for what routers draw."""


class Arrived(NamedTuple):
    """What this rank's experts work on."""

    rows: torch.Tensor
    """[received, hidden], the rows of each expert together."""
    counts: list[int]
    """Rows of each expert that is here."""
    weights: torch.Tensor
    """As `combine` takes them."""


R = TypeVar("R")
"""How the rows of one layer and micro-batch travel."""


class Dispatch(ABC, Generic[R]):
    """Of the experts of a layer.

    experts   of the whole layer
    sums      in which outputs of a token's experts are weighted and added
    """

    def __init__(self, groups: ExpertGroups, experts: int, sums: torch.dtype) -> None:
        self.group, self.experts, self.sums = groups.travel, experts, sums
        self.shares = len(groups.holders)
        share_of = {place: share for share, places in enumerate(groups.holders) for place in places}
        self.share_of_place = [share_of[place] for place in range(self.group.size)]

    @abstractmethod
    def route(self, chosen: torch.Tensor) -> R:
        """Where the tokens of a micro-batch go; ranks tell each other how many, and wait for that.

        chosen   int64 [tokens, k]: each token's experts; −1 = none
        """

    @abstractmethod
    def begin(self, x: torch.Tensor, weights: torch.Tensor, route: R) -> Any:
        """Tokens set out; what comes back goes to `arrive`, unread.

        x         [tokens, hidden]
        weights   [tokens, k]: what the outputs of a token's experts are multiplied with
        """

    @abstractmethod
    def arrive(self, travelling: Any, route: R) -> Arrived:
        """Waits for what others sent here."""

    @abstractmethod
    def combine(self, y: torch.Tensor, weights: torch.Tensor, route: R) -> torch.Tensor:
        """y [received, hidden] of the experts → [tokens, hidden] in `sums`: Σ weight · output, 0 for a token that chose
        none. Parts of one expert's output are added up."""


def counts_of(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """int64 [1 + experts]: how often none, and each expert, was chosen. Waits for no device, as bincount would."""
    flat = chosen.flatten() + 1
    return flat.new_zeros(1 + experts).scatter_add_(0, flat, torch.ones_like(flat))
