"""What a config can get wrong about its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultrascale.config.problem import Problem, choices
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.partition import PartitionError, partition
from ultrascale.pipeline.schedules import registry

if TYPE_CHECKING:
    from ultrascale.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Problems of the keys `pipeline.*`, and of parallel.pp against the layers. Takes a resolved config."""
    pipeline, pp, layers = config.pipeline, config.parallel.pp, config.model.num_hidden_layers
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
    try:
        stages = pp * registry.virtual_stages(entry, pipeline.virtual_stages)
    except ScheduleError:
        problems.append(
            Problem(
                "pipeline.virtual_stages",
                f"pipeline.virtual_stages={pipeline.virtual_stages} does not fit "
                f"pipeline.schedule={entry.name}, which has {entry.virtual_stages} stage per rank; "
                f"use {entry.virtual_stages} or null.",
            )
        )
        return problems

    if pipeline.layout is not None and pp == 1:
        problems.append(
            Problem(
                "pipeline.layout",
                f"pipeline.layout={_value(pipeline.layout)} splits the layers over stages, but "
                "parallel.pp=1 has one stage only; use null, or a larger parallel.pp.",
            )
        )
    elif pipeline.layout is not None:
        try:
            partition(pipeline.layout, layers, stages)
        except PartitionError as error:
            where = f"parallel.pp={pp}, model.num_hidden_layers={layers}"
            problems.append(Problem("pipeline.layout", f"pipeline.layout: {error} ({where}); or use null."))
    elif layers < stages:
        per_rank = stages // pp
        fitting = [size for size in range(1, pp + 1) if pp % size == 0 and size * per_rank <= layers]
        problems.append(
            Problem(
                "parallel.pp",
                f"parallel.pp={pp} makes {stages} stages, more than model.num_hidden_layers={layers}; use "
                f"{choices(fitting)}, or say with pipeline.layout which stages stay empty.",
            )
        )
    return problems


def _value(layout: Sequence[int] | str) -> str:
    return repr(layout) if isinstance(layout, str) else str(list(layout))
