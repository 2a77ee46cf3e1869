"""Keyed permutations of [0, n), computed index by index and never stored.

The order in which a dataset is read is `KeyedPermutation(n, derive_key(...))`. Two ranks, or a run and its
resumption, agree on it because they compute the same function, not because they share state.
"""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
# An even number: half of the rounds move the row, half the column. Four are the least that mix both ways
# twice; the margin costs microseconds and makes the smallest domains (n = 3, 4, 5) uniform over keys too.
ROUNDS = 12
LARGEST_SIZE = 2**62


def mix64(words: Words) -> Words:
    """splitmix64's finaliser, a bijection of 64-bit words (Steele, Lea and Flood 2014, "Fast splittable
    PRNGs", fig. 15).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream64(key: int, counters: Words) -> Words:
    """Random words at the given counters of the splitmix64 stream that starts at `key`: mix64(key + (counter
    + 1)·γ).
    """
    return mix64(np.uint64(key) + (counters + np.uint64(1)) * np.uint64(GOLDEN_GAMMA))


def derive_key(*parts: str | int) -> int:
    """A 64-bit key for what it is used for: BLAKE2b-64 of the parts as a JSON list, so that ("a", "bc") is
    not ("ab", "c").
    """
    text = json.dumps(list(parts), ensure_ascii=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode("ascii"), digest_size=8, person=b"ultrascale.data").digest()
    return int.from_bytes(digest, "little")


class KeyedPermutation:
    """A permutation of [0, size) chosen by a 64-bit key.

    A generalised Feistel network on rows × columns ≥ size with modular addition, and cycle walking for the
    few values that fall outside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", §§ 3 and
    5). As rows and columns are ⌈√size⌉ and as few as needed, fewer than √size values lie outside: a walk is
    rare.

    Raises ValueError for a size outside [1, 2^62].
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= LARGEST_SIZE:
            raise ValueError(f"a permutation needs a size in [1, 2^62], not {size}")
        self.size = size
        self.key = key
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._round_keys = stream64(key, np.arange(ROUNDS, dtype=np.uint64))

    def __call__(self, indices: Ints) -> Ints:
        """Images of `indices` [n], each in [0, size); a fresh array. Raises IndexError for an index outside
        [0, size).
        """
        if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < self.size):
            raise IndexError(f"indices {indices.min()}…{indices.max()} are not all in [0, {self.size})")
        values = self._network(indices.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: Words) -> Words:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = values // columns, values % columns
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                row = (row + mix64(column ^ round_key) % rows) % rows
            else:
                column = (column + mix64(row ^ round_key) % columns) % columns
        return row * columns + column
