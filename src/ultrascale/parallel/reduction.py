"""A sum of gradients under way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.comm.collectives import DeterministicSum, Pending
from ultrascale.comm.group import Group


@dataclass(frozen=True, slots=True)
class Reduction:
    """A SUM under way, in the dtype in which gradients travel."""

    group: Group
    pending: Pending
    target: torch.Tensor
    """Where the sum belongs, in the dtype of accumulation."""
    adds: bool = False
    """Whether it is added to what is there: micro-batches that were summed before."""

    def advance(self) -> None:
        """Issues the second exchange of a deterministic sum, so that those of several buckets overlap."""
        if isinstance(self.pending, DeterministicSum):
            with self.group.ledger.during("reduce"):
                self.pending.advance()

    def finish(self) -> None:
        """Waits, and puts the sum in its place."""
        with self.group.ledger.during("reduce"):
            total = self.pending.wait()
        if self.adds:
            self.target.add_(total)
        elif total is not self.target:
            self.target.copy_(total)
