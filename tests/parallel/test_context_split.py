"""How cp cuts sequences, and what each rank then computes: every pair once, equal work, nothing sent for nobody."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.kernels.tiles import Tile
from ultrascale.parallel.context.plan import gathered_plan, ring_plan
from ultrascale.parallel.context.split import (
    CONTIGUOUS,
    ZIGZAG,
    Cut,
    Documents,
    order,
    own_places,
    rank_runs,
    ring_runs,
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, Documents, Cut]:
    """(length, documents, cut) that fit."""
    cut = Cut(
        ring=draw(st.sampled_from([1, 2, 3, 4])),
        ulysses=draw(st.sampled_from([1, 2, 3])),
        kind=draw(st.sampled_from([ZIGZAG, CONTIGUOUS])),
        window=draw(st.sampled_from([None, 1, 3, 20])),
    )
    length = cut.multiple * draw(st.integers(1, 6))
    starts = draw(st.sets(st.integers(1, length - 1), max_size=6)) if length > 1 else set()
    return length, (0, *sorted(starts)), cut


def mask(length: int, documents: Documents, window: int | None) -> np.ndarray:
    """bool [query, key], by its definition."""
    places = np.arange(length)
    document = np.searchsorted(np.array(documents), places, side="right")
    distance = places[:, None] - places[None, :]
    seen = (distance >= 0) & (document[:, None] == document[None, :])
    return seen if window is None else seen & (distance < window)


def computed(tile: Tile) -> np.ndarray:
    """bool [queries, keys] of one tile."""
    distance = tile.offset + np.arange(tile.shape[0])[:, None] - np.arange(tile.shape[1])
    return (distance >= 0) & (distance < (tile.window or 10**9))


@given(cuts())
def test_every_token_is_on_one_rank_and_all_ranks_hold_equally_many(case: tuple[int, Documents, Cut]) -> None:
    length, documents, cut = case
    held = [order(runs) for runs in rank_runs(length, documents, cut)]
    assert len(held) == cut.size
    assert {len(tokens) for tokens in held} == {length // cut.size}
    assert sorted(np.concatenate(held)) == list(range(length))


@given(cuts())
def test_a_run_lies_within_one_document(case: tuple[int, Documents, Cut]) -> None:
    length, documents, cut = case
    bounds = [*documents, length]
    for runs in rank_runs(length, documents, cut):
        for run in runs:
            assert run.document in documents
            assert run.document <= run.start < run.stop <= bounds[bounds.index(run.document) + 1]


@given(cuts(), st.sampled_from([None, 1, 2, 5, 40]))
@settings(deadline=None)
def test_ring_steps_compute_every_visible_pair_once_and_no_other(
    case: tuple[int, Documents, Cut], window: int | None
) -> None:
    length, documents, cut = case
    rows = ((0,), documents, documents)
    held = [[order(runs) for runs in ring_runs(length, row, cut)] for row in rows]
    times = np.zeros((3, length, length), dtype=int)
    for place in range(cut.ring):
        plan = ring_plan(length, rows, cut, place, window)
        for step, (span, tiles) in enumerate(zip(plan.queries, plan.tiles, strict=True)):
            for tile in tiles:
                for row in range(*tile.rows):
                    queries, keys = held[row][place][span], held[row][(place - step) % cut.ring]
                    times[row][np.ix_(queries[slice(*tile.queries)], keys[slice(*tile.keys)])] += computed(tile)
            assert plan.pairs[step] == sum(int(computed(t).sum()) * (t.rows[1] - t.rows[0]) for t in tiles)
    expected = np.stack([mask(length, row, window) for row in rows])
    assert np.array_equal(times, expected.astype(int))


@given(cuts(), st.sampled_from([None, 1, 2, 5, 40]))
@settings(deadline=None)
def test_gathered_keys_are_seen_once(case: tuple[int, Documents, Cut], window: int | None) -> None:
    length, documents, cut = case
    times = np.zeros((length, length), dtype=int)
    for place, runs in enumerate(ring_runs(length, documents, cut)):
        for tile in gathered_plan(length, (documents,), cut, place, window):
            times[np.ix_(order(runs)[slice(*tile.queries)], np.arange(*tile.keys))] += computed(tile)
    assert np.array_equal(times, mask(length, documents, window).astype(int))


@given(cuts(), st.sampled_from([None, 1, 3]))
@settings(deadline=None)
def test_a_block_travels_exactly_as_far_as_it_is_needed(case: tuple[int, Documents, Cut], window: int | None) -> None:
    length, documents, cut = case
    plans = [ring_plan(length, (documents,), cut, place, window) for place in range(cut.ring)]
    for source in range(cut.ring):
        needed = [step for step in range(1, cut.ring) if plans[(source + step) % cut.ring].tiles[step]]
        assert plans[0].reach[source] == max(needed, default=0)
        assert all(plan.reach == plans[0].reach for plan in plans)


def test_a_window_over_neighbours_sends_blocks_one_place_on() -> None:
    cut = Cut(8, 1, CONTIGUOUS)
    assert ring_plan(8 * 64, 1, cut, 0, 32).reach == (1,) * 7 + (0,)
    assert ring_plan(8 * 64, 1, cut, 0, None).reach == (7, 6, 5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("ring", [2, 4, 8, 16])
def test_zigzag_gives_every_rank_the_same_work_in_every_step(ring: int) -> None:
    length = 4096
    plans = [ring_plan(length, 1, Cut(ring, 1, ZIGZAG), place, None) for place in range(ring)]
    for step in range(ring):
        work = [plan.pairs[step] for plan in plans]
        assert max(work) < 1.01 * min(work)
    contiguous = [sum(ring_plan(length, 1, Cut(ring, 1, CONTIGUOUS), place, None).pairs) for place in range(ring)]
    assert max(contiguous) / min(contiguous) == pytest.approx(2 * ring - 1, rel=0.05)


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 512])
def test_documents_of_any_lengths_leave_the_ranks_within_a_tenth(ring: int, window: int | None) -> None:
    """Lengths of web text: log-normal, some longer than half the sequence; without their own zigzag it would be 2."""
    draws = random.Random(ring)
    length, worst, unaware = 8192, 0.0, 0.0
    for _ in range(20):
        starts, at = [0], 0
        while (at := at + max(1, int(draws.lognormvariate(6.5, 1.3)))) < length:
            starts.append(at)
        rows = (tuple(starts),)
        work = [
            sum(ring_plan(length, rows, Cut(ring, 1, ZIGZAG, window), place, window).pairs) for place in range(ring)
        ]
        worst = max(worst, max(work) / (sum(work) / ring))
        seen = np.array([min(t - starts[i], (window or length) - 1) + 1 for t, i in _document_of(starts, length)])
        chunks = seen.reshape(2 * ring, -1).sum(1)
        plain = [chunks[place] + chunks[2 * ring - 1 - place] for place in range(ring)]
        unaware = max(unaware, max(plain) / (sum(plain) / ring))
    assert worst < 1.1 < unaware
    if window is None:
        assert unaware == pytest.approx({2: 1.5, 4: 2.0, 8: 2.5}[ring], abs=0.05)  # as the docs say


def _document_of(starts: list[int], length: int) -> list[tuple[int, int]]:
    bounds = [*starts, length]
    return [(t, i) for i, (start, stop) in enumerate(pairwise(bounds)) for t in range(start, stop)]


@given(cuts())
def test_tokens_of_all_ranks_are_the_sequence(case: tuple[int, Documents, Cut]) -> None:
    """What follows a token is cut by the same order: labels and positions stay with it, in every row its own way."""
    length, documents, cut = case
    x = np.arange(2 * length, dtype=np.int64).reshape(length, 2)
    rows = (documents, (0,))
    columns = np.arange(2)
    parts = [x[own_places(length, rows, cut, rank), columns] for rank in range(cut.size)]
    assert np.array_equal(np.sort(np.concatenate(parts), axis=0), x)
    for rank, part in enumerate(parts):
        for column, row in enumerate(rows):
            assert np.array_equal(part[:, column], x[order(rank_runs(length, row, cut)[rank]), column])
    whole = [x[own_places(length, None, cut, rank), columns] for rank in range(cut.size)]
    assert np.array_equal(np.sort(np.concatenate(whole), axis=0), x)
