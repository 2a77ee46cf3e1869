"""Rows of a matrix in another order: what neighbouring pairs and halves make of the features that positions turn.

A rotation turns features two by two. In published weights the two are neighbours (interleaved: 0 1 | 2 3 | …) or lie
half of the part apart (0 n/2 | 1 n/2+1 | …). Scores are sums over pairs, so a model is the same under both when the
rows that make these features are dealt out anew, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Where the rows of an ordered matrix lie in the one that is stored.

    block    rows of a head; of the whole matrix where there is one
    first    row of a block where those that are turned begin; they reach to its end
    pairs    whether the stored rows are neighbouring pairs, and the ordered ones halves; False: the other way round
    """

    block: int
    first: int
    pairs: bool

    def stored(self, row: int, rows: int) -> Rows:
        """Stored row of each of the ordered rows [row, row + rows)."""
        half = (self.block - self.first) // 2
        head, inside = np.divmod(np.arange(row, row + rows, dtype=np.int64), self.block)
        turned = inside - self.first
        moved = 2 * (turned % half) + turned // half if self.pairs else turned % 2 * half + turned // 2
        return head * self.block + np.where(turned < 0, inside, self.first + moved)

    def reverse(self) -> RowOrder:
        """The way back."""
        return replace(self, pairs=not self.pairs)
