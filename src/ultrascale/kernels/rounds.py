"""Tiles as variable-length kernels take them: masks that end in the corner, in rounds without overlap. Needs no torch.

FlashAttention (Dao 2023) counts a mask from the last query and the last key: of n queries and m keys, query i sees key
j when

    i + m − n − left ≤ j ≤ i + m − n + right        (−1 = no bound)

One call has one such mask for all its sequences, and writes each query and each key of a gradient once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ultrascale.kernels.tiles import Tile


class Mask(NamedTuple):
    """Of a call; −1 = no bound."""

    left: int
    right: int


FULL = Mask(-1, -1)
CAUSAL = Mask(-1, 0)


class Round(NamedTuple):
    """Tiles of one mask of which no two share a query, or a key, of a row."""

    mask: Mask
    tiles: tuple[Tile, ...]


def rounds(tiles: Iterable[Tile]) -> list[Round]:
    """All pairs of the tiles, once each, in as few rounds as tiles in the order of their queries need."""
    parts = [part for tile in tiles for part in aligned(tile)]
    opened: dict[Mask, list[_Open]] = {}
    for mask, part in sorted(parts, key=lambda part: (part[1].queries, part[1].keys)):
        of_mask = opened.setdefault(mask, [])
        place = next((one for one in of_mask if one.is_free_for(part)), None)
        if place is None:
            place = _Open()
            of_mask.append(place)
        place.add(part)
    return [Round(mask, tuple(one.tiles)) for mask, of_mask in opened.items() for one in of_mask]


def aligned(tile: Tile) -> Iterator[tuple[Mask, Tile]]:
    """The same pairs as tiles with a mask each; every query of them sees a key.

    Queries that stand among the keys have the mask's end in the corner as they are. Those behind the keys see all of
    them, until the window leaves the first ones behind.
    """
    among = tile.shape[1] - tile.offset
    behind = tile.shape[0] if tile.window is None else tile.window - tile.offset
    first, last = tile.without_keys()
    cuts = [first, *(min(max(cut, first), last) for cut in (among, max(among, behind))), last]
    for start, stop in pairwise(cuts):
        if start < stop:
            part = _of_queries(tile, start, stop)
            yield _mask(part), part


def _of_queries(tile: Tile, start: int, stop: int) -> Tile:
    """Some of its queries, with the keys that these see."""
    (query, _), (key, _), offset = tile.queries, tile.keys, tile.offset
    first = 0 if tile.window is None else max(0, start + offset - tile.window + 1)
    last = min(tile.shape[1], stop + offset)
    return replace(
        tile, queries=(query + start, query + stop), keys=(key + first, key + last), offset=start + offset - first
    )


def _mask(part: Tile) -> Mask:
    """One for all tiles that end in the corner, whether or not they are long enough for the window to hide a key."""
    queries, keys = part.shape
    corner = keys - queries
    if part.offset == corner:
        return CAUSAL if part.window is None else Mask(part.window - 1, 0)
    if part.full:
        return FULL
    assert part.window is not None
    return Mask(corner - part.offset + part.window - 1, -1)


@dataclass
class _Open:
    """A round that may get further tiles, which come in the order of their queries."""

    tiles: list[Tile] = field(default_factory=list)
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each row: behind the last query and the last key that are taken."""

    def is_free_for(self, tile: Tile) -> bool:
        ends = (self.ends.get(row, (0, 0)) for row in range(*tile.rows))
        return all(tile.queries[0] >= query and tile.keys[0] >= key for query, key in ends)

    def add(self, tile: Tile) -> None:
        self.tiles.append(tile)
        for row in range(*tile.rows):
            self.ends[row] = (tile.queries[1], tile.keys[1])
