"""A step of a pipeline as a job shop: numbered operations, one list per rank, and the times that follow.

A search looks at thousands of orders of the same operations, so they are integers here and not Actions. Every
operation waits for its predecessor on its rank and for at most one result of another stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ultrascale.pipeline.actions import Action, Kind, Plan
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules.placement import Placement

Orders = list[list[int]]
"""Rank → its operations, in order."""

FORWARD, INPUT, WEIGHT = 0, 1, 2
"""Operation number = (kind · stages + stage) · micro-batches + micro-batch."""

_KINDS = (Kind.F, Kind.BI, Kind.BW)
NOTHING = -1


@dataclass(frozen=True)
class Times:
    """What an order costs: ends per operation, a topological order of all operations, and the makespan."""

    ends: list[float]
    sequence: list[int]
    makespan: float


class Operations:
    """The operations of one step on stages that lie on one rank each.

    split     True: a backward is an input gradient and a weight gradient; False: one operation, numbered as
              the input gradient, that gives its result at its end
    rank      stage → rank
    duration, needs (operation or NOTHING), lag (of the message from it), feeds (operation or NOTHING): each
              indexed by operation
    """

    def __init__(self, placement: Placement, micro_batches: int, costs: Costs, split: bool = True) -> None:
        self.placement = placement
        self.micro_batches = micro_batches
        self.costs = costs
        self.split = split
        self.stages = len(placement)
        self.rank = [ranks[0] for ranks in placement]
        self.ranks = max(self.rank) + 1
        self.held = [[stage for stage in range(self.stages) if self.rank[stage] == r] for r in range(self.ranks)]
        self.count = (3 if split else 2) * self.stages * micro_batches
        self.duration: list[float] = []
        self.needs: list[int] = []
        self.lag: list[float] = []
        self._fill()
        self.feeds = [NOTHING] * self.count
        for operation, need in enumerate(self.needs):
            if need != NOTHING and operation // (self.stages * micro_batches) != WEIGHT:
                self.feeds[need] = operation

    def _fill(self) -> None:
        stages, last = range(self.stages), self.stages - 1
        time = {kind: [self.costs.of(Action(kind, stage, 0)) for stage in stages] for kind in (*_KINDS, Kind.B)}
        for kind in range(3 if self.split else 2):
            durations = time[_KINDS[kind] if self.split or kind == FORWARD else Kind.B]
            for stage in stages:
                if kind == FORWARD:
                    source, source_kind = stage - 1, FORWARD
                elif kind == INPUT:
                    source, source_kind = (stage, FORWARD) if stage == last else (stage + 1, INPUT)
                else:
                    source, source_kind = stage, INPUT
                lag = self.costs.hop if source >= 0 and self.rank[source] != self.rank[stage] else 0
                for micro_batch in range(self.micro_batches):
                    self.duration.append(durations[stage])
                    self.lag.append(lag)
                    self.needs.append(self.number(source_kind, source, micro_batch) if source >= 0 else NOTHING)

    def number(self, kind: int, stage: int, micro_batch: int) -> int:
        """The operation of a kind, stage and micro-batch."""
        return (kind * self.stages + stage) * self.micro_batches + micro_batch

    def parts(self, operation: int) -> tuple[int, int, int]:
        """(kind, stage, micro-batch) of an operation."""
        row, micro_batch = divmod(operation, self.micro_batches)
        kind, stage = divmod(row, self.stages)
        return kind, stage, micro_batch

    def work(self) -> list[float]:
        """Busy time of each rank."""
        work: list[float] = [0] * self.ranks
        for operation, duration in enumerate(self.duration):
            work[self.rank[operation // self.micro_batches % self.stages]] += duration
        return work

    def times(self, orders: Orders) -> Times | None:
        """Every operation as early as its rank and its input allow; None when the orders stand still."""
        duration, needs, lag = self.duration, self.needs, self.lag
        ends: list[float] = [-1] * self.count
        waiting = [NOTHING] * self.count
        position, clock = [0] * self.ranks, [0.0] * self.ranks
        sequence: list[int] = []
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            row, index, now = orders[rank], position[rank], clock[rank]
            for operation in row[index:] if index else row:
                need = needs[operation]
                if need >= 0:
                    arrival = ends[need]
                    if arrival < 0:
                        waiting[need] = rank
                        break
                    arrival += lag[operation]
                    if arrival > now:
                        now = arrival
                now += duration[operation]
                ends[operation] = now
                sequence.append(operation)
                index += 1
                if waiting[operation] >= 0:
                    ready.append(waiting[operation])
                    waiting[operation] = NOTHING
            position[rank], clock[rank] = index, now
        if len(sequence) < self.count:
            return None
        return Times(ends, sequence, max(clock))

    def tails(self, orders: Orders, times: Times) -> list[float]:
        """Time from the end of each operation to the end of the step, along the longest chain behind it."""
        duration, lag, feeds = self.duration, self.lag, self.feeds
        after = [NOTHING] * self.count
        for row in orders:
            for operation, following in pairwise(row):
                after[operation] = following
        tails: list[float] = [0] * self.count
        for operation in reversed(times.sequence):
            following, fed = after[operation], feeds[operation]
            tail = tails[following] + duration[following] if following >= 0 else 0
            if fed >= 0:
                chain = tails[fed] + duration[fed] + lag[fed]
                if chain > tail:
                    tail = chain
            tails[operation] = tail
        return tails

    def peaks(self, orders: Orders, release: int = WEIGHT) -> list[int]:
        """Activations that each rank holds at most, to the end of the weight (or INPUT) gradient."""
        size = self.stages * self.micro_batches
        releasing = release if self.split else INPUT
        peaks = []
        for row in orders:
            held = most = 0
            for operation in row:
                kind = operation // size
                if kind == FORWARD:
                    held += 1
                    most = max(most, held)
                elif kind == releasing:
                    held -= 1
            peaks.append(most)
        return peaks

    def orders_of(self, plan: Plan) -> Orders:
        """The order of a plan over the same stages; a whole B becomes its two halves, an FB its parts."""
        orders: Orders = []
        for row in plan.actions:
            order: list[int] = []
            for action in row:
                for part in action.computes:
                    order += self._numbers(part)
            orders.append(order)
        return orders

    def _numbers(self, part: Action) -> Iterable[int]:
        stage, micro_batch = part.stage, part.micro_batch
        if part.kind is Kind.F:
            return (self.number(FORWARD, stage, micro_batch),)
        halves = {Kind.BI: (INPUT,), Kind.BW: (WEIGHT,), Kind.B: (INPUT, WEIGHT)}[part.kind]
        return (self.number(kind, stage, micro_batch) for kind in halves if self.split or kind == INPUT)

    def actions_of(self, orders: Orders, fused: frozenset[int] = frozenset()) -> tuple[tuple[Action, ...], ...]:
        """The orders as actions; input gradients in `fused` take their weight gradient with them as one B."""
        rows = []
        weights = {operation + self.stages * self.micro_batches for operation in fused}
        for order in orders:
            row = []
            for operation in order:
                if operation in weights:
                    continue
                kind, stage, micro_batch = self.parts(operation)
                whole = operation in fused or (kind == INPUT and not self.split)
                row.append(Action(Kind.B if whole else _KINDS[kind], stage, micro_batch))
            rows.append(tuple(row))
        return tuple(rows)
