"""What every cp rank computes against the keys of every other, as tiles. Needs no torch.

Causal attention within a document, perhaps within a window. All ranks know the documents of the whole sequence, so each
knows what the others need of it: keys that nobody further on needs are not sent on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ultrascale.kernels.tiles import Tile
from ultrascale.parallel.context.split import Cut, Documents, Run, ring_runs

Rows = tuple[Documents, ...] | int
"""Documents of each row of a micro-batch; or the number of rows, where each is one document."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Attention of one place on the ring."""

    tiles: tuple[tuple[Tile, ...], ...]
    """[t]: this place's queries against the keys of the place t before it, counted from `queries[t]`."""
    queries: tuple[slice, ...]
    """[t]: this place's queries that see any of those keys, and those between them."""
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
    groups = [
        (first, last, [_by_document(runs) for runs in ring_runs(length, documents, cut)])
        for first, last, documents in _row_groups(rows)
    ]

    def against(queries: int, keys: int) -> Iterator[Tile]:
        for first, last, places in groups:
            yield from _tiles(places[queries], places[keys], (first, last), window)

    def needs(keys: int, step: int) -> bool:
        return next(against((keys + step) % ring, keys), None) is not None

    steps = [_counted_from_first(_joined(against(place, (place - step) % ring))) for step in range(ring)]
    return RingPlan(
        tiles=tuple(tiles for _, tiles in steps),
        queries=tuple(span for span, _ in steps),
        reach=tuple(
            next((step for step in range(ring - 1, 0, -1) if needs(source, step)), 0) for source in range(ring)
        ),
    )


@lru_cache(maxsize=64)
def gathered_plan(length: int, rows: Rows, cut: Cut, place: int, window: int | None) -> tuple[Tile, ...]:
    """Tiles of one place's queries against all keys, in the order of the sequence."""
    tiles: list[Tile] = []
    for first, last, documents in _row_groups(rows):
        queries = ring_runs(length, documents, cut)[place]
        (keys,) = ring_runs(length, documents, Cut())
        tiles += _tiles(_by_document(queries), _by_document(keys), (first, last), window)
    return tuple(tiles)


def _row_groups(rows: Rows) -> Iterator[tuple[int, int, Documents]]:
    """(first row, last + 1, documents) of neighbouring rows that are alike: their tiles are computed at once."""
    if isinstance(rows, int):
        yield 0, rows, (0,)
        return
    changes = [row for row in range(1, len(rows)) if rows[row] != rows[row - 1]]
    for first, last in pairwise((0, *changes, len(rows))):
        yield first, last, rows[first]


_Places = dict[int, list[tuple[Run, int]]]
"""Document → the runs of it that a place has, each with where it begins in memory."""


def _by_document(runs: Sequence[Run]) -> _Places:
    found: _Places = {}
    place = 0
    for run in runs:
        found.setdefault(run.document, []).append((run, place))
        place += len(run)
    return found


def _tiles(queries: _Places, keys: _Places, rows: tuple[int, int], window: int | None) -> Iterator[Tile]:
    """Of all pairs of runs of one document, the part of the keys that any query sees."""
    for document, query_runs in queries.items():
        for query, query_place in query_runs:
            for key, key_place in keys.get(document, ()):
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


def _counted_from_first(tiles: tuple[Tile, ...]) -> tuple[slice, tuple[Tile, ...]]:
    """The queries that any of the tiles holds, and the tiles counted from there: no pass over the others' output."""
    first = min((tile.queries[0] for tile in tiles), default=0)
    last = max((tile.queries[1] for tile in tiles), default=0)
    moved = (replace(tile, queries=(tile.queries[0] - first, tile.queries[1] - first)) for tile in tiles)
    return slice(first, last), tuple(moved)


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
