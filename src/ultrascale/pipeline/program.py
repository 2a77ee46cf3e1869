"""From the name of a schedule to the validated lists that the engine runs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.communication import insert_communication
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.parameters import insert_reduce, keep_gathered
from ultrascale.pipeline.replay import Model
from ultrascale.pipeline.schedules import evaluation, registry
from ultrascale.pipeline.schedules.registry import Schedule
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.validate import validate

if TYPE_CHECKING:
    from ultrascale.config.schema import Config


@lru_cache(maxsize=4)  # a plan is asked for by several, and costs seconds for many micro-batches
def program(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
    group_size: int | None = None,
    activation_limit: int | None = None,
    model: Model = "rendezvous",
    zero_stage: int = 0,
    gathered_once: bool = False,
) -> Plan:
    """The schedule for `ranks` pp coordinates with its messages and reductions, proven right under its memory bound.

    A pure function: every rank builds the whole plan and runs `plan.actions[its pp coordinate]`.
    Raises ScheduleError for an unknown name, numbers that the schedule does not take, or a wrong plan.
    """
    entry = registry.find(name)
    request = registry.request(entry, ranks, micro_batches, virtual_stages, costs, group_size, activation_limit)
    return prove(entry, request, model, zero_stage, gathered_once)


def prove(
    entry: Schedule,
    request: Request,
    model: Model = "rendezvous",
    zero_stage: int = 0,
    gathered_once: bool = False,
) -> Plan:
    """The plan of a request with its messages and reductions. Raises ScheduleError when it is wrong.

    zero_stage     from 2 on every micro-batch is reduced
    gathered_once  at stage 3: a stage's weights stay from its first use to its last
    """
    plan = insert_reduce(insert_communication(entry.build(request)), every_micro_batch=zero_stage >= 2)
    if zero_stage == 3 and gathered_once:
        plan = keep_gathered(plan)
    validate(plan, entry.memory_bound(request), model)
    return plan


def evaluation_program(training: Plan, micro_batches: int | None = None) -> Plan:
    """Forward only, over the stages of a training plan where they lie; as many micro-batches unless another number is
    given. Raises ScheduleError when that plan's placement is wrong.
    """
    number = training.micro_batches if micro_batches is None else micro_batches
    plan = insert_communication(evaluation.over(training.placement, training.ranks, number))
    validate(plan, 1, "blocking")  # the engine waits for old sends where nothing comes back that proves arrival
    return plan


def micro_batches(config: Config) -> int:
    """Micro-batches of one rank in one step of a resolved config."""
    parallel, batch = config.parallel, config.batch
    assert parallel.dp is not None
    return batch.global_size // (parallel.dp * parallel.ep * batch.micro_size)
