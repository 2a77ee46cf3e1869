"""How many tokens each expert got: what balances routers from step to step, and what a run reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group


class Collected(NamedTuple):
    """Of a step's global batch."""

    chosen: torch.Tensor
    """int64 [layers, experts]"""
    dropped: torch.Tensor
    """int64 [layers]: choices for which there was no room."""


class ExpertLoad:
    """Counts of what the tokens of a step chose, by layer and expert, and of choices that were dropped.

    layers    the sparse layers of the whole model, whichever of them are on this rank
    experts   of each layer
    """

    def __init__(self, layers: Sequence[int], experts: int, device: torch.device) -> None:
        self.layers, self.experts, self.device = tuple(layers), experts, device
        self._seen: dict[tuple[int, int], torch.Tensor] = {}

    def record(self, layer: int, micro_batch: int, chosen: torch.Tensor, dropped: torch.Tensor) -> None:
        """Of this rank's tokens. A forward that is recomputed says the same again, and counts once.

        chosen    int64 [experts], whether or not an expert had room
        dropped   int64 [1]: how many of these choices were dropped
        """
        self._seen[layer, micro_batch] = torch.cat([chosen, dropped])

    def collect(self, world: Group) -> Collected:
        """Of all ranks and micro-batches since the last call; collective."""
        total = torch.zeros(len(self.layers), self.experts + 1, dtype=torch.int64, device=self.device)
        places = {layer: place for place, layer in enumerate(self.layers)}
        for (layer, _), counts in self._seen.items():
            total[places[layer]] += counts
        self._seen = {}
        with world.ledger.during("router"):
            collectives.all_reduce(total, world).wait()
        return Collected(total[:, :-1], total[:, -1])
