"""Building blocks of two stages a rank in a V: in slots of equal length, six to a period.

F and BI of both stages of a rank take one slot each of the period, and two are left for BW; or two slots each for a
whole backward. No two operations of a rank may fall into one slot of the period (Qi et al. 2024, arXiv 2405.15362,
section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from ultrascale.pipeline.search.building_block import Block
from ultrascale.pipeline.search.operations import FORWARD, INPUT, WEIGHT

PERIOD = 6

Slots = tuple[int, int, int, int]
"""Slots of one rank: F of its first and of its second stage, backward of the second and of the first."""


def split_block(ranks: int, slots: Callable[[int], Slots]) -> Block:
    """A block of F and BI in the given slots, with each BW in the next slot of the period that is free."""
    times: dict[tuple[int, int], float] = {}
    for rank in range(ranks):
        down, up, second, first = own = slots(rank)
        mirrored = 2 * ranks - 1 - rank
        times[FORWARD, rank], times[FORWARD, mirrored] = down, up
        times[INPUT, mirrored], times[INPUT, rank] = second, first
        free = [slot for slot in range(PERIOD) if slot not in {each % PERIOD for each in own}]
        times[WEIGHT, mirrored], times[WEIGHT, rank] = min(
            ((_next(second + 1, a), _next(first + 1, b)) for a, b in permutations(free, 2)), key=sum
        )
    return Block(times, PERIOD)


def whole_blocks(ranks: int) -> list[Block]:
    """The shortest blocks of whole backwards: F in one slot, B in two; one for each arrangement on the last rank.

    A dynamic programme over the ranks: from each arrangement of the four operations in the period to each arrangement
    on the next rank, with the shortest delays between the two that hold them apart. The way there and back should take
    as long in the first stages as in the second, so that all ranks hold as much.
    """
    arrangements = _arrangements()
    # Arrangement on the last rank so far → (slots of all ranks, of which only differences between ranks matter).
    best: dict[Slots, tuple[int, int, list[tuple[int, int, int, int]]]] = {a: (0, 0, []) for a in arrangements}
    for _ in range(ranks - 1):
        longer = {}
        for after in arrangements:
            options = []
            for before, (outer, inner, hops) in best.items():
                hop = (
                    _next(1, after[0] - before[0]),
                    _next(1, before[1] - after[1]),
                    _next(2, after[2] - before[2]),
                    _next(2, before[3] - after[3]),
                )
                options.append((outer + hop[0] + hop[3], inner + hop[1] + hop[2], [*hops, hop], before))
            options.sort(key=lambda option: (max(option[0], option[1]), option[0] + option[1]))
            longer[after] = options[0][:3]
        best = longer
    ranked = sorted((max(ways[:2]), sum(ways[:2]), _turns(last, ways[2]), last) for last, ways in best.items())
    blocks = [_timed(ranks, last, best[last][2]) for *_, last in ranked]
    return [block for index, block in enumerate(blocks) if block not in blocks[:index]]


def _timed(ranks: int, last: Slots, hops: list[tuple[int, int, int, int]]) -> Block:
    """The slots in absolute time, from the arrangement of the last rank and the delays of each hop."""
    down = sum(hop[0] for hop in hops)
    up = down + _next(1, last[1] - last[0])
    at_first = up + sum(hop[1] for hop in hops)
    second_residue = last[2] - last[0] + down - sum(hop[2] for hop in hops)
    second = at_first + _next(1, second_residue - at_first) + sum(hop[2] for hop in hops)
    first = second + _next(2, last[3] - last[0] + down - second)
    times: dict[tuple[int, int], float] = {}
    for rank in reversed(range(ranks)):
        mirrored = 2 * ranks - 1 - rank
        times[FORWARD, rank], times[FORWARD, mirrored] = down, up
        times[INPUT, mirrored], times[INPUT, rank] = second, first
        if rank:
            hop = hops[rank - 1]
            down, up, second, first = down - hop[0], up + hop[1], second - hop[2], first + hop[3]
    return Block(times, PERIOD)


def _turns(last: Slots, hops: list[tuple[int, int, int, int]]) -> int:
    """Slots that a micro-batch waits where it turns: twice on the last rank, once on the first."""
    first_up = last[1] + sum(hop[1] for hop in hops)
    first_second = last[2] - sum(hop[2] for hop in hops)
    return _next(1, last[1] - last[0]) + _next(1, first_second - first_up) + _next(2, last[3] - last[2])


def _arrangements() -> list[Slots]:
    """All ways to lay two F of one slot and two B of two slots around the period."""
    found = []
    for order in permutations(range(4)):
        for start in range(PERIOD):
            slots, slot = [0] * 4, start
            for operation in order:
                slots[operation] = slot % PERIOD
                slot += 1 if operation < 2 else 2
            found.append((slots[0], slots[1], slots[2], slots[3]))
    return sorted(set(found))


def _next(least: int, residue: int) -> int:
    """The smallest number from `least` on that is `residue` slots into a period."""
    return least + (residue - least) % PERIOD
