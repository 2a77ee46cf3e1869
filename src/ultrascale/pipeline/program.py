"""From the name of a schedule to the validated lists that the engine runs."""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.communication import insert_communication, insert_reduce
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.replay import Model
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.validate import validate


def program(
    name: str,
    stages: int,
    micro_batches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    model: Model = "rendezvous",
) -> Plan:
    """The schedule for `stages` ranks with its messages and reductions, proven right under its memory bound.

    A pure function: every rank builds the whole plan and runs `plan.actions[its pp coordinate]`.
    Raises ScheduleError for an unknown name, numbers that the schedule does not take, or a wrong plan.
    """
    entry = registry.find(name)
    plan = registry.build(name, stages, micro_batches, virtual_stages, costs)
    plan = insert_reduce(insert_communication(plan))
    per_rank = registry.virtual_stages(entry, virtual_stages)
    validate(plan, entry.memory_bound(stages, micro_batches, per_rank), model)
    return plan
