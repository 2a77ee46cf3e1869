"""GPipe, all forward then all backward (Huang et al. 2019).

Makespan (M + P − 1)(F + B) + 2(P − 1)·P2P for equal stages; every rank holds all M activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan, backward, forward
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules.placement import linear


def schedule(stages: int, micro_batches: int, virtual_stages: int | None = None, costs: Costs | None = None) -> Plan:
    """Per rank: F of all micro-batches, then B of all, both ascending."""
    actions = tuple(
        (
            *(forward(rank, micro_batch) for micro_batch in range(micro_batches)),
            *(backward(rank, micro_batch) for micro_batch in range(micro_batches)),
        )
        for rank in range(stages)
    )
    return Plan("gpipe", linear(stages), micro_batches, actions)


def memory_bound(stages: int, micro_batches: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Activations that each rank holds at most: M."""
    return (micro_batches,) * stages
