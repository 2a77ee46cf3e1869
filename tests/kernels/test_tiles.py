"""Tiles hold the pairs that they say, whichever way they are cut for a kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_cases import CPU, Case, cases, kernel_mask, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.kernels.attention import visible
from ultrascale.kernels.rounds import CAUSAL, FULL, aligned, rounds
from ultrascale.kernels.tiles import LARGEST_PIECE, Tile
from ultrascale.parallel.context.plan import gathered_plan, ring_plan
from ultrascale.parallel.context.split import Cut

many = settings(max_examples=300, deadline=None)


def seen(parts: list[Tile], whole: Tile) -> torch.Tensor:
    """int [queries, keys] of a tile: how many of the parts hold each pair."""
    counts = torch.zeros(whole.shape, dtype=torch.int)
    for part in parts:
        assert part.rows == whole.rows
        queries, keys = (
            slice(of[0] - first, of[1] - first)
            for of, first in ((part.queries, whole.queries[0]), (part.keys, whole.keys[0]))
        )
        assert min(queries.start, keys.start) >= 0
        counts[queries, keys] += visible(part, CPU)
    return counts


@many
@given(tiles(rows=(1, 4)))
def test_pairs_are_counted(tile: Tile) -> None:
    assert tile.pairs == 3 * int(visible(tile, CPU).sum())
    assert tile.full == bool(visible(tile, CPU).all())


@many
@given(tiles())
def test_queries_without_keys_are_those_outside_of_its_bounds(tile: Tile) -> None:
    first, last = tile.without_keys()
    sees = visible(tile, CPU).any(1)
    assert sees[first:last].all()
    assert not sees[:first].any()
    assert not sees[last:].any()


@many
@given(tiles(most=40))
def test_simple_tiles_hold_each_pair_once_and_are_of_three_kinds(tile: Tile) -> None:
    parts = list(tile.simple())
    assert torch.equal(seen(parts, tile), visible(tile, CPU).int())
    for part in parts:
        assert part.full or (part.offset == 0 and not part.windowed) or part.shape[0] <= LARGEST_PIECE


@many
@given(tiles())
def test_aligned_tiles_hold_each_pair_once_and_each_of_their_queries_sees_a_key(tile: Tile) -> None:
    parts = [part for _, part in aligned(tile)]
    assert torch.equal(seen(parts, tile), visible(tile, CPU).int())
    assert all(visible(part, CPU).any(1).all() and visible(part, CPU).any(0).all() for part in parts)


@many
@given(tiles())
def test_the_mask_of_an_aligned_tile_is_what_the_kernel_makes_of_it(tile: Tile) -> None:
    """Whatever longer sequences share the call: bounds that reach past the longest are none to the kernel."""
    for mask, part in aligned(tile):
        queries, keys = part.shape
        for most_keys in (keys, keys + 1, 2 * keys + queries):
            assert torch.equal(kernel_mask(queries, keys, *mask, most_keys), visible(part, CPU)), (mask, most_keys)


@many
@given(cases())
def test_rounds_hold_each_pair_once_and_in_each_round_each_query_and_key_once(case: Case) -> None:
    pairs = torch.zeros(case.rows, case.queries, case.keys, dtype=torch.int)
    for one in rounds(case.tiles):
        queries = torch.zeros(case.rows, case.queries, dtype=torch.int)
        keys = torch.zeros(case.rows, case.keys, dtype=torch.int)
        for tile in one.tiles:
            rows = slice(*tile.rows)
            queries[rows, slice(*tile.queries)] += 1
            keys[rows, slice(*tile.keys)] += 1
            pairs[rows, slice(*tile.queries), slice(*tile.keys)] += visible(tile, CPU)
        assert max(int(queries.max()), int(keys.max())) <= 1
    assert torch.equal(pairs, case.mask().int())


DOCUMENTS = (0, 5, 6, 13, 20, 32)


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_all_documents_of_a_batch_are_one_round(window: int | None) -> None:
    of_rows = [DOCUMENTS, (0, 32), (0, 1, 32)]
    found = [
        Tile((row, row + 1), place, place, 0, window)
        for row, starts in enumerate(of_rows)
        for place in pairwise(starts)
    ]
    assert [one.mask for one in rounds(found)] == [CAUSAL if window is None else (window - 1, 0)]


def test_a_window_over_a_chunk_before_is_one_triangle() -> None:
    """Queries of the next 16 tokens: of a window of 6, the first five see five keys and fewer and fewer."""
    (one,) = rounds([Tile((0, 2), (0, 16), (0, 16), 16, 6)])
    assert one == ((0, -1), (Tile((0, 2), (0, 5), (11, 16), 5, 6),))


def test_a_zigzag_rank_of_one_document_takes_two_rounds() -> None:
    """Its early chunk against itself beside its late one, and the late chunk against all of the early one."""
    early, late = (0, 8), (8, 16)
    found = [
        Tile((0, 2), early, early, 0, None),
        Tile((0, 2), late, early, 24, None),
        Tile((0, 2), late, late, 0, None),
    ]
    made = rounds(found)
    assert [(one.mask, len(one.tiles)) for one in made] == [(CAUSAL, 2), (FULL, 1)]


@settings(max_examples=100, deadline=None)
@given(
    starts=st.lists(st.sets(st.integers(1, 95), max_size=12), min_size=1, max_size=3),
    ring=st.integers(1, 4),
    kind=st.sampled_from(["zigzag", "contiguous"]),
    data=st.data(),
)
def test_a_step_of_the_ring_is_at_most_three_calls_whatever_the_documents(
    starts: list[set[int]], ring: int, kind: str, data: st.DataObject
) -> None:
    """Of a document a place has an early run, a late one, and tokens of its head that did not divide."""
    rows = tuple((0, *sorted(of_row)) for of_row in starts)
    cut, place = Cut(ring=ring, kind=kind), data.draw(st.integers(0, ring - 1))
    steps = ring_plan(96, rows, cut, place, None).tiles
    assert all(len(rounds(tiles)) <= 3 for tiles in (*steps, gathered_plan(96, rows, cut, place, None)))
