"""What an action costs, for the simulator and for schedules that depend on it."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from numbers import Rational

from ultrascale.pipeline.actions import Action, Kind, ScheduleError

Cost = float | tuple[float, ...]
"""One number for all stages, or one per stage. Any unit of time, the same one throughout."""


@dataclass(frozen=True)
class Costs:
    """Time of each action, per stage and micro-batch (so per chunk, where a rank holds several stages).

    F    forward
    BI   gradient of the input;  BW  gradient of the weights;  a whole backward B takes BI + BW
    P2P  latency of a message between two ranks; it does not keep either of them busy
    FB   a forward and a whole backward run together; None for F + BI + BW. With BI in the pair it is less BW.

    Times come out exact when the costs are integers or fractions.
    Raises ScheduleError for a negative or non-finite cost.
    """

    F: Cost = 1.0
    BI: Cost = 1.0
    BW: Cost = 1.0
    P2P: float = 0.0
    FB: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not (isinstance(number, Rational) or math.isfinite(number)):
                    raise ScheduleError(f"cost {field.name}={number} is not a finite number; give 0 or more")
                if number is not None and number < 0:
                    raise ScheduleError(f"cost {field.name}={number} is negative; give 0 or more")

    def check(self, stages: int) -> None:
        """Raises ScheduleError when a cost per stage is given for another number of stages."""
        for name in ("F", "BI", "BW"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != stages:
                raise ScheduleError(f"cost {name} is given for {len(value)} stages, the plan has {stages}")

    def of(self, action: Action) -> float:
        """Time of one compute action."""
        kind, stage = action.kind, action.stage
        if kind is Kind.F:
            return _at(self.F, stage)
        if kind is Kind.B:
            return _at(self.BI, stage) + _at(self.BW, stage)
        if kind is Kind.BI:
            return _at(self.BI, stage)
        if kind is Kind.BW:
            return _at(self.BW, stage)
        if kind is Kind.FB:
            first, second = action.parts
            if self.FB is None:
                return self.of(first) + self.of(second)
            return self.FB if second.kind is Kind.B else max(self.FB - _at(self.BW, second.stage), 0)
        raise ScheduleError(f"{action} is not a compute action and has no cost")


def _at(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


def parse_costs(text: str) -> Costs:
    """`F=1,BI=1.2,BW=0.8,P2P=0.1,FB=2.4` as Costs; what is left out keeps its default.

    Raises ScheduleError that names the key and the nearest valid one, or the value.
    """
    names = [field.name for field in fields(Costs)]
    given: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ScheduleError(f"cost {name!r} is unknown, costs are {', '.join(names)}{hint}")
        if name in given:
            raise ScheduleError(f"cost {name} is given twice, as {given[name]:g} and {value}; give it once")
        try:
            given[name] = float(value)
        except ValueError:
            raise ScheduleError(f"cost {item!r} is not NAME=NUMBER; write for example {name}=1.5") from None
    return Costs(**given)
