"""Forward only: what evaluation runs, with any number of micro-batches and no state of training touched."""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan, forward
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules.placement import linear


def schedule(stages: int, micro_batches: int, virtual_stages: int | None = None, costs: Costs | None = None) -> Plan:
    """Per rank: F of all micro-batches; nothing is kept after each."""
    actions = tuple(tuple(forward(rank, micro_batch) for micro_batch in range(micro_batches)) for rank in range(stages))
    return Plan("evaluation", linear(stages), micro_batches, actions, forward_only=True)


def memory_bound(stages: int, micro_batches: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Activations that each rank holds at most: the one that it is computing."""
    return (1,) * stages
