"""Which dataset each sample of a blend comes from, at any sample number, without replaying the ones before.

Weights become whole numbers q_i with sum Q; the blend repeats after Q samples, and within that period the
datasets are laid out so that after any n samples each has been drawn n·q_i/Q times, give or take less than
one. Whole periods add exactly q_i each, so the rule holds for every n from the table of one period.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.errors import DataError

Ints = NDArray[np.int64]

LONGEST_PERIOD = 1 << 16


def quantise(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of `weights`, with the smallest sum that is exact.

    Weights are taken as the decimals they print as (0.1 is one tenth). Where the exact sum would be above
    65536, they are rounded by largest remainders to that sum. Raises DataError for weights that are not
    positive and finite, or are lost in the rounding.
    """
    if not weights:
        raise DataError("a blend needs at least one dataset")
    for weight in weights:
        if isinstance(weight, bool) or not math.isfinite(weight) or weight <= 0:
            raise DataError(f"weight {weight} of a dataset is not a positive number; leave out what is not to be drawn")
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    floors = [math.floor(share * LONGEST_PERIOD) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (floors[i] - shares[i] * LONGEST_PERIOD, i))
    for i in by_remainder[: LONGEST_PERIOD - sum(floors)]:
        floors[i] += 1
    for weight, quantised in zip(weights, floors):
        if quantised == 0:
            raise DataError(
                f"weight {weight} is under one in {LONGEST_PERIOD} of the blend's sum {float(sum(exact)):g}; "
                "raise it, or leave the dataset out"
            )
    common = math.gcd(*floors)
    return tuple(value // common for value in floors)


class Blend:
    """The endless sequence of draws from datasets 0 … m−1 with the given whole weights.

    `draw(k)` says which dataset sample k comes from and how many samples were drawn from it before: O(1) from
    a table of one period (6 bytes a slot, at most 65536 slots).
    """

    def __init__(self, quantised: Sequence[int]) -> None:
        self.quantised = tuple(quantised)
        self.period = sum(self.quantised)
        order = _one_period(self.quantised)
        self._dataset = np.array(order, np.int32)
        self._before = np.empty(self.period, np.int32)
        for number in range(len(self.quantised)):
            slots = np.flatnonzero(self._dataset == number)
            self._before[slots] = np.arange(len(slots))

    def draw(self, numbers: Ints) -> tuple[Ints, Ints]:
        """(dataset [n], draws of that dataset before it [n]) of sample numbers [n], from 0."""
        periods, slots = np.divmod(numbers, self.period)
        datasets = self._dataset[slots].astype(np.int64)
        weights = np.array(self.quantised, np.int64)
        return datasets, periods * weights[datasets] + self._before[slots]

    def drawn(self, samples: int) -> tuple[int, ...]:
        """How many of the first `samples` samples come from each dataset."""
        periods, rest = divmod(samples, self.period)
        partial = np.bincount(self._dataset[:rest], minlength=len(self.quantised))
        return tuple(periods * weight + int(extra) for weight, extra in zip(self.quantised, partial))


def _one_period(weights: tuple[int, ...]) -> list[int]:
    """Dataset of each slot of one period, each count within 1 − 1/(2m − 2) of its share on every prefix.

    Tijdeman 1980, "The chairman assignment problem" (Discrete Mathematics 32): draw j (from 1) of dataset i
    may be made from the first slot at which its count would not be that far ahead, and must be made before it is
    that far behind. Taking the earliest deadline among those that may be made meets all of them. The greedy
    choice of the largest deficit can stray by more than one.
    """
    if len(weights) == 1:
        return [0] * weights[0]
    period, slack = sum(weights), 2 * len(weights) - 2
    waiting: list[tuple[int, int, int]] = []  # (first slot, dataset, draw)
    ready: list[tuple[int, int, int]] = []  # (last slot, dataset, draw)

    def first_slot(dataset: int, draw: int) -> int:
        return -(-period * (slack * (draw - 1) + 1) // (slack * weights[dataset]))

    def last_slot(dataset: int, draw: int) -> int:
        return period * (slack * draw - 1) // (slack * weights[dataset]) + 1

    for dataset in range(len(weights)):
        heapq.heappush(waiting, (first_slot(dataset, 1), dataset, 1))
    order: list[int] = []
    for slot in range(1, period + 1):
        while waiting and waiting[0][0] <= slot:
            _, dataset, draw = heapq.heappop(waiting)
            heapq.heappush(ready, (last_slot(dataset, draw), dataset, draw))
        _, dataset, draw = heapq.heappop(ready)
        order.append(dataset)
        if draw < weights[dataset]:
            heapq.heappush(waiting, (first_slot(dataset, draw + 1), dataset, draw + 1))
    return order
