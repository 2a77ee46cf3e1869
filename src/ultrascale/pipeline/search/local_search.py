"""Local search for a shorter makespan: moves of one operation within its rank, guided by the critical path.

Tabu search on the job shop (Nowicki & Smutnicki 1996): only a change inside a run of critical operations of one rank
can shorten the makespan, so only those are looked at; the makespan after a move is estimated from the chains before
and behind each operation (Taillard 1994), and the best move is made even when it is no gain, unless it undoes a
recent one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from ultrascale.pipeline.search.operations import FORWARD, INPUT, NOTHING, WEIGHT, Operations, Orders

_TENURE = 7
"""Moves for which a pair of operations stays as it was put, at least."""


@dataclass(frozen=True)
class Move:
    """Operation at `source` of a rank's list to `target`, those between them one place over."""

    rank: int
    source: int
    target: int


class LocalSearch:
    """Improves orders step by step; `best` never gets worse, and no rank ever holds more than its limit.

    limits  activations that each rank may hold
    across  where an operation waits both for its rank and for a result, the critical path goes to the latter
    Deterministic: no clock and no random numbers.
    """

    def __init__(self, operations: Operations, orders: Orders, limits: list[int], across: bool = False) -> None:
        self.operations, self.limits, self.across = operations, limits, across
        self.size = operations.stages * operations.micro_batches
        self._go_to(orders)
        self.best, self.best_makespan = [list(row) for row in self.orders], self.times.makespan
        self.forbidden: dict[tuple[int, int], int] = {}  # (operation, operation): not again in this order
        self.step = 0

    def _go_to(self, orders: Orders) -> None:
        times = self.operations.times(orders)
        assert times is not None
        self.orders, self.times = [list(row) for row in orders], times

    def run(self, steps: int, goal: float) -> None:
        """At most `steps` moves; ends early at a makespan of `goal`, or where no move is left."""
        for _ in range(steps):
            if self.best_makespan <= goal * (1 + 1e-12):
                return
            if not self._move():
                return
            if self.times.makespan < self.best_makespan * (1 - 1e-12):
                self.best, self.best_makespan = [list(row) for row in self.orders], self.times.makespan

    def _move(self) -> bool:
        self.step += 1
        self.held: dict[int, list[int]] = {}
        self.tails = self.operations.tails(self.orders, self.times)
        candidates: list[tuple[float, int, int, Move, list[int], list[tuple[int, int]]]] = []
        for move in self._candidates():
            segment = self._segment(move)
            if segment is None:
                continue
            estimate = self._estimate(move, segment)
            pairs = self._pairs(move)
            tabu = any(self.forbidden.get(pair, 0) >= self.step for pair in pairs)
            if tabu and estimate >= self.best_makespan * (1 - 1e-12):
                continue
            candidates.append((estimate, self._age(pairs), len(candidates), move, segment, pairs))
        candidates.sort(key=lambda candidate: candidate[:3])
        for _, _, _, move, segment, pairs in candidates[:8]:
            row = self.orders[move.rank]
            low = min(move.source, move.target)
            before = row[low : low + len(segment)]
            row[low : low + len(segment)] = segment
            times = self.operations.times(self.orders)
            if times is None:
                row[low : low + len(segment)] = before
                continue
            self.times = times
            for first, second in pairs:
                self.forbidden[second, first] = self.step + _TENURE + self.step % 5
            return True
        return False

    def _age(self, pairs: list[tuple[int, int]]) -> int:
        return max((self.forbidden.get(pair[::-1], 0) for pair in pairs), default=0)

    def _pairs(self, move: Move) -> list[tuple[int, int]]:
        """(a, b): the move puts a before b, which stood after it."""
        row = self.orders[move.rank]
        moved = row[move.source]
        if move.source < move.target:
            return [(other, moved) for other in row[move.source + 1 : move.target + 1]]
        return [(moved, other) for other in row[move.target : move.source]]

    def _candidates(self) -> Iterator[Move]:
        for rank, first, last in self._critical_blocks():
            row = self.orders[rank]
            for index in range(first, last):
                yield Move(rank, index, index + 1)
            for index in range(first, last + 1):
                if index + 1 < last:
                    yield Move(rank, index, last)
                if index - 1 > first:
                    yield Move(rank, index, first)
                if row[index] // self.size == WEIGHT:
                    yield from self._to_gaps(rank, index, first, last)

    def _to_gaps(self, rank: int, index: int, first: int, last: int) -> Iterator[Move]:
        """A weight gradient out of its run of critical operations, to where the rank stands."""
        row, ends, duration = self.orders[rank], self.times.ends, self.operations.duration
        found = 0
        for place in range(last + 1, min(last + 40, len(row))):
            if ends[row[place]] - duration[row[place]] > ends[row[place - 1]] + 1e-12:
                yield Move(rank, index, place - 1)
                found += 1
                if found == 3:
                    break
        else:
            if len(row) - 1 > last:
                yield Move(rank, index, len(row) - 1)
        found = 0
        for place in range(first, max(first - 40, 0), -1):
            if ends[row[place]] - duration[row[place]] > ends[row[place - 1]] + 1e-12:
                yield Move(rank, index, place)
                found += 1
                if found == 3:
                    break

    def _critical_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(rank, first index, last index) along one longest chain, from its end to its start."""
        operations, ends, duration = self.operations, self.times.ends, self.operations.duration
        rank = max(range(operations.ranks), key=lambda r: ends[self.orders[r][-1]] if self.orders[r] else -1)
        index = last = len(self.orders[rank]) - 1
        while True:
            operation = self.orders[rank][index]
            start = ends[operation] - duration[operation]
            need = operations.needs[operation]
            waits = need != NOTHING and operation // self.size != WEIGHT
            if self.across and waits:
                waits = ends[need] + operations.lag[operation] >= start - 1e-9
            if index > 0 and ends[self.orders[rank][index - 1]] >= start - 1e-9 and not (self.across and waits):
                index -= 1
                continue
            if last > index:
                yield rank, index, last
            if not waits:
                return
            rank = operations.rank[operations.parts(need)[1]]
            index = last = self.orders[rank].index(need)

    def _segment(self, move: Move) -> list[int] | None:
        """The operations between source and target after the move; None when it may not be made."""
        row, size = self.orders[move.rank], self.size
        low, high = sorted((move.source, move.target))
        segment = row[low : high + 1]
        moved = row[move.source]
        others = segment[1:] if move.source == low else segment[:-1]
        line, needs = moved // self.operations.micro_batches, self.operations.needs
        need = needs[moved]
        for other in others:
            if other // self.operations.micro_batches == line or need == other or needs[other] == moved:
                return None
        after = [*others, moved] if move.source == low else [moved, *others]
        releasing = WEIGHT if self.operations.split else INPUT
        if moved // size in (FORWARD, releasing):
            held = self._held_before(move.rank, low)
            for operation in after:
                held += operation // size == FORWARD
                if held > self.limits[move.rank]:
                    return None
                held -= operation // size == releasing
        return after

    def _held_before(self, rank: int, index: int) -> int:
        if rank not in self.held:
            releasing = WEIGHT if self.operations.split else INPUT
            kinds = (operation // self.size for operation in self.orders[rank])
            changes = ((kind == FORWARD) - (kind == releasing) for kind in kinds)
            self.held[rank] = list(accumulate(changes, initial=0))
        return self.held[rank][index]

    def _estimate(self, move: Move, segment: list[int]) -> float:
        """The longest chain through the moved operations, were the others to start as early as before."""
        operations, row = self.operations, self.orders[move.rank]
        duration, needs, lag, feeds = operations.duration, operations.needs, operations.lag, operations.feeds
        ends, tails = self.times.ends, self.tails
        low, high = sorted((move.source, move.target))
        now = ends[row[low - 1]] if low else 0
        through = []
        for operation in segment:
            need = needs[operation]
            if need >= 0 and operation // self.size != WEIGHT:
                arrival = ends[need] + lag[operation]
                if arrival > now:
                    now = arrival
            now += duration[operation]
            through.append(now)
        behind = tails[row[high + 1]] + duration[row[high + 1]] if high + 1 < len(row) else 0
        longest = 0.0
        for operation, end in zip(reversed(segment), reversed(through), strict=True):
            fed = feeds[operation]
            if fed >= 0:
                chain = tails[fed] + duration[fed] + lag[fed]
                if chain > behind:
                    behind = chain
            if end + behind > longest:
                longest = end + behind
            behind += duration[operation]
        return longest
