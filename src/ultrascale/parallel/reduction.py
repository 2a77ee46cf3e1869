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
    message: torch.Tensor
    target: torch.Tensor
    """Where the sum belongs; the message itself when the dtypes are the same."""

    def advance(self) -> None:
        """Issues the second exchange of a deterministic sum, so that those of several buckets overlap."""
        if isinstance(self.pending, DeterministicSum):
            with self.group.ledger.during("reduce"):
                self.pending.advance()

    def finish(self) -> None:
        """Waits, and puts the sum in its place."""
        with self.group.ledger.during("reduce"):
            self.pending.wait()
        if self.message is not self.target:
            self.target.copy_(self.message)
