"""What every cp rank computes against the keys of every other, as tiles. Needs no torch.

Causal attention within a document, perhaps within a window. All ranks know the documents of the whole sequence, so each
knows what the others need of it: keys that nobody further on needs are not sent on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ultrascale.kernels.tiles import Tile
from ultrascale.parallel.context.split import Cut, Documents, Run, ring_runs

Rows = tuple[Documents, ...] | int
"""Documents of each row of a micro-batch; or the number of rows, where each is one document."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Attention of one place on the ring."""

    tiles: tuple[tuple[Tile, ...], ...]
    """[t]: this place's queries against the keys of the place t before it."""
    reach: tuple[int, ...]
    """[s]: how many places further on the keys of place s are needed, 0 when only at home."""

    @property
    def pairs(self) -> list[int]:
        """(query, key) pairs of each step: 4 · heads · head_dim FLOPs each in forward."""
        return [sum(tile.pairs for tile in tiles) for tiles in self.tiles]


@lru_cache(maxsize=64)
def ring_plan(length: int, rows: Rows, cut: Cut, place: int, window: int | None) -> RingPlan:
    """Of place `place` on the ring; keys lie in each place's own order."""
    ring = cut.ring
    groups = list(_row_groups(rows))

    def against(queries: int, keys: int) -> Iterator[Tile]:
        for first, last, documents in groups:
            runs = ring_runs(length, documents, cut)
            yield from _tiles(runs[queries], runs[keys], (first, last), window)

    def needs(keys: int, step: int) -> bool:
        return next(against((keys + step) % ring, keys), None) is not None

    return RingPlan(
        tiles=tuple(_joined(against(place, (place - step) % ring)) for step in range(ring)),
        reach=tuple(max((step for step in range(1, ring) if needs(s, step)), default=0) for s in range(ring)),
    )


@lru_cache(maxsize=64)
def gathered_plan(length: int, rows: Rows, cut: Cut, place: int, window: int | None) -> tuple[Tile, ...]:
    """Tiles of one place's queries against all keys, in the order of the sequence."""
    tiles: list[Tile] = []
    for first, last, documents in _row_groups(rows):
        queries = ring_runs(length, documents, cut)[place]
        (keys,) = ring_runs(length, documents, Cut())
        tiles += _tiles(queries, keys, (first, last), window)
    return tuple(tiles)


def _row_groups(rows: Rows) -> Iterator[tuple[int, int, Documents]]:
    """(first row, last + 1, documents) of neighbouring rows that are alike: their tiles are computed at once."""
    if isinstance(rows, int):
        yield 0, rows, (0,)
        return
    changes = [row for row in range(1, len(rows)) if rows[row] != rows[row - 1]]
    for first, last in pairwise((0, *changes, len(rows))):
        yield first, last, rows[first]


def _tiles(queries: Sequence[Run], keys: Sequence[Run], rows: tuple[int, int], window: int | None) -> Iterator[Tile]:
    """Of all pairs of runs of one document, the part of the keys that any query sees."""
    by_document: dict[int, list[tuple[Run, int]]] = {}
    for run, place in zip(keys, _places(keys), strict=True):
        by_document.setdefault(run.document, []).append((run, place))
    for query, query_place in zip(queries, _places(queries), strict=True):
        for key, key_place in by_document.get(query.document, ()):
            seen = _seen(query, key, window)
            if seen is None:
                continue
            start, stop = seen
            first = key_place + start - key.start
            yield Tile(
                rows=rows,
                queries=(query_place, query_place + len(query)),
                keys=(first, first + stop - start),
                offset=query.start - start,
                window=window,
            )


def _seen(query: Run, key: Run, window: int | None) -> tuple[int, int] | None:
    """[start, stop) of a run's keys that some query of a run of the same document sees."""
    start = key.start if window is None else max(key.start, query.start - window + 1)
    stop = min(key.stop, query.stop)
    return (start, stop) if start < stop else None


def _joined(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """Full tiles beside each other made one: under zigzag, two chunks against one, or one against two."""
    joined: list[Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else tile
        both = last is not tile and last.full and tile.full and last.rows == tile.rows and tile.window is None
        if both and last.queries == tile.queries and last.keys[1] == tile.keys[0]:
            queries, keys = tile.queries, (last.keys[0], tile.keys[1])
        elif both and last.keys == tile.keys and last.queries[1] == tile.queries[0]:
            queries, keys = (last.queries[0], tile.queries[1]), tile.keys
        else:
            joined.append(tile)
            continue
        joined[-1] = Tile(tile.rows, queries, keys, keys[1] - keys[0], None)
    return tuple(joined)


def _places(runs: Sequence[Run]) -> list[int]:
    """Where each run begins in memory."""
    return [0, *accumulate(map(len, runs))][:-1]
