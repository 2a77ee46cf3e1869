"""What sequence parallelism keeps in pieces, put together when it is needed."""

from __future__ import annotations

import torch

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group


class WholeTokens:
    """All tokens of a tensor of which sequence parallelism keeps a piece on each rank: gathered when first needed.

    piece   [seq / tp, batch, features]; without sequence parallelism all tokens, and there is nothing to gather
    """

    def __init__(self, piece: torch.Tensor, group: Group, sequence_parallel: bool) -> None:
        self._piece = piece.detach()  # or it would keep what made it
        self._group = group if sequence_parallel else None
        self._gathering: Pending | None = None

    def issue(self) -> None:
        """Starts the gather, once."""
        if self._group is not None and self._gathering is None:
            self._gathering = collectives.all_gather(self._piece, self._group)

    def wait(self) -> torch.Tensor:
        """[seq, batch, features]"""
        self.issue()
        return self._piece if self._gathering is None else self._gathering.wait()
