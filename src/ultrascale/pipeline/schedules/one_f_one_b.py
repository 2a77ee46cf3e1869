"""1F1B, one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021).

Makespan (M + P − 1)(F + B) for equal stages, as GPipe, but rank r holds only min(M, P − r) activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Plan, backward, forward
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Rank r: w = min(P − 1 − r, M) forwards, then (F, B) pairs, then the backwards that are left.

    Any number of micro-batches is right; with fewer than ranks the bubble is just larger.
    """
    warm_ups = [request.ranks - 1 - rank for rank in range(request.ranks)]
    return Plan("1f1b", linear(request.ranks), request.micro_batches, rows(warm_ups, request.micro_batches))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that rank r holds at most: min(M, P − r)."""
    return tuple(min(request.micro_batches, request.ranks - rank) for rank in range(request.ranks))


def rows(warm_ups: list[int], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Per rank: its number of warm-up forwards, then a forward and a backward in turn, then backwards."""
    lists = []
    for rank, wanted in enumerate(warm_ups):
        warm_up = min(wanted, micro_batches)
        row: list[Action] = [forward(rank, micro_batch) for micro_batch in range(warm_up)]
        for micro_batch in range(micro_batches):
            if warm_up + micro_batch < micro_batches:
                row.append(forward(rank, warm_up + micro_batch))
            row.append(backward(rank, micro_batch))
        lists.append(tuple(row))
    return tuple(lists)
