"""The order of samples: a permutation, computed, that looks shuffled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.permutation import KeyedPermutation, derive_key, mix64, stream64


def permuted(size: int, key: int) -> np.ndarray:
    return KeyedPermutation(size, key)(np.arange(size, dtype=np.int64))


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_every_key_gives_a_permutation_of_every_size(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permuted(size, key)), np.arange(size))


@given(st.integers(2**31, 2**62), st.integers(0, 2**64 - 1), st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_sizes_past_32_bits_stay_in_range_and_collide_never(size: int, key: int, start: int) -> None:
    start = min(start, size - 1000)
    window = KeyedPermutation(size, key)(np.arange(start, start + 1000, dtype=np.int64))
    assert window.min() >= 0
    assert window.max() < size
    assert len(np.unique(window)) == 1000


def test_three_thousand_million_samples_cost_nothing_to_shuffle() -> None:
    permutation = KeyedPermutation(3_000_000_000, 5)
    images = permutation(np.array([0, 2**31, 2_999_999_999], np.int64))
    assert len(set(images.tolist())) == 3
    assert permutation(np.array([2**31], np.int64))[0] == images[1]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_over_keys_each_order_of_a_small_set_is_as_likely(size: int) -> None:
    counts = dict.fromkeys(itertools.permutations(range(size)), 0)
    share = 30
    trials = share * len(counts)
    for key in range(trials):
        counts[tuple(permuted(size, derive_key("uniform", key)).tolist())] += 1
    chi_squared = sum((count - share) ** 2 / share for count in counts.values())
    freedom = len(counts) - 1
    # Five standard deviations of a chi-squared: a fair shuffle fails once in some million runs, and keys are
    # fixed.
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5 + 10


def test_a_shuffle_has_the_statistics_of_a_random_one() -> None:
    size = 50_000
    order = permuted(size, derive_key("looks", 1)).astype(np.float64)
    index = np.arange(size)
    # Each of these is a sum of many terms with a known spread under a uniform permutation; 5 σ bounds.
    sigma = 1 / np.sqrt(size)
    assert abs(np.corrcoef(order, index)[0, 1]) < 5 * sigma
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 * sigma
    assert abs((np.diff(order) > 0).mean() - 0.5) < 5 * np.sqrt(1 / 12 / size)
    assert (order == index).sum() < 12  # Poisson with mean 1
    assert (np.diff(order) == 1).sum() < 12
    cells = np.histogram2d(index, order, bins=16)[0]
    expected = size / 256
    assert ((cells - expected) ** 2 / expected).sum() < 225 + 5 * np.sqrt(2 * 225)


def test_neighbouring_keys_give_unrelated_orders() -> None:
    first, second = permuted(20_000, 1), permuted(20_000, 2)
    assert (first == second).sum() < 12
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(20_000)


def test_the_order_is_the_same_today_as_when_this_was_written() -> None:
    """A resumed run depends on it. Values from an implementation in Python integers, below."""
    size, key = 1000, derive_key("sample order", 1, "abc", 0)
    mask = 2**64 - 1

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    keys = [mix((key + (i + 1) * 0x9E3779B97F4A7C15) & mask) for i in range(12)]

    def network(value: int) -> int:
        row, column = divmod(value, 32)  # 32 rows of 32 columns: ⌈√1000⌉ = 32, ⌈1000/32⌉ = 32
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                row = (row + mix(column ^ round_key) % 32) % 32
            else:
                column = (column + mix(row ^ round_key) % 32) % 32
        return row * 32 + column

    def image(value: int) -> int:
        value = network(value)
        while value >= size:
            value = network(value)
        return value

    assert permuted(size, key).tolist() == [image(i) for i in range(size)]
    assert permuted(size, key)[:5].tolist() == GOLDEN


GOLDEN = [122, 440, 914, 777, 32]


def test_splitmix64_is_the_published_one() -> None:
    # First outputs of splitmix64 seeded with 1234567 (the reference C code's well-known test vector).
    assert stream64(1234567, np.arange(2, dtype=np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
    ]
    assert mix64(np.array([0], np.uint64)).tolist() == [0]


def test_keys_tell_their_parts_apart() -> None:
    keys = [
        derive_key("a", "bc"),
        derive_key("ab", "c"),
        derive_key("a", 1),
        derive_key("a", "1"),
        derive_key("a", -1),
    ]
    assert len(set(keys)) == 5


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        KeyedPermutation(10, 1)(np.array([10]))
    with pytest.raises(IndexError):
        KeyedPermutation(10, 1)(np.array([-1]))
    with pytest.raises(ValueError):
        KeyedPermutation(0, 1)
