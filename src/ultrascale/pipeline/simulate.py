"""Discrete-event simulation of a plan: when each action runs, and what the pipeline loses to waiting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ultrascale.pipeline.actions import Action, Kind, Plan, ScheduleError
from ultrascale.pipeline.activations import peak_activations, peak_bytes
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.replay import replay
from ultrascale.pipeline.timeline import Event, Rows, Timeline, Value, gives, needs


class Idle(NamedTuple):
    """Where a rank's idle time of one step lies.

    fill    before its first action
    steady  between its first and its last
    drain   after its last
    """

    fill: float
    steady: float
    drain: float


@dataclass(frozen=True)
class Simulation:
    """What a plan costs. Times are in the unit of the costs, tuples are per rank.

    makespan          first start to last end over all ranks: what is paid when the optimizer is a barrier
    span              the longest first start to last end of any one rank, which "zero bubble" papers mean
    ideal             busy time of the busiest rank
    exposed           time in which a rank stood still though all that it waited for had left its producers: the
                      part of the messages that nothing hides
    idle              the makespan less the busy time, by where it lies
    peak_activations  (stage × micro-batch) held at once, released at the end of B or BW: what is really kept
    peak_activations_input_gradient  the same, released at the end of B or BI: a lower bound
    peak_bytes        of these, with what is held for BW and the buffers of receives; 0 when no sizes are given
    """

    plan: Plan
    costs: Costs
    events: Rows
    makespan: float
    span: float
    ideal: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    idle: tuple[Idle, ...]
    peak_activations: tuple[int, ...]
    peak_activations_input_gradient: tuple[int, ...]
    peak_bytes: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of the makespan in which the busiest rank waits: (P − 1)/(M + P − 1) for GPipe and 1F1B."""
        return float(1 - self.ideal / self.makespan) if self.makespan else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """The same wait over the ideal time: (P − 1)/M for GPipe and 1F1B."""
        return float(self.makespan / self.ideal - 1) if self.ideal else 0.0

    @property
    def span_bubble_fraction(self) -> float:
        """Bubble fraction with the span in place of the makespan."""
        return float(1 - self.ideal / self.span) if self.span else 0.0

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """Events, first to last, of which each starts as soon as the one before lets it, so that the makespan is
        the sum of their times and of the hops between ranks. Where two paths are equally long, the one that
        stays on its rank longer."""
        return _critical_path(self.events, self.costs.hop)

    def timeline(self, unit: str = "") -> Timeline:
        """For draw.py and its like; `unit` is that of the costs, where it has a name."""
        plan = self.plan
        notes = (
            ("makespan", f"{float(self.makespan):.4g} {unit}".strip()),
            ("bubble", f"{self.bubble_fraction:.1%} of the makespan, {self.bubble_over_ideal:.1%} of ideal"),
        )
        title = f"{plan.name}, {plan.ranks} ranks, {plan.micro_batches} micro-batches"
        return Timeline(title, plan.placement, self.events, unit, notes)


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Runs the plan's compute actions as soon as their rank and their inputs allow.

    A message takes P2P and its bytes over the bandwidth between ranks and nothing within one, keeps no rank
    busy and never waits for another. A whole B gives its input gradient at its end; an FB starts when both
    inputs are there and gives both results at its end. Raises ScheduleError when the plan stands still, or
    costs per stage do not fit it.
    """
    costs = costs or Costs()
    costs.check(plan.stages)
    compute = plan.compute_only()
    events, busy, exposed = _run(compute, costs)
    active = [row for row in events if row]
    start = min((row[0].start for row in active), default=0)
    end = max((row[-1].end for row in active), default=0)
    if end - start == math.inf:
        raise ScheduleError(
            "the costs add up to more than a number can hold; give smaller ones, in another unit of time"
        )
    return Simulation(
        plan=compute,
        costs=costs,
        events=events,
        makespan=end - start,
        span=max((row[-1].end - row[0].start for row in active), default=0),
        ideal=max(busy, default=0),
        busy=busy,
        exposed=exposed,
        idle=tuple(_idle(row, work, start, end) for row, work in zip(events, busy, strict=True)),
        peak_activations=peak_activations(compute, "BW"),
        peak_activations_input_gradient=peak_activations(compute, "BI"),
        peak_bytes=peak_bytes(plan, costs),
    )


def _idle(row: tuple[Event, ...], busy: float, start: float, end: float) -> Idle:
    if not row:
        return Idle(end - start, 0, 0)
    # Sums of floats may differ in their last digit.
    return Idle(row[0].start - start, max(row[-1].end - row[0].start - busy, 0), end - row[-1].end)


_Node = tuple[float, tuple[int, ...], tuple[int, ...]]
"""An action as the hot loop sees it: its cost, the values that it needs, the values that it gives."""


def _run(plan: Plan, costs: Costs) -> tuple[Rows, tuple[float, ...], tuple[float, ...]]:
    """Events, busy and exposed time of each rank. Integers and flat lists: 64 ranks with 1024 micro-batches
    have 131 072 actions and more."""
    hop = costs.hop
    rows = _nodes(plan, costs)
    ends: list[float] = [-1] * (2 * plan.stages * plan.micro_batches)  # of the action that gives a value; -1: not yet
    makers = [0] * len(ends)
    events: list[list[Event]] = [[] for _ in rows]
    clocks: list[float] = [0] * plan.ranks
    busy: list[float] = [0] * plan.ranks
    exposed: list[float] = [0] * plan.ranks
    sleepers: dict[int, list[int]] = {}
    ready = list(range(plan.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        row, done, actions, clock = rows[rank], events[rank], plan.actions[rank], clocks[rank]
        for index in range(len(done), len(row)):
            cost, needs, gives = row[index]
            start = left = clock
            for value in needs:
                end = ends[value]
                if end < 0:
                    break
                if end > left:
                    left = end
                if makers[value] != rank:
                    end += hop
                if end > start:
                    start = end
            else:
                clock = start + cost
                busy[rank] += cost
                exposed[rank] += start - left
                done.append(Event(rank, actions[index], start, clock))
                for value in gives:
                    ends[value] = clock
                    makers[value] = rank
                    if value in sleepers:
                        ready += sleepers.pop(value)
                continue
            sleepers.setdefault(value, []).append(rank)
            break
        clocks[rank] = clock
    if sleepers:
        for _ in replay(plan, "buffered"):  # says who waits for whom
            pass
    return tuple(map(tuple, events)), tuple(busy), tuple(exposed)


def _nodes(plan: Plan, costs: Costs) -> list[list[_Node]]:
    """Rank → its actions. A value is a number: (stage, micro-batch) of a forward, or of an input gradient."""
    width, gradients, last = plan.micro_batches, plan.stages * plan.micro_batches, plan.stages - 1
    forwards, wholes, inputs, weights = (
        [costs.of(Action(kind, stage, 0)) for stage in range(plan.stages)]
        for kind in (Kind.F, Kind.B, Kind.BI, Kind.BW)
    )
    rows: list[list[_Node]] = []
    for actions in plan.actions:
        row: list[_Node] = []
        for action in actions:
            kind, stage = action.kind, action.stage
            value = stage * width + action.micro_batch
            if kind is Kind.F:
                row.append((forwards[stage], (value - width,) if stage else (), (value,)))
            elif kind is Kind.BW:
                row.append((weights[stage], (gradients + value,), ()))
            elif kind is Kind.FB:
                second = action.parts[1]
                other = second.stage * width + second.micro_batch
                needs = ((value - width,) if stage else ()) + (other,)
                needs += (gradients + other + width,) if second.stage < last else ()
                row.append((costs.of(action), needs, (value, gradients + other)))
            else:
                needs = (value, gradients + value + width) if stage < last else (value,)
                row.append(((wholes if kind is Kind.B else inputs)[stage], needs, (gradients + value,)))
        rows.append(row)
    return rows


def _critical_path(rows: Rows, hop: float) -> tuple[Event, ...]:
    """Back from the event that ends last, each time to the one whose end let it start."""
    active = [rank for rank, row in enumerate(rows) if row]
    if not active:
        return ()
    makers: dict[Value, tuple[int, int]] = {}  # → (rank, index)
    for rank, row in enumerate(rows):
        for index, event in enumerate(row):
            for part in event.action.computes:
                if (value := gives(part)) is not None:
                    makers[value] = (rank, index)
    rank = max(active, key=lambda last: rows[last][-1].end)
    index = len(rows[rank]) - 1
    path = [rows[rank][index]]
    while path[-1].start > 0:
        event = path[-1]
        if index and rows[rank][index - 1].end == event.start:
            index -= 1
        else:
            sources = (makers[value] for part in event.action.computes for value in needs(part) if value in makers)
            rank, index = next(
                (source, at)
                for source, at in sources
                if rows[source][at].end + (hop if source != rank else 0) == event.start
            )
        path.append(rows[rank][index])
    return tuple(reversed(path))
