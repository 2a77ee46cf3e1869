"""Greedy list scheduling under a memory limit: a rank that is free takes the ready operation that comes first.

What comes first is said by a key per operation, for example the time it has in the repeated building block of
a schedule (Qi et al. 2024, arXiv 2405.15362, section 3). Weight gradients wait for nobody and nobody waits for
them, so they fill the time in which a rank would stand, as in Qi et al. 2023, arXiv 2401.10241, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from ultrascale.pipeline.search.operations import FORWARD, INPUT, WEIGHT, Operations, Orders


@dataclass(frozen=True)
class Policy:
    """How a rank decides between waiting and working.

    tolerance  share of a weight gradient that may run on after the next operation could have started
    patience   a rank waits this long (unit of the costs) for an operation that comes before the ready ones
    strict     forwards and input gradients in the order of their keys, however long the next one takes to come
    """

    tolerance: float = 0.0
    patience: float = 0.0
    strict: bool = False


def list_schedule(
    operations: Operations,
    keys: Sequence[float],
    limits: Sequence[int],
    policy: Policy = Policy(),
    ahead: Sequence[int] | None = None,
    shares: Sequence[int] | None = None,
) -> Orders | None:
    """The orders that the greedy rule makes; lower keys come first, micro-batches of a stage ascend.

    limits  activations that each rank may hold, at least its number of stages
    ahead   forwards that each rank may be ahead of its input gradients; None: as `limits`
    shares  stage → activations that it may hold, at least 1; those of a rank add up to no more than its limit. None:
            the stages of a rank share its limit

    It cannot stand still: every stage has room of its own, or a micro-batch goes ahead of another on a rank only as
    long as the older one keeps room for all its stages there, so that the oldest can always go on. A strict policy can;
    then the result is None.
    """
    return _ListScheduler(operations, keys, limits, policy, ahead, shares).run()


class _ListScheduler:
    def __init__(
        self,
        operations: Operations,
        keys: Sequence[float],
        limits: Sequence[int],
        policy: Policy,
        ahead: Sequence[int] | None,
        shares: Sequence[int] | None,
    ) -> None:
        self.operations, self.keys, self.limits, self.policy = operations, keys, limits, policy
        self.shares = shares
        self.ahead = limits if ahead is None else ahead
        self.arrival = [inf] * operations.count
        for micro_batch in range(operations.micro_batches):
            self.arrival[operations.number(FORWARD, 0, micro_batch)] = 0
        self.next = [[0] * operations.stages for _ in range(3)]  # kind, stage → micro-batch
        self.held = [0] * operations.ranks
        self.open = [0] * operations.ranks  # forwards without their input gradient
        self.orders: Orders = [[] for _ in range(operations.ranks)]
        self.free: list[float] = [0] * operations.ranks
        self.events: list[tuple[float, int]] = [(0, rank) for rank in range(operations.ranks)]

    def run(self) -> Orders | None:
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank]:
                self._decide(now, rank)
        complete = sum(map(len, self.orders)) == self.operations.count
        return self.orders if complete else None

    def _decide(self, now: float, rank: int) -> None:
        operations, keys, arrival, following = self.operations, self.keys, self.arrival, self.next
        width, stages = operations.micro_batches, operations.stages
        ready, ready_key = -1, inf
        soon, soon_key = inf, inf
        weight, weight_key = -1, inf
        for stage in operations.held[rank]:
            base = stage * width
            micro_batch = following[FORWARD][stage]
            blocked = inf
            if micro_batch < width:
                operation = base + micro_batch
                when = arrival[operation]
                if when < inf:
                    if not self._fits(rank, stage, micro_batch):
                        if when <= now:
                            blocked = keys[operation]
                    elif when <= now:
                        if keys[operation] < ready_key:
                            ready, ready_key = operation, keys[operation]
                    elif when < soon:
                        soon, soon_key = when, keys[operation]
            micro_batch = following[INPUT][stage]
            if micro_batch < width:
                operation = stages * width + base + micro_batch
                when = arrival[operation]
                if when <= now:
                    if keys[operation] < ready_key:
                        ready, ready_key = operation, keys[operation]
                elif when < soon:
                    soon, soon_key = when, keys[operation]
            if operations.split:
                micro_batch = following[WEIGHT][stage]
                if micro_batch < following[INPUT][stage]:
                    operation = 2 * stages * width + base + micro_batch
                    if keys[operation] < weight_key:
                        weight, weight_key = operation, keys[operation]
            # A weight gradient gives back what a forward waits for.
            if blocked < ready_key and weight >= 0:
                weight_key = min(weight_key, blocked)
        if self.policy.strict and ready >= 0 and ready_key > self._first_key(rank):
            ready, ready_key = -1, inf
        self._choose(now, rank, (ready, ready_key), (soon, soon_key), (weight, weight_key))

    def _choose(
        self,
        now: float,
        rank: int,
        ready: tuple[int, float],
        soon: tuple[float, float],
        weight: tuple[int, float],
    ) -> None:
        duration = self.operations.duration
        worth_waiting = soon[1] < ready[1] and soon[0] - now <= self.policy.patience
        if ready[0] >= 0 and not worth_waiting:
            self._start(now, rank, weight[0] if weight[1] < ready[1] else ready[0])
        elif weight[0] >= 0:
            over = now + duration[weight[0]] - soon[0]
            if over <= self.policy.tolerance * duration[weight[0]] or weight[1] < soon[1]:
                self._start(now, rank, weight[0])

    def _first_key(self, rank: int) -> float:
        """The lowest key of the forwards and input gradients that are left on a rank."""
        operations = self.operations
        return min(
            self.keys[operations.number(kind, stage, self.next[kind][stage])]
            for kind in (FORWARD, INPUT)
            for stage in operations.held[rank]
            if self.next[kind][stage] < operations.micro_batches
        )

    def _fits(self, rank: int, stage: int, micro_batch: int) -> bool:
        if self.held[rank] >= self.limits[rank] or self.open[rank] >= self.ahead[rank]:
            return False
        if self.shares is not None:
            releasing = WEIGHT if self.operations.split else INPUT
            return micro_batch - self.next[releasing][stage] < self.shares[stage]
        held = self.operations.held[rank]
        if len(held) == 1:
            return True
        forwards = self.next[FORWARD]
        oldest = min(forwards[own] for own in held)
        if micro_batch == oldest:
            return True
        younger = sum(max(0, forwards[own] - oldest - 1) for own in held)
        return younger + 1 + len(held) <= min(self.limits[rank], self.ahead[rank])

    def _start(self, now: float, rank: int, operation: int) -> None:
        operations = self.operations
        kind, stage, _ = operations.parts(operation)
        self.orders[rank].append(operation)
        self.next[kind][stage] += 1
        if kind == FORWARD:
            self.held[rank] += 1
            self.open[rank] += 1
        elif kind == INPUT:
            self.open[rank] -= 1
        if kind == (WEIGHT if operations.split else INPUT):
            self.held[rank] -= 1
        end = now + operations.duration[operation]
        self.free[rank] = end
        heappush(self.events, (end, rank))
        fed = operations.feeds[operation]
        if fed >= 0:
            self.arrival[fed] = end + operations.lag[fed]
            heappush(self.events, (self.arrival[fed], operations.rank[operations.parts(fed)[1]]))
