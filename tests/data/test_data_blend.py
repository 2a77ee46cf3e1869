"""Blends: within one of the share on every prefix, at any sample number, whatever the length of the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.blend import LONGEST_PERIOD, Blend, quantise
from ultrascale.data.errors import DataError


@given(st.lists(st.integers(1, 60), min_size=1, max_size=14))
@settings(max_examples=120, deadline=None)
def test_every_prefix_is_within_one_of_the_weights(weights: list[int]) -> None:
    blend = Blend(weights)
    length = 2 * blend.period + 3
    datasets, before = blend.draw(np.arange(length, dtype=np.int64))
    for dataset, weight in enumerate(weights):
        counts = np.cumsum(datasets == dataset)
        # In integers: |count − n·w/Q| < 1, strictly; Tijdeman's bound is 1 − 1/(2m − 2).
        excess = np.abs(counts * blend.period - np.arange(1, length + 1) * weight)
        assert excess.max() < blend.period
        assert before[datasets == dataset].tolist() == list(range(int(counts[-1])))


def test_every_prefix_is_within_one_where_the_largest_deficit_strays() -> None:
    weights = [1] * 60 + [60] * 3 + [400]  # the greedy choice strays by 1.375 here
    datasets, _ = Blend(weights).draw(np.arange(640, dtype=np.int64))
    for dataset, weight in enumerate(weights):
        excess = np.abs(np.cumsum(datasets == dataset) * 640 - np.arange(1, 641) * weight)
        assert excess.max() < 640


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 10**15))
@settings(max_examples=60, deadline=None)
def test_a_far_sample_is_known_without_the_ones_before(weights: list[int], start: int) -> None:
    blend = Blend(weights)
    datasets, before = blend.draw(np.arange(start, start + 50, dtype=np.int64))
    drawn = blend.drawn(start)
    assert sum(drawn) == start
    for dataset in range(len(weights)):
        mine = before[datasets == dataset]
        assert mine.tolist() == list(range(drawn[dataset], drawn[dataset] + len(mine)))


def test_draws_past_two_to_the_40_are_exact() -> None:
    blend = Blend([7, 3])
    datasets, before = blend.draw(np.array([10 * 2**40], np.int64))
    assert before[0] == (7, 3)[datasets[0]] * 2**40


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], (1,)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([30, 70], (3, 7)),
        ([0.1, 0.1, 0.1], (1, 1, 1)),
        ([1e-3, 0.999], (1, 999)),
        ([2, 0.5], (4, 1)),
    ],
)
def test_weights_that_are_fractions_stay_exact(weights: list[float], expected: tuple[int, ...]) -> None:
    assert quantise(weights) == expected


@given(st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_other_weights_are_off_by_less_than_one_in_65536(weights: list[float]) -> None:
    try:
        quantised = quantise(weights)
    except DataError:
        assert min(weights) / sum(weights) < 1 / LONGEST_PERIOD
        return
    assert sum(quantised) <= LONGEST_PERIOD
    for weight, number in zip(weights, quantised):
        assert abs(weight / sum(weights) - number / sum(quantised)) < 1 / LONGEST_PERIOD


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), True])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(DataError, match="not a positive number"):
        quantise([1.0, weight])


def test_a_weight_lost_in_rounding_is_refused_by_value() -> None:
    with pytest.raises(DataError, match="1e-07 is under one in 65536"):
        quantise([1.0, 1e-7])
