"""What ran when: of a simulation or of a real run. Everything that draws, draws one of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ultrascale.pipeline.actions import Action, Kind


class Event(NamedTuple):
    """A compute action on a rank, with its start and end in the unit of its timeline."""

    rank: int
    action: Action
    start: float
    end: float


Rows = tuple[tuple[Event, ...], ...]
"""Rank → its events, in the order in which they ran."""


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks of one pipeline, and what is needed to name and shade them.

    title      one line for the head of a picture
    placement  stage → the ranks that hold it
    unit       of start and end: "s", or "" for the unit of the costs
    notes      (what, value), in words; shown beside a picture where there is room
    """

    title: str
    placement: tuple[tuple[int, ...], ...]
    rows: Rows
    unit: str = ""
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of pp coordinates."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.placement)

    @property
    def start(self) -> float:
        """Of the first event."""
        return min((row[0].start for row in self.rows if row), default=0)

    @property
    def end(self) -> float:
        """Of the last event."""
        return max((row[-1].end for row in self.rows if row), default=0)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks."""
        return self.end - self.start

    def events(self) -> Iterator[Event]:
        """All events, rank by rank."""
        for row in self.rows:
            yield from row

    @cached_property
    def two_directions(self) -> bool:
        """Whether micro-batches enter from several ends, as in DualPipe, whose stages have two copies."""
        return any(len(ranks) > 1 for ranks in self.placement)

    @cached_property
    def _entries(self) -> dict[int, int]:
        """Micro-batch → which of the ranks that hold stage 0 it enters at."""
        return {
            part.micro_batch: self.placement[0].index(event.rank)
            for event in self.events()
            for part in event.action.computes
            if part.kind is Kind.F and part.stage == 0
        }

    @cached_property
    def _chunks(self) -> list[dict[int, int]]:
        """Rank → stage → its place among the stages of the rank."""
        held: list[dict[int, int]] = [{} for _ in range(self.ranks)]
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                held[rank][stage] = len(held[rank])
        return held

    def variant(self, rank: int, part: Action) -> int:
        """What tells equal kinds on a rank apart, from 0: the direction, or else the virtual stage."""
        if self.two_directions:
            return self._entries.get(part.micro_batch, 0)
        return self._chunks[rank].get(part.stage, 0)

    @property
    def variants(self) -> int:
        """How many different values `variant` has."""
        if self.two_directions:
            return max(len(ranks) for ranks in self.placement)
        return max((len(held) for held in self._chunks), default=1)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that occur, in the order of `Kind`."""
        found = {event.action.kind for event in self.events()}
        return tuple(kind for kind in Kind if kind in found)


Value = tuple[bool, int, int]
"""What an action hands on: (whether it is a gradient, stage, micro-batch)."""


def gives(part: Action) -> Value | None:
    """The output of an F, the input gradient of a B or BI; nothing that others need, of a BW."""
    return None if part.kind is Kind.BW else (part.kind is not Kind.F, part.stage, part.micro_batch)


def needs(part: Action) -> tuple[Value, ...]:
    """What an F, B, BI or BW works on. Stages beyond the ends of the model give nothing: nobody makes those."""
    stage, micro_batch = part.stage, part.micro_batch
    if part.kind is Kind.F:
        return ((False, stage - 1, micro_batch),)
    if part.kind is Kind.BW:
        return ((True, stage, micro_batch),)
    return (False, stage, micro_batch), (True, stage + 1, micro_batch)


def dependencies(rows: Rows) -> list[tuple[Event, Event]]:
    """(producer, consumer) of every value that one event hands to another.

    F to the F of the next stage, and to the backward of its own; B or BI to that of the stage before, and BI
    to its BW. What follows on a rank only because of the list's order is not among them.
    """
    makers: dict[Value, Event] = {}
    for row in rows:
        for event in row:
            for part in event.action.computes:
                if (value := gives(part)) is not None:
                    makers[value] = event
    return [
        (makers[value], event)
        for row in rows
        for event in row
        for part in event.action.computes
        for value in needs(part)
        if value in makers and makers[value] is not event
    ]
