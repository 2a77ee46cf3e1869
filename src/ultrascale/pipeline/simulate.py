"""Discrete-event simulation of a plan: when each action runs, and what the pipeline loses to waiting."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.pipeline.actions import Action, Kind, Plan
from ultrascale.pipeline.activations import peak_activations
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.replay import replay


@dataclass(frozen=True, slots=True)
class Event:
    """A compute action with its start and end, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """What a plan costs. Times are in the unit of the costs, tuples are per rank.

    makespan          first start to last end over all ranks: what is paid when the optimizer is a barrier
    span              the longest first start to last end of any one rank, which "zero bubble" papers mean
    ideal             busy time of the busiest rank
    peak_activations  (stage × micro-batch) held at once, released at the end of B or BW: what is really kept
    peak_activations_input_gradient  the same, released at the end of B or BI: a lower bound
    """

    plan: Plan
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    makespan: float
    span: float
    ideal: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peak_activations_input_gradient: tuple[int, ...]

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


def simulate(plan: Plan, costs: Costs | None = None) -> Simulation:
    """Runs the plan's compute actions as soon as their rank and their inputs allow.

    A message takes P2P between ranks and nothing within one, keeps no rank busy and never waits for another.
    A whole B gives its input gradient at its end; an FB starts when both inputs are there and gives both
    results at its end. Raises ScheduleError when the plan stands still, or costs per stage do not fit it.
    """
    costs = costs or Costs()
    costs.check(plan.stages)
    plan = plan.compute_only()
    forwards: dict[tuple[int, int], tuple[int, float]] = {}  # (stage, micro-batch) → (rank, end)
    gradients: dict[tuple[int, int], tuple[int, float]] = {}
    events: list[list[Event]] = [[] for _ in range(plan.ranks)]
    busy: list[float] = [0] * plan.ranks
    last_stage = plan.stages - 1
    for rank, _, action in replay(plan, "buffered"):
        start = events[rank][-1].end if events[rank] else 0
        for part in action.computes:
            source = None
            if part.kind is Kind.F:
                if part.stage > 0:
                    source = forwards[part.stage - 1, part.micro_batch]
            elif part.kind is not Kind.BW and part.stage < last_stage:
                source = gradients[part.stage + 1, part.micro_batch]
            if source is not None:
                start = max(start, source[1] if source[0] == rank else source[1] + costs.P2P)
        cost = costs.of(action)
        end = start + cost
        busy[rank] += cost
        events[rank].append(Event(action, start, end))
        for part in action.computes:
            if part.kind is not Kind.BW:
                table = forwards if part.kind is Kind.F else gradients
                table[part.stage, part.micro_batch] = (rank, end)
    active = [row for row in events if row]
    makespan = max((row[-1].end for row in active), default=0) - min((row[0].start for row in active), default=0)
    return Simulation(
        plan=plan,
        costs=costs,
        events=tuple(tuple(row) for row in events),
        makespan=makespan,
        span=max((row[-1].end - row[0].start for row in active), default=0),
        ideal=max(busy, default=0),
        busy=tuple(busy),
        peak_activations=peak_activations(plan, "BW"),
        peak_activations_input_gradient=peak_activations(plan, "BI"),
    )
