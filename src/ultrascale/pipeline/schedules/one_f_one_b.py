"""1F1B, one forward and one backward in turn (PipeDream-Flush, Narayanan et al. 2021).

Makespan (M + P − 1)(F + B) for equal stages, as GPipe, but rank r holds only min(M, P − r) activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Plan, backward, forward
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules.placement import linear


def schedule(stages: int, micro_batches: int, virtual_stages: int | None = None, costs: Costs | None = None) -> Plan:
    """Rank r: w = min(P − 1 − r, M) forwards, then (F, B) pairs, then the backwards that are left.

    Any number of micro-batches is right; with fewer than stages the bubble is just larger.
    """
    lists = []
    for rank in range(stages):
        warm_up = min(stages - 1 - rank, micro_batches)
        row: list[Action] = [forward(rank, micro_batch) for micro_batch in range(warm_up)]
        for micro_batch in range(micro_batches):
            if warm_up + micro_batch < micro_batches:
                row.append(forward(rank, warm_up + micro_batch))
            row.append(backward(rank, micro_batch))
        lists.append(tuple(row))
    return Plan("1f1b", linear(stages), micro_batches, tuple(lists))


def memory_bound(stages: int, micro_batches: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Activations that rank r holds at most: min(M, P − r)."""
    return tuple(min(micro_batches, stages - rank) for rank in range(stages))
