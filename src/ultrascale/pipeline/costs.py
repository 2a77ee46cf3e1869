"""What an action costs in time and memory, for the simulator and for schedules that depend on it."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from numbers import Rational

from ultrascale.pipeline.actions import Action, Kind, ScheduleError

Cost = float | tuple[float, ...]
"""One number for all stages, or one per stage. Any unit of time, the same one throughout."""

ONE_FOR_ALL = frozenset({"P2P", "MESSAGE", "BANDWIDTH"})
"""Costs of the links, which have no stages."""


@dataclass(frozen=True)
class Costs:
    """Time of each action, per stage and micro-batch (so per chunk, where a rank holds several stages).

    F          forward
    BI         gradient of the input;  BW  gradient of the weights;  a whole backward B takes BI + BW
    P2P        latency of a message between two ranks; it does not keep either of them busy
    FB         a forward and a whole backward run together, by the stage of the forward; None for F + BI + BW.
               With BI in the pair it is less BW.
    R          recomputation: the forward run again at the head of a B or BI, which takes so much longer
    MESSAGE    bytes of one activation or gradient between two ranks
    BANDWIDTH  bytes of a message per unit of time; None when a message takes its latency alone
    ACTIVATION bytes that a stage keeps of one micro-batch from its forward to the end of B, or of BI
    HELD       bytes that are still kept from the end of BI to the end of BW; None for ACTIVATION: nothing is
               freed before BW

    Embedding and head need no names: they make the first and the last stage cost more. Times come out exact
    when the costs are integers or fractions.
    Raises ScheduleError for a negative or non-finite cost, and for a bandwidth of 0.
    """

    F: Cost = 1.0
    BI: Cost = 1.0
    BW: Cost = 1.0
    P2P: float = 0
    FB: Cost | None = None
    R: Cost = 0
    MESSAGE: float = 0
    BANDWIDTH: float | None = None
    ACTIVATION: Cost = 0
    HELD: Cost | None = None

    def __post_init__(self) -> None:
        for name, number in self._numbers():
            if not (isinstance(number, Rational) or math.isfinite(number)):
                raise ScheduleError(f"cost {name}={number} is not a finite number; give 0 or more")
            if number < 0:
                raise ScheduleError(f"cost {name}={number} is negative; give 0 or more")
        if self.BANDWIDTH == 0:
            raise ScheduleError("cost BANDWIDTH=0 lets no message through; give more, or leave it out")

    def _numbers(self) -> list[tuple[str, float]]:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [
            (name, number)
            for name, value in values
            if value is not None
            for number in (value if isinstance(value, tuple) else (value,))
        ]

    def check(self, stages: int) -> None:
        """Raises ScheduleError when a cost per stage is given for another number of stages."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != stages:
                raise ScheduleError(f"cost {field.name} is given for {len(value)} stages, the plan has {stages}")

    def of(self, action: Action) -> float:
        """Time of one compute action."""
        kind, stage = action.kind, action.stage
        if kind is Kind.F:
            return at(self.F, stage)
        if kind is Kind.B:
            return at(self.BI, stage) + at(self.BW, stage) + at(self.R, stage)
        if kind is Kind.BI:
            return at(self.BI, stage) + at(self.R, stage)
        if kind is Kind.BW:
            return at(self.BW, stage)
        if kind is Kind.FB:
            first, second = action.parts
            if self.FB is None:
                return self.of(first) + self.of(second)
            both = at(self.FB, stage)
            if second.kind is Kind.BI:
                both = max(both - at(self.BW, second.stage), 0)
            return both + at(self.R, second.stage)
        raise ScheduleError(f"{action} is not a compute action and has no cost")

    @property
    def hop(self) -> float:
        """Time from the end of an action to the arrival of its result on another rank."""
        if self.BANDWIDTH is None or not self.MESSAGE:
            return self.P2P
        if isinstance(self.MESSAGE, Rational) and isinstance(self.BANDWIDTH, Rational):
            return self.P2P + Fraction(self.MESSAGE) / Fraction(self.BANDWIDTH)
        return self.P2P + self.MESSAGE / self.BANDWIDTH

    @property
    def held(self) -> Cost:
        """HELD, or what it stands for when it is None."""
        return self.ACTIVATION if self.HELD is None else self.HELD


def at(cost: Cost, stage: int) -> float:
    """The cost of one stage."""
    return cost[stage] if isinstance(cost, tuple) else cost


def parse_costs(text: str, base: Costs | None = None) -> Costs:
    """`F=1,BI=1.2,BW=0.8,P2P=0.1,FB=2.4` as Costs; what is left out is as in `base`, or has its default.

    `F=1:1:1:1.6` gives a number per stage. Raises ScheduleError that names the key and the nearest valid one,
    or the value.
    """
    names = [field.name for field in fields(Costs)]
    given: dict[str, Cost] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ScheduleError(f"cost {name!r} is unknown, costs are {', '.join(names)}{hint}")
        if name in given:
            raise ScheduleError(f"cost {name} is given twice, as {_text(given[name])} and {value}; give it once")
        try:
            numbers = tuple(float(number) for number in value.split(":"))
        except ValueError:
            example = f"{name}=1.5" if name in ONE_FOR_ALL else f"{name}=1.5, or {name}=1:1:2 for each of three stages"
            raise ScheduleError(f"cost {item!r} is not NAME=NUMBER; write for example {example}") from None
        if len(numbers) > 1 and name in ONE_FOR_ALL:
            raise ScheduleError(f"cost {item!r} gives {len(numbers)} numbers, but a link has one; give one")
        given[name] = numbers if len(numbers) > 1 else numbers[0]
    return replace(base or Costs(), **given)  # type: ignore[arg-type]


def _text(cost: Cost) -> str:
    return ":".join(f"{number:g}" for number in cost) if isinstance(cost, tuple) else f"{cost:g}"
