"""How many tokens each expert got: what balances routers from step to step, and what a run reports."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group


class ExpertLoad:
    """Counts of the tokens of a step, by layer and expert.

    layers    the sparse layers of the whole model, whichever of them are on this rank
    experts   of each layer
    """

    def __init__(self, layers: Sequence[int], experts: int, device: torch.device) -> None:
        self.layers, self.experts, self.device = tuple(layers), experts, device
        self._seen: dict[tuple[int, int], torch.Tensor] = {}

    def record(self, layer: int, micro_batch: int, counts: torch.Tensor) -> None:
        """int64 [experts] of this rank's tokens. A forward that is recomputed says the same again, and counts once."""
        self._seen[layer, micro_batch] = counts

    def collect(self, world: Group) -> torch.Tensor:
        """int64 [layers, experts] of all ranks and micro-batches since the last call; collective."""
        total = torch.zeros(len(self.layers), self.experts, dtype=torch.int64, device=self.device)
        places = {layer: place for place, layer in enumerate(self.layers)}
        for (layer, _), counts in self._seen.items():
            total[places[layer]] += counts
        self._seen = {}
        with world.ledger.during("router"):
            return collectives.all_reduce(total, world).wait()
