"""The shortest of many orders: known schedules, greedy ones under many priorities, then local search.

The work is bounded by a number of visited operations, not by a clock, and the draws come from a fixed seed, so that
every rank of a job finds the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.search.building_block import Block, filled, repeated, shares, stretched
from ultrascale.pipeline.search.list_scheduling import Policy, list_schedule
from ultrascale.pipeline.search.local_search import LocalSearch
from ultrascale.pipeline.search.lower_bound import lower_bound
from ultrascale.pipeline.search.operations import INPUT, Operations, Orders, Times
from ultrascale.pipeline.search.shifting import shifted

_STRETCHES = (1.0, 1.0, 1.5, 2.0, 2.5, 3.0)
_TOLERANCES = (0.0, 0.0, 0.3, 0.5, 0.99)
_PATIENCES = (0.0, 0.0, 0.2, 0.5, 1.0)
_SEED = 20231130
_SEARCHED = ", then local search"
_STARTS = 3
_APART = 0.5
_WORTH_SHIFTING = 1.06


@dataclass(frozen=True)
class Candidate:
    """Orders and where they come from; `held` sums what the ranks hold at most, by both rules of release."""

    origin: str
    orders: Orders
    makespan: float
    span: float
    held: int

    @property
    def score(self) -> tuple[float, float, int]:
        """Shorter makespan first, then shorter span, then smaller; times that differ by rounding alone are equal."""
        return float(f"{float(self.makespan):.10g}"), float(f"{float(self.span):.10g}"), self.held


class Portfolio:
    """Candidates for one placement under one limit, best first.

    limits  activations (stage × micro-batch) that each rank may hold from F to the end of B or BW
    aheads  variants of how far each rank's forwards may be ahead of its input gradients; none: as `limits`
    budget  operations to visit
    spans   go on at the shortest possible makespan, for a shorter span
    """

    def __init__(
        self,
        operations: Operations,
        limits: Sequence[int],
        budget: int,
        aheads: Sequence[Sequence[int]] = (),
        spans: bool = False,
    ) -> None:
        self.operations, self.limits, self.left = operations, list(limits), budget
        self.aheads = [list(ahead) for ahead in aheads] or [self.limits]
        self.bound = lower_bound(operations)
        self.span_bound = max(operations.work()) if spans else inf
        self.candidates: list[Candidate] = []

    @property
    def best(self) -> Candidate:
        """The shortest so far. Raises IndexError before the first candidate."""
        return self.candidates[0]

    @property
    def finished(self) -> bool:
        """Whether nothing can be shorter, or the work is used up."""
        proven = (
            bool(self.candidates)
            and self.best.makespan <= self.bound * (1 + 1e-12)
            and self.best.span <= self.span_bound * (1 + 1e-12)
        )
        return proven or self.left < self.operations.count

    def offer(self, origin: str, orders: Orders) -> None:
        """Takes orders as a candidate, unless they stand still or hold more than the limit."""
        self.left -= self.operations.count
        times = self.operations.times(orders)
        peaks = self.operations.peaks(orders)
        if times is None or any(peak > limit for peak, limit in zip(peaks, self.limits, strict=True)):
            return
        self._keep(origin, orders)
        if times.makespan <= self.best.makespan * _WORTH_SHIFTING and not self.finished:
            self.left -= 4 * self.operations.count
            self._keep(origin, shifted(self.operations, orders, self.limits))

    def _keep(self, origin: str, orders: Orders) -> None:
        times = self.operations.times(orders)
        assert times is not None
        held = sum(self.operations.peaks(orders)) + sum(self.operations.peaks(orders, release=INPUT))
        candidate = Candidate(origin, orders, times.makespan, self._span(orders, times), held)
        if all(candidate.orders != known.orders for known in self.candidates):
            self.candidates.append(candidate)
        self.candidates.sort(key=lambda known: known.score)
        del self.candidates[_STARTS:]

    def _span(self, orders: Orders, times: Times) -> float:
        """The longest time from the first start to the last end of a rank."""
        ends, duration = times.ends, self.operations.duration
        return max((ends[row[-1]] - ends[row[0]] + duration[row[0]] for row in orders if row), default=0)

    def list_by(
        self, origin: str, keys: Sequence[float], policy: Policy, stage_limits: Sequence[int] | None = None
    ) -> None:
        """Offers the greedy orders of these priorities."""
        for ahead in self.aheads:
            self.left -= self.operations.count
            orders = list_schedule(self.operations, keys, self.limits, policy, ahead, stage_limits)
            if orders is not None:
                self.offer(origin, orders)

    def repeat(self, origin: str, block: Block) -> None:
        """Offers a building block, repeated: in its own order, and squeezed as far as the memory allows."""
        operations = self.operations
        keys, own = repeated(operations, block), shares(operations, block, self.limits)
        if self.finished and self.candidates:
            return
        if not operations.split or len(block.times) == 3 * operations.stages:
            orders: Orders = [[] for _ in range(operations.ranks)]
            for operation in sorted(range(operations.count), key=lambda operation: (keys[operation], operation)):
                orders[operations.rank[operations.parts(operation)[1]]].append(operation)
            self.offer(origin, orders)
        for variant in self._with_fill(keys):
            for policy in self._policies:
                if self.finished and self.candidates:
                    return
                self.list_by(f"{origin}, squeezed", variant, policy, own)

    def seed(self, plan: Plan) -> None:
        """Offers the order of a plan, and greedy ones that take its times under these costs as priorities."""
        orders = self.operations.orders_of(plan)
        self.offer(plan.name, orders)
        times = self.operations.times(orders)
        if times is None or self.finished:
            return
        keys = [end - length for end, length in zip(times.ends, self.operations.duration, strict=True)]
        self.list_by(f"{plan.name}, retimed", keys, Policy())
        if self.operations.split and not self.finished:
            self.list_by(f"{plan.name}, retimed and filled", filled(self.operations, keys), Policy())

    def retime(self) -> None:
        """Takes the times of the best candidate as priorities, as long as that makes it shorter.

        Early and late starts of one order differ by what it has to spare; both are good priorities.
        """
        operations = self.operations
        while not self.finished:
            before = self.best
            times = operations.times(before.orders)
            assert times is not None
            early = [end - length for end, length in zip(times.ends, operations.duration, strict=True)]
            tails = operations.tails(before.orders, times)
            late = [times.makespan - tail - length for tail, length in zip(tails, operations.duration, strict=True)]
            for keys in (early, late):
                for variant in self._with_fill(keys):
                    for policy in (Policy(strict=True), Policy(0.5, self._slot)):
                        if not self.finished:
                            self.list_by(before.origin, variant, policy)
            if self.best.score >= before.score:
                return

    def _with_fill(self, keys: list[float]) -> list[list[float]]:
        """The keys, and where backwards are split also the keys with weight gradients last."""
        return [keys, filled(self.operations, keys)] if self.operations.split else [keys]

    @property
    def _policies(self) -> tuple[Policy, ...]:
        """For keys that are times; without weight gradients there is nothing to tolerate, and strict is their order."""
        if not self.operations.split:
            return (Policy(0.0, self._slot),)
        return Policy(strict=True), Policy(0.5, strict=True), Policy(0.5), Policy(0.0, self._slot)

    @property
    def _slot(self) -> float:
        """A sixth of a period, which is the length of an operation when all of two stages a rank cost the same."""
        return float(max(self.operations.work())) / self.operations.micro_batches / 6

    def draw(self, number: int) -> None:
        """Offers greedy orders of up to `number` building blocks, drawn from a fixed seed; of one in any case, where
        there is no candidate yet."""
        random = Random(_SEED)
        period = max(self.operations.work()) / self.operations.micro_batches
        for _ in range(number):
            if self.finished and self.candidates:
                return
            forward, backward = self._stretches(random), self._stretches(random)
            policy = Policy(random.choice(_TOLERANCES), random.choice(_PATIENCES) * float(period) / 3)
            block, apart = stretched(self.operations, forward, backward), random.random() < _APART
            own = shares(self.operations, block, self.limits) if apart else None
            self.list_by("greedy list", repeated(self.operations, block), policy, own)

    def _stretches(self, random: Random) -> list[float]:
        """One stretch for each time that a micro-batch comes down or up the ranks."""
        passes = max(len(held) for held in self.operations.held)
        per_pass = [random.choice(_STRETCHES) for _ in range(passes)]
        return [per_pass[stage // self.operations.ranks] for stage in range(self.operations.stages)]

    def improve(self, steps: int, rounds: int) -> None:
        """Offers what local search makes of the best candidates, in turn along both kinds of critical path."""
        for number in range(rounds):
            for start in list(self.candidates):
                share = min(steps, self.left // self.operations.count)
                if self.finished or share < 1:
                    return
                search = LocalSearch(self.operations, start.orders, self.limits, across=number % 2 == 1)
                search.run(share, self.bound)
                self.left -= search.step * self.operations.count
                self.offer(f"{start.origin.removesuffix(_SEARCHED)}{_SEARCHED}", search.best)


def fusible(operations: Operations, orders: Orders, spans: bool = False) -> frozenset[int]:
    """Input gradients that can take their weight gradient, which follows at once, with them: the makespan stays.

    A whole B gives its input gradient only at its end. Where every operation starts as late as the makespan allows, the
    receiver of some still starts after that; all of those can be fused together, since that timetable stays right. The
    same holds for the timetable in which all start as early as they can; the one that fuses more is taken. To keep the
    `spans` too, it must be the latter.
    """
    times = operations.times(orders)
    assert times is not None
    tails = operations.tails(orders, times)
    early = times.ends
    late = [times.makespan - tail for tail in tails]
    slack = 1e-9 * times.makespan
    offset = operations.stages * operations.micro_batches
    found: list[list[int]] = [[], []]
    for row in orders:
        for operation, following in pairwise(row):
            if operation // offset != INPUT or following != operation + offset:
                continue
            fed = operations.feeds[operation]
            for ends, fused in zip((early, late), found, strict=True):
                if fed < 0 or ends[following] + operations.lag[fed] <= ends[fed] - operations.duration[fed] + slack:
                    fused.append(operation)
    early_fused, late_fused = found
    return frozenset(late_fused if not spans and len(late_fused) > len(early_fused) else early_fused)
