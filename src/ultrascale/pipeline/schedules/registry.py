"""Schedules by name. To add one: a file beside this with `schedule` and `memory_bound`, and a line below."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules import afab, evaluation, one_f_one_b

MAX_ACTIONS = 8_000_000
"""Compute actions above which a plan is refused: a mistyped size should not fill the memory of a machine."""


@dataclass(frozen=True)
class Schedule:
    """A schedule and what it takes.

    build           (stages, micro_batches, virtual_stages, costs) → compute plan; stages: the number of ranks
    memory_bound    (stages, micro_batches, virtual_stages) → activations each rank holds at most
    virtual_stages  stages per rank when the user gives none
    adjustable      whether another number of virtual stages may be asked for
    training        False for forward-only ones, which cannot train
    """

    name: str
    summary: str
    build: Callable[[int, int, int | None, Costs | None], Plan]
    memory_bound: Callable[[int, int, int | None], tuple[int, ...]]
    aliases: tuple[str, ...] = ()
    virtual_stages: int = 1
    adjustable: bool = False
    training: bool = True


SCHEDULES: tuple[Schedule, ...] = (
    Schedule("gpipe", "all forward, then all backward", afab.schedule, afab.memory_bound, ("afab",)),
    Schedule("1f1b", "one forward, one backward", one_f_one_b.schedule, one_f_one_b.memory_bound, ("one_f_one_b",)),
    Schedule(
        "evaluation",
        "forward only",
        evaluation.schedule,
        evaluation.memory_bound,
        ("eval", "forward_only"),
        training=False,
    ),
)

_BY_NAME = {name: entry for entry in SCHEDULES for name in (entry.name, *entry.aliases)}


def find(name: str) -> Schedule:
    """The schedule of a name or alias, in any case and with - for _.

    Raises ScheduleError that gives the nearest name and all of them.
    """
    wanted = name.lower().replace("-", "_")
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    near = difflib.get_close_matches(wanted, _BY_NAME, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? There are" if near else "there are"
    raise ScheduleError(f"{name!r} is not a schedule; {hint} {', '.join(sorted(_BY_NAME))}")


def virtual_stages(entry: Schedule, asked: int | None) -> int:
    """Stages per rank: the number asked for, or the schedule's own.

    Raises ScheduleError when the schedule does not take that number.
    """
    if asked is None:
        return entry.virtual_stages
    if asked < 1 or (not entry.adjustable and asked != entry.virtual_stages):
        own = "1 or more" if entry.adjustable else str(entry.virtual_stages)
        raise ScheduleError(f"{asked} virtual stages do not fit {entry.name}; use {own}, or leave them out")
    return asked


def build(
    name: str,
    stages: int,
    micro_batches: int,
    virtual: int | None = None,
    costs: Costs | None = None,
) -> Plan:
    """The compute plan of a schedule for `stages` ranks.

    Raises ScheduleError for an unknown name and for numbers that the schedule does not take.
    """
    entry = find(name)
    for what, number in (("stages", stages), ("micro-batches", micro_batches)):
        if number < 1:
            raise ScheduleError(f"{entry.name} with {number} {what}: give 1 or more")
    per_rank = virtual_stages(entry, virtual)
    if (size := 2 * stages * per_rank * micro_batches) > MAX_ACTIONS:
        raise ScheduleError(
            f"{stages} stages with {micro_batches} micro-batches make {size} actions; the most is {MAX_ACTIONS}"
        )
    if costs is not None:
        costs.check(stages * per_rank)
    return entry.build(stages, micro_batches, per_rank, costs)
