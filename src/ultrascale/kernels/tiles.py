"""What attention has to compute, as rectangles of (query, key) pairs. Needs no torch.

A mask (causal, within a document, within a window) over tokens that lie anywhere on any rank is a list of tiles.
Pairs that no tile holds are never computed, so what one document holds cannot change a bit of another's, and the work
of a rank is counted exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

SMALLEST_PIECE, LARGEST_PIECE = 16, 512
"""Queries of a window that are computed against one explicit mask: few, so that little of it is masked."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries × keys of some rows, where query i sees key j when i + offset − window < j ≤ i + offset.

    i and j count from the tile's own first query and key.
    """

    rows: tuple[int, int]
    """[start, stop) in the batch."""
    queries: tuple[int, int]
    """[start, stop) in the queries of the call."""
    keys: tuple[int, int]
    """[start, stop) in the keys of the call."""
    offset: int
    """Position of the first query minus that of the first key."""
    window: int | None
    """Keys that a query sees at most, its own included; None = all before it."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]

    @property
    def windowed(self) -> bool:
        """Whether the window hides any key that comes before its query."""
        return self.window is not None and self.shape[0] - 1 + self.offset >= self.window

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.offset >= self.shape[1] - 1 and not self.windowed

    @property
    def pairs(self) -> int:
        """Pairs that are seen, over all rows."""
        queries, keys = self.shape
        seen = _sum_clamped(queries, self.offset + 1, keys)
        if self.window is not None:
            seen -= _sum_clamped(queries, self.offset + 1 - self.window, keys)
        return seen * (self.rows[1] - self.rows[0])

    def simple(self) -> Iterator[Tile]:
        """The same pairs as tiles of three kinds: full; causal from the corner (offset 0, no window); windowed, short.

        For kernels that know a square causal mask, and others only as a tensor.
        """
        first, last = self.keys
        if self.windowed:
            yield from self._pieces()
        elif self.full or self.offset == 0:
            yield self
        elif self.offset < 0:  # the first queries see nothing
            start = self.queries[0] - self.offset
            if start < self.queries[1]:
                yield replace(self, queries=(start, self.queries[1]), offset=0)
        else:
            yield replace(self, keys=(first, first + self.offset), window=None)
            yield replace(self, keys=(first + self.offset, last), offset=0, window=None)

    def _pieces(self) -> Iterator[Tile]:
        """Cut along the queries; of each piece only the keys that it sees."""
        assert self.window is not None
        size = min(max(self.window, SMALLEST_PIECE), LARGEST_PIECE)
        queries, keys = self.shape
        for start in range(0, queries, size):
            stop = min(queries, start + size)
            first = max(0, start + self.offset - self.window + 1)
            last = min(keys, stop + self.offset)
            if first < last:
                yield replace(
                    self,
                    queries=(self.queries[0] + start, self.queries[0] + stop),
                    keys=(self.keys[0] + first, self.keys[0] + last),
                    offset=start + self.offset - first,
                )

    def without_keys(self) -> tuple[int, int]:
        """(a, b): the first a queries see none of the keys, and those from b on neither."""
        queries, keys = self.shape
        first = min(queries, max(0, -self.offset))
        last = queries if self.window is None else min(queries, max(first, keys - self.offset + self.window - 1))
        return first, last


def _sum_clamped(count: int, first: int, limit: int) -> int:
    """Σ min(max(first + i, 0), limit) over i = 0 … count − 1."""
    rising = range(max(first, 1), min(first + count, limit))
    above = max(0, first + count - max(first, limit))
    return (rising[0] + rising[-1]) * len(rising) // 2 + above * limit if rising else above * limit
