"""Filling idle time without delaying anything: operations move to earlier, then to later gaps of their rank.

Where the memory allows it, an operation that fits into a gap before it is moved there; then the same in the opposite
direction of time, from the latest timetable of the same makespan, and again. Both only ever make room (forward-backward
improvement; Li & Willis 1992). It is what turns a repeated building block into a full warm-up and cool-down.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.pipeline.search.operations import FORWARD, INPUT, WEIGHT, Operations, Orders, Times

WINDOW = 48
"""Operations behind a gap that are looked at."""

ROUNDS = 6


@dataclass(frozen=True)
class _Direction:
    """A timetable seen along the direction of its time.

    begin, ready  operation → when it begins; when its inputs would let it
    taking        the kind that takes memory, giving the one that gives it back
    """

    begin: list[float]
    ready: list[float]
    taking: int
    giving: int


def shifted(operations: Operations, orders: Orders, limits: list[int]) -> Orders:
    """Orders of no longer makespan, whose ranks hold no more than `limits`. The orders given must be possible."""
    best = orders
    times = operations.times(orders)
    assert times is not None
    makespan = times.makespan
    for _ in range(ROUNDS):
        orders = _fill(operations, orders, _from_the_end(operations, orders, times), limits, backwards=True)
        orders = _fill(operations, orders, _from_the_start(operations, _times(operations, orders)), limits)
        times = _times(operations, orders)
        if times.makespan >= makespan * (1 - 1e-12):
            break
        best, makespan = orders, times.makespan
    return best


def _times(operations: Operations, orders: Orders) -> Times:
    times = operations.times(orders)
    assert times is not None  # the moves keep a timetable of the orders before them
    return times


def _from_the_start(operations: Operations, times: Times) -> _Direction:
    ends = times.ends
    begin = [end - length for end, length in zip(ends, operations.duration, strict=True)]
    ready = [ends[need] + lag if need >= 0 else 0.0 for need, lag in zip(operations.needs, operations.lag, strict=True)]
    return _Direction(begin, ready, FORWARD, WEIGHT if operations.split else INPUT)


def _from_the_end(operations: Operations, orders: Orders, times: Times) -> _Direction:
    """Time counted back from the end: an operation begins where its tail ends."""
    tails, duration = operations.tails(orders, times), operations.duration
    size = operations.stages * operations.micro_batches
    ready = [tails[fed] + duration[fed] + operations.lag[fed] if fed >= 0 else 0.0 for fed in operations.feeds]
    if operations.split:
        for operation in range(size, 2 * size):
            ready[operation] = max(ready[operation], tails[operation + size] + duration[operation + size])
    return _Direction(tails, ready, WEIGHT if operations.split else INPUT, FORWARD)


def _fill(
    operations: Operations, orders: Orders, direction: _Direction, limits: list[int], backwards: bool = False
) -> Orders:
    rows = []
    for row, limit in zip(orders, limits, strict=True):
        filled = _fill_row(operations, row[::-1] if backwards else row, direction, limit)
        rows.append(filled[::-1] if backwards else filled)
    return rows


def _fill_row(operations: Operations, row: list[int], direction: _Direction, limit: int) -> list[int]:
    begin, ready, duration = direction.begin, direction.ready, operations.duration
    size = operations.stages * operations.micro_batches
    rest, filled = row, []
    now, held, first = 0.0, 0, 0
    moved: set[int] = set()
    while first < len(rest):
        head = rest[first]
        if head in moved:
            first += 1
            continue
        slack = 1e-9 * (1 + begin[head])
        taken = None
        if begin[head] > now + slack:
            taken = _fitting(operations, rest, first, moved, direction, (now, begin[head] + slack), limit - held)
        if taken is None:
            operation = head
            now = begin[head] + duration[head]
            first += 1
        else:
            operation = taken
            moved.add(taken)
            now = max(now, ready[taken]) + duration[taken]
        filled.append(operation)
        held += (operation // size == direction.taking) - (operation // size == direction.giving)
    return filled


def _fitting(
    operations: Operations,
    row: list[int],
    first: int,
    moved: set[int],
    direction: _Direction,
    gap: tuple[float, float],
    room: int,
) -> int | None:
    """The first operation behind the gap that fits into it, in time and in memory."""
    size = operations.stages * operations.micro_batches
    lines: set[int] = set()
    level = peak = 0  # of the operations passed, above what is held at the gap
    for operation in row[first : first + WINDOW]:
        if operation in moved:
            continue
        line, kind = operation // operations.micro_batches, operation // size
        takes = kind == direction.taking
        end = max(gap[0], direction.ready[operation]) + operations.duration[operation]
        if line not in lines and (not takes or peak < room) and end <= gap[1]:
            return operation
        lines.add(line)  # a stage keeps its micro-batches in order
        level += takes
        peak = max(peak, level)
        level -= kind == direction.giving
    return None
