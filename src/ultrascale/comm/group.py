"""A group of ranks as the collectives see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ultrascale.comm.ledger import Ledger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other, and this rank's place among them.

    axes            the mesh axes in which the ranks differ, those of size 1 left out
    ranks           their ranks in the world, sorted by their index in the group
    index           this rank's place in `ranks`
    process_group   torch's; None when the group has one rank
    ledger          where calls on this group are written

    Equal when axes and ranks are.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int = field(compare=False)
    process_group: ProcessGroup | None = field(compare=False, repr=False)
    ledger: Ledger = field(compare=False, repr=False)

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def with_ledger(self, ledger: Ledger) -> Group:
        """The same group, writing to another ledger."""
        return replace(self, ledger=ledger)

    def __str__(self) -> str:
        return f"({', '.join(self.axes)}) of ranks {', '.join(map(str, self.ranks))}"
