"""ZB-V: zero bubble over two stages a rank that run down the ranks and up again (Qi et al. 2024, section 4).

The order is fixed, and best when F = BI = BW: makespan, in costs per stage, 2M(F + BI + BW) + (P − 1)·F for
M ≥ 2P − 1 and free P2P, without a bubble in any rank's own span. Rank r holds min(M, 2P − 1 − r) + min(M, r + 1)
activations, in stages of half a rank's layers: 2P for M ≥ 2P − 1, what 1F1B holds on its first rank.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Kind, Plan
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Fewer than 2P − 1 micro-batches take the order for 2P − 1, without what is not there."""
    rows = tuple(_row(rank, request.ranks, request.micro_batches) for rank in range(request.ranks))
    return Plan("zb_v", v_shape(request.ranks), request.micro_batches, rows)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: those of its first stage, and of its second."""
    ranks, most = request.ranks, request.micro_batches
    return tuple(min(most, 2 * ranks - 1 - rank) + min(most, rank + 1) for rank in range(ranks))


class _Row:
    """A rank's list under way: each kind of action takes the micro-batches of a stage in their order."""

    def __init__(self, down: int, up: int) -> None:
        self.stages = (down, up)
        self.actions: list[Action] = []
        self.counts = {(kind, chunk): 0 for kind in (Kind.F, Kind.BI, Kind.BW) for chunk in (0, 1)}

    def add(self, *what: tuple[Kind, int]) -> None:
        """The next micro-batch of each (kind, which of the two stages)."""
        for kind, chunk in what:
            self.actions.append(Action(kind, self.stages[chunk], self.counts[kind, chunk]))
            self.counts[kind, chunk] += 1


def _row(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    row = _Row(rank, 2 * ranks - 1 - rank)
    total = max(2 * ranks - 1, micro_batches)
    down, up = [((Kind.F, chunk), (Kind.BI, chunk), (Kind.BW, chunk)) for chunk in (0, 1)]
    for _ in range(2 * (ranks - rank) - 1):
        row.add(down[0])
    for _ in range(rank):
        row.add(up[0], down[0])
    for _ in range(ranks - rank):
        row.add(*up)
    while row.counts[up[0]] < row.counts[down[0]] or row.counts[down[0]] < total:
        if row.counts[down[0]] < total:
            row.add(down[0])
        row.add(*down[1:], *up)
    for _ in range(rank):
        row.add(down[1], up[1])
    for _ in range(ranks - rank):
        row.add(*down[1:])
    for weight in (up[2], down[2]):
        row.add(*[weight] * (total - row.counts[weight]))
    return tuple(action for action in row.actions if action.micro_batch < micro_batches)
