"""Breadth-first pipeline over looped stages (Lamy-Poirier 2022): all micro-batches through a stage, then the next.

Each stage's parameters are needed in one piece of time per direction, which suits sharded parameters best.

Makespan, in costs per stage: (V·M + P − 1)(F + B) for equal stages, M ≥ P and P2P free; 2(P − 1)·P2P more when it is
not, as long as P hops take no longer than the M − P forwards, or backwards, that hide them. Every rank holds all V·M
activations.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Plan, backward, forward
from ultrascale.pipeline.schedules.placement import loop
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Per rank: F stage by stage; then B with the stages reversed, the newest micro-batch first."""
    return _plan("looped_bfs", request, range(request.micro_batches - 1, -1, -1))


def ascending(request: Request) -> Plan:
    """The same with micro-batches in the order of a run without pipeline in the backward too."""
    return _plan("looped_bfs_ascending", request, range(request.micro_batches))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: V·M."""
    return (request.virtual_stages * request.micro_batches,) * request.ranks


def _plan(name: str, request: Request, backwards: range) -> Plan:
    def row(rank: int) -> tuple[Action, ...]:
        stages = range(rank, request.stages, request.ranks)
        return (
            *(forward(stage, micro_batch) for stage in stages for micro_batch in range(request.micro_batches)),
            *(backward(stage, micro_batch) for stage in reversed(stages) for micro_batch in backwards),
        )

    placement = loop(request.ranks, request.virtual_stages)
    return Plan(name, placement, request.micro_batches, tuple(row(rank) for rank in range(request.ranks)))
