"""A makespan that no order of the same operations can beat.

Per rank: each operation has a head, before which it cannot start, and a tail, which must still pass after it. The
best that one machine can do with such operations, were it allowed to interrupt them, is a bound on the whole
(Jackson 1955; Carlier 1982). It is at least max over ranks of arrival + work + departure. The memory limit is left
out, so with a tight limit the bound may be far below what is possible.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ultrascale.pipeline.search.operations import FORWARD, INPUT, NOTHING, WEIGHT, Operations


def lower_bound(operations: Operations) -> float:
    """The largest bound of any rank, in the unit of the costs."""
    heads, tails = _heads(operations), _tails(operations)
    width, stages = operations.micro_batches, operations.stages
    return max(
        _one_machine(
            [
                (heads[operation], operations.duration[operation], tails[operation])
                for kind in range(operations.count // (stages * width))
                for stage in operations.held[rank]
                for operation in range(operations.number(kind, stage, 0), operations.number(kind, stage, width))
            ]
        )
        for rank in range(operations.ranks)
    )


def _lines(operations: Operations) -> list[tuple[int, int]]:
    """(kind, stage) in the order in which a micro-batch comes through them."""
    stages = range(operations.stages)
    lines = [(FORWARD, stage) for stage in stages] + [(INPUT, stage) for stage in reversed(stages)]
    return lines + ([(WEIGHT, stage) for stage in stages] if operations.split else [])


def _heads(operations: Operations) -> list[float]:
    """The k-th operation of a line starts after the one before it, and after k + 1 of the line that feeds it.

    Which micro-batch comes k-th does not matter, since all cost the same.
    """
    heads: list[float] = [0] * operations.count
    for kind, stage in _lines(operations):
        first = operations.number(kind, stage, 0)
        for operation in range(first, first + operations.micro_batches):
            need = operations.needs[operation]
            head = heads[need] + operations.duration[need] + operations.lag[operation] if need != NOTHING else 0
            if operation > first:
                head = max(head, heads[operation - 1] + operations.duration[operation - 1])
            heads[operation] = head
    return heads


def _tails(operations: Operations) -> list[float]:
    """Time that must pass after the end of the k-th operation of a line."""
    tails: list[float] = [0] * operations.count
    offset = operations.stages * operations.micro_batches
    for kind, stage in reversed(_lines(operations)):
        first = operations.number(kind, stage, 0)
        for operation in reversed(range(first, first + operations.micro_batches)):
            tail: float = 0
            fed = operations.feeds[operation]
            if fed != NOTHING:
                tail = operations.lag[fed] + operations.duration[fed] + tails[fed]
            if kind == INPUT and operations.split:
                tail = max(tail, operations.duration[operation + offset] + tails[operation + offset])
            if operation + 1 < first + operations.micro_batches:
                tail = max(tail, operations.duration[operation + 1] + tails[operation + 1])
            tails[operation] = tail
    return tails


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Smallest possible max(end + tail) of (head, duration, tail) on one machine that may interrupt its jobs.

    Always the released job with the longest tail (Jackson's preemptive rule, which is optimal).
    """
    jobs = sorted(jobs)
    waiting: list[tuple[float, float]] = []  # (−tail, what is left)
    now, index, bound = 0.0, 0, 0.0
    while index < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= now:
            heappush(waiting, (-jobs[index][2], jobs[index][1]))
            index += 1
        tail, left = heappop(waiting)
        until = jobs[index][0] if index < len(jobs) else now + left
        if now + left <= until:
            now += left
            bound = max(bound, now - tail)
        else:
            heappush(waiting, (tail, left - (until - now)))
            now = until
    return bound
