"""What a config can get wrong about its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultrascale.config.problem import Problem, choices
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.layer_costs import BALANCED, planned_costs
from ultrascale.pipeline.partition import PartitionError, partition
from ultrascale.pipeline.program import micro_batches, prove
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.schedules.registry import OPTIONS, Schedule

if TYPE_CHECKING:
    from ultrascale.config.schema import Config

CHEAP_ACTIONS = 20_000
"""Compute actions up to which a plan is built and proven right here: a fraction of a second."""


def check(config: Config) -> list[Problem]:
    """Problems of the keys `pipeline.*`, and of parallel.pp against the layers. Takes a resolved config."""
    pipeline = config.pipeline
    try:
        entry = registry.find(pipeline.schedule)
    except ScheduleError as error:
        return [Problem("pipeline.schedule", f"pipeline.schedule: {error}.")]
    problems = []
    if not entry.training:
        names = choices([entry.name for entry in registry.SCHEDULES if entry.training])
        problems.append(
            Problem(
                "pipeline.schedule",
                f"pipeline.schedule={pipeline.schedule} has no backward and cannot train; use {names}.",
            )
        )
    if unfitting := _unfitting_numbers(config, entry):
        return problems + unfitting
    return problems + _unfitting_request(config, entry) + _unfitting_layers(config, entry)


def _unfitting_numbers(config: Config, entry: Schedule) -> list[Problem]:
    """Virtual stages and options that the schedule does not take, key by key."""
    pipeline = config.pipeline
    problems = []
    try:
        registry.virtual_stages(entry, pipeline.virtual_stages)
    except ScheduleError:
        problems.append(
            Problem(
                "pipeline.virtual_stages",
                f"pipeline.virtual_stages={pipeline.virtual_stages} does not fit "
                f"pipeline.schedule={entry.name}, which has {entry.virtual_stages} per rank; "
                f"use {entry.virtual_stages} or null.",
            )
        )
    for option in OPTIONS:
        try:
            registry.check_option(entry, option, getattr(pipeline, option))
        except ScheduleError as error:
            problems.append(Problem(f"pipeline.{option}", f"pipeline.{error}, or use null."))
    if pipeline.costs is not None and not entry.searched:
        message = f"pipeline.costs has no effect under pipeline.schedule={entry.name}, whose order is fixed; use null."
        problems.append(Problem("pipeline.costs", message, kind="idle"))
    elif pipeline.costs is not None:
        try:
            planned_costs(config, entry)
        except ScheduleError as error:
            problems.append(Problem("pipeline.costs", f"pipeline.costs: {error}."))
    return problems


def _unfitting_request(config: Config, entry: Schedule) -> list[Problem]:
    """Numbers that the schedule does not take together, and a plan that is wrong where proving it is cheap."""
    pipeline, pp, number = config.pipeline, config.parallel.pp, micro_batches(config)
    if number < 1:
        return []  # too small a batch is the data's problem, and said there
    try:
        request = registry.request(
            entry,
            pp,
            number,
            pipeline.virtual_stages,
            group_size=pipeline.group_size,
            activation_limit=pipeline.activation_limit,
        )
        own = pipeline.schedule.startswith(registry.CUSTOM)  # nobody has proven a file of the user before
        if own or (not entry.searched and 2 * request.stages * number <= CHEAP_ACTIONS):
            prove(entry, request)
    except ScheduleError as error:
        where = f"parallel.pp={pp} and {number} micro-batches per rank, from batch.global_size"
        return [Problem("pipeline.schedule", f"pipeline.schedule={pipeline.schedule}: {error} ({where}).")]
    return []


def _unfitting_layers(config: Config, entry: Schedule) -> list[Problem]:
    """Stages and layers that do not go together."""
    pipeline, pp, layers = config.pipeline, config.parallel.pp, config.model.num_hidden_layers
    per_rank = registry.virtual_stages(entry, pipeline.virtual_stages)
    stages = pp * per_rank
    if pipeline.layout is not None and stages == 1:
        message = (
            f"pipeline.layout={_value(pipeline.layout)} splits the layers over stages, but "
            "parallel.pp=1 has one stage only; use null, or a larger parallel.pp."
        )
        return [Problem("pipeline.layout", message)]
    numbers = f"parallel.pp={pp}, model.num_hidden_layers={layers}"
    if per_rank > 1:
        numbers = f"parallel.pp={pp} with {per_rank} virtual stages each, model.num_hidden_layers={layers}"
    if pipeline.layout not in (None, BALANCED):
        try:
            partition(pipeline.layout, layers, stages)
        except PartitionError as error:
            return [Problem("pipeline.layout", f"pipeline.layout: {error} ({numbers}); or use null.")]
    elif layers < stages and pipeline.virtual_stages is not None and entry.adjustable and layers >= pp:
        message = (
            f"pipeline.virtual_stages={per_rank} makes {stages} stages with parallel.pp={pp}, more than "
            f"model.num_hidden_layers={layers}; use at most {layers // pp}, or say with pipeline.layout which stages "
            "stay empty."
        )
        return [Problem("pipeline.virtual_stages", message)]
    elif layers < stages:
        fitting = [size for size in range(1, pp + 1) if pp % size == 0 and size * per_rank <= layers]
        use = f"use {choices(fitting)}" if fitting else "use fewer pipeline.virtual_stages"
        key = "parallel.pp" if fitting else "pipeline.virtual_stages"
        message = (
            f"parallel.pp={pp} makes {stages} stages, more than model.num_hidden_layers={layers}; {use}, "
            "or say with pipeline.layout which stages stay empty."
        )
        if not fitting:
            message = f"pipeline.virtual_stages={per_rank} with {message}"
        return [Problem(key, message)]
    return []


def _value(layout: Sequence[int] | str) -> str:
    return repr(layout) if isinstance(layout, str) else str(list(layout))
