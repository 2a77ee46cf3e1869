"""GPipe, all forward then all backward (Huang et al. 2019).

Makespan (M + P − 1)(F + B) + 2(P − 1)·P2P for equal stages; every rank holds all M activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan, backward, forward
from ultrascale.pipeline.schedules.placement import linear
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Per rank: F of all micro-batches, then B of all, both ascending."""
    ranks, micro_batches = request.ranks, request.micro_batches
    actions = tuple(
        (
            *(forward(rank, micro_batch) for micro_batch in range(micro_batches)),
            *(backward(rank, micro_batch) for micro_batch in range(micro_batches)),
        )
        for rank in range(ranks)
    )
    return Plan("gpipe", linear(ranks), micro_batches, actions)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: M."""
    return (request.micro_batches,) * request.ranks
