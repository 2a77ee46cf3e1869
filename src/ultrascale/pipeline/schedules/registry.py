"""Schedules by name. To add one: a file beside this with `schedule` and `memory_bound`, and a line below."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules import (
    afab,
    automatic,
    custom,
    dualpipe,
    dualpipe_v,
    eager,
    evaluation,
    grouped,
    interleaved,
    interleaved_overlap,
    interleaved_zb,
    looped,
    one_f_one_b,
    one_f_one_b_v,
    v_half,
    v_min,
    zb1p_auto,
    zb2p_auto,
    zb_h1,
    zb_h1_mds,
    zb_v,
    zb_v_auto,
)
from ultrascale.pipeline.schedules.request import Request

MAX_ACTIONS = 8_000_000
"""Compute actions above which a plan is refused: a mistyped size should not fill the memory of a machine."""

CUSTOM = "custom:"
"""Before the path of a file that holds a plan."""

Option = Literal["group_size", "activation_limit"]
"""A number of a Request that only some schedules look at."""

OPTIONS: tuple[Option, ...] = ("group_size", "activation_limit")


def _any_number(request: Request) -> None:
    """Takes every request."""


@dataclass(frozen=True)
class Schedule:
    """A schedule and what it takes.

    build           request → compute plan
    memory_bound    request → activations that each rank holds at most
    virtual_stages  stages per rank when the user gives none
    adjustable      whether another number of virtual stages may be asked for
    training        False for forward-only ones, which cannot train
    options         which of Request's options the schedule takes
    requires        raises ScheduleError for a request that the schedule does not take; cheap
    searched        whether building it is a search by costs, which takes seconds
    explain         (request, its plan) → what the search gained, for people; None: nothing to say
    """

    name: str
    summary: str
    build: Callable[[Request], Plan]
    memory_bound: Callable[[Request], tuple[int, ...]]
    aliases: tuple[str, ...] = ()
    virtual_stages: int = 1
    adjustable: bool = False
    training: bool = True
    options: tuple[Option, ...] = ()
    requires: Callable[[Request], None] = _any_number
    searched: bool = False
    explain: Callable[[Request, Plan], str] | None = None


_GROUPS: tuple[Option, ...] = ("group_size",)

# fmt: off
SCHEDULES: tuple[Schedule, ...] = (
    Schedule("gpipe", "all forward, then all backward", afab.schedule, afab.memory_bound, ("afab",)),
    Schedule("1f1b", "one forward, one backward", one_f_one_b.schedule, one_f_one_b.memory_bound, ("one_f_one_b",)),
    Schedule("1f1b_eager", "1f1b with twice the warm-up, which hides latency", eager.schedule, eager.memory_bound,
             ("eager_1f1b",)),
    Schedule("interleaved_1f1b", "1f1b over several stages a rank", interleaved.schedule, interleaved.memory_bound,
             ("interleaved",), 2, True, options=_GROUPS, requires=interleaved.requires),
    Schedule("grouped_interleaved", "the same in larger groups of micro-batches, as Llama 3", grouped.schedule,
             grouped.memory_bound, ("llama3",), 2, True, options=_GROUPS, requires=interleaved.requires),
    Schedule("interleaved_1f1b_a2a_overlap", "interleaved, forward and backward run together",
             interleaved_overlap.schedule, interleaved_overlap.memory_bound, ("a2a_overlap",), 2, True,
             options=_GROUPS, requires=interleaved.requires),
    Schedule("looped_bfs", "breadth-first over several stages a rank", looped.schedule, looped.memory_bound,
             ("breadth_first", "looped_bfs_descending"), 2, True),
    Schedule("looped_bfs_ascending", "the same, micro-batches ascending in the backward too", looped.ascending,
             looped.memory_bound, (), 2, True),
    Schedule("zb_h1", "zero bubble in 1f1b's memory", zb_h1.schedule, zb_h1.memory_bound, ("zb1p",)),
    Schedule("zb_h1_mds", "the same, split only at both ends", zb_h1_mds.schedule, zb_h1_mds.memory_bound),
    Schedule("interleaved_zb", "zero bubble over several stages a rank", interleaved_zb.schedule,
             interleaved_zb.memory_bound, ("interleaved_zero_bubble",), 2, True, options=_GROUPS,
             requires=interleaved.requires),
    Schedule("zb_v", "zero bubble down the ranks and up again", zb_v.schedule, zb_v.memory_bound, ("zbv",), 2),
    Schedule("dualpipe", "from both ends, with two copies of the parameters", dualpipe.schedule,
             dualpipe.memory_bound, requires=dualpipe.requires),
    Schedule("dualpipe_v", "dualpipe down the ranks and up again, one copy", dualpipe_v.schedule,
             dualpipe_v.memory_bound, ("dualpipev",), 2, requires=dualpipe_v.requires),
    Schedule("zb1p_auto", "zb_h1 ordered for the costs at hand", zb1p_auto.schedule, zb1p_auto.memory_bound,
             searched=True),
    Schedule("zb2p_auto", "zero bubble in twice 1f1b's memory, for the costs at hand", zb2p_auto.schedule,
             zb2p_auto.memory_bound, ("zb_h2", "zb2p"), searched=True),
    Schedule("zb_v_auto", "zb_v ordered for the costs at hand", zb_v_auto.schedule, zb_v_auto.memory_bound, (), 2,
             searched=True),
    Schedule("v_half", "a V in half of 1f1b's memory", v_half.schedule, v_half.memory_bound, (), 2, searched=True),
    Schedule("v_min", "a V in a third of 1f1b's memory", v_min.schedule, v_min.memory_bound, (), 2, searched=True),
    Schedule("1f1b_v", "a V of whole backwards in two thirds of 1f1b's memory", one_f_one_b_v.schedule,
             one_f_one_b_v.memory_bound, ("one_f_one_b_v",), 2, searched=True),
    Schedule("auto", "the shortest order found for the costs and the memory at hand", automatic.schedule,
             automatic.memory_bound, (), 1, True, options=("activation_limit",), requires=automatic.requires,
             searched=True, explain=automatic.explain),
    Schedule("evaluation", "forward only", evaluation.schedule, evaluation.memory_bound, ("eval", "forward_only"),
             training=False),
)
# fmt: on

_BY_NAME = {name: entry for entry in SCHEDULES for name in (entry.name, *entry.aliases)}


def find(name: str) -> Schedule:
    """The schedule of a name or alias, in any case and with - for _.

    `custom:PATH` is the plan of a file (custom.py). `_N=12`, `_N=2P`, `_N=M` behind the name of a schedule that takes
    group_size says that size.

    Raises ScheduleError that gives the nearest name and all of them.
    """
    if name.startswith(CUSTOM):
        return _from_file(name)
    wanted = name.lower().replace("-", "_")
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    base, _, size = wanted.partition("_n=")
    if size and "group_size" in (entry := find(base)).options:
        return _in_groups(entry, size)
    near = difflib.get_close_matches(wanted, _BY_NAME, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? There are" if near else "there are"
    raise ScheduleError(f"{name!r} is not a schedule; {hint} {', '.join(sorted(_BY_NAME))}, and {CUSTOM}PATH")


def _from_file(name: str) -> Schedule:
    plan = custom.read(Path(name.removeprefix(CUSTOM)))
    return Schedule(
        name,
        "from a file",
        plan.schedule,
        plan.memory_bound,
        virtual_stages=plan.virtual_stages,
        options=("activation_limit",),
        requires=plan.requires,
    )


def _in_groups(entry: Schedule, text: str) -> Schedule:
    """The schedule with its group size said by its name."""
    size, name = grouped.parse_size(text), f"{entry.name}_N={text.upper()}"

    def sized(request: Request) -> Request:
        return replace(request, group_size=size(request))

    return replace(
        entry,
        name=name,
        build=lambda request: replace(entry.build(sized(request)), name=name),
        memory_bound=lambda request: entry.memory_bound(sized(request)),
        requires=lambda request: entry.requires(sized(request)),
        options=tuple(option for option in entry.options if option != "group_size"),
    )


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


def check_option(entry: Schedule, option: Option, value: int | None) -> None:
    """Raises ScheduleError when an option is given that the schedule does not take, or that is below 1."""
    if value is None:
        return
    if option not in entry.options:
        takes = f"it takes {' and '.join(entry.options)}" if entry.options else "it takes no option"
        raise ScheduleError(f"{option}={value} does not fit {entry.name}: {takes}; leave {option} out")
    if value < 1:
        raise ScheduleError(f"{option}={value} is none; give 1 or more, or leave it out")


def request(
    entry: Schedule,
    ranks: int,
    micro_batches: int,
    virtual: int | None = None,
    costs: Costs | None = None,
    group_size: int | None = None,
    activation_limit: int | None = None,
) -> Request:
    """What `entry` is to build; `virtual` and `costs` left out are the schedule's own, and costs of one.

    Raises ScheduleError for numbers that the schedule does not take.
    """
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches)):
        if number < 1:
            raise ScheduleError(f"{entry.name} with {number} {what}: give 1 or more")
    check_option(entry, "group_size", group_size)
    check_option(entry, "activation_limit", activation_limit)
    per_rank = virtual_stages(entry, virtual)
    if (size := 2 * ranks * per_rank * micro_batches) > MAX_ACTIONS:
        raise ScheduleError(
            f"{ranks} ranks with {micro_batches} micro-batches make {size} actions; the most is {MAX_ACTIONS}"
        )
    costs = costs or Costs()
    costs.check(ranks * per_rank)
    result = Request(ranks, micro_batches, per_rank, costs, group_size, activation_limit)
    entry.requires(result)
    return result


def build(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual: int | None = None,
    costs: Costs | None = None,
    group_size: int | None = None,
    activation_limit: int | None = None,
) -> Plan:
    """The compute plan of a schedule for `ranks` pp coordinates.

    Raises ScheduleError for an unknown name and for numbers that the schedule does not take.
    """
    entry = find(name)
    return entry.build(request(entry, ranks, micro_batches, virtual, costs, group_size, activation_limit))
