"""Forward only: what evaluation runs, with any number of micro-batches and no state of training touched."""

from __future__ import annotations

from heapq import heappop, heappush

from ultrascale.pipeline.actions import Action, Plan, forward
from ultrascale.pipeline.schedules.placement import Placement, linear
from ultrascale.pipeline.schedules.request import Request


def schedule(request: Request) -> Plan:
    """Per rank: F of all micro-batches; nothing is kept after each. Makespan (M + P − 1)·F for equal stages."""
    return over(linear(request.ranks), request.ranks, request.micro_batches)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: the one that it is computing."""
    return (1,) * request.ranks


def over(placement: Placement, ranks: int, micro_batches: int) -> Plan:
    """The forward-only plan for stages that lie as a training schedule placed them.

    Each rank runs the deepest stage whose input is there, as if every forward took one unit of time: what has
    come far is finished first, so that few outputs wait between stages. Where a stage has two copies, the
    first half of the micro-batches takes the first of each, the rest the second.
    """
    ready: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    rows: list[list[Action]] = [[] for _ in range(ranks)]

    def arrive(stage: int, micro_batch: int) -> None:
        if stage < len(placement):
            holders = placement[stage]
            heappush(ready[holders[micro_batch * len(holders) // micro_batches]], (-stage, micro_batch))

    for micro_batch in range(micro_batches):
        arrive(0, micro_batch)
    while any(ready):
        now = [(rank, heappop(waiting)) for rank, waiting in enumerate(ready) if waiting]
        for rank, (stage, micro_batch) in now:
            rows[rank].append(forward(-stage, micro_batch))
        for _, (stage, micro_batch) in now:
            arrive(-stage + 1, micro_batch)
    return Plan("evaluation", placement, micro_batches, tuple(map(tuple, rows)), forward_only=True)
