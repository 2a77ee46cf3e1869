"""A simulation as text for terminals."""

from __future__ import annotations

from ultrascale.pipeline.actions import Action, Kind
from ultrascale.pipeline.simulate import Simulation

_FILL = {Kind.F: "-", Kind.B: "=", Kind.BI: "~", Kind.BW: "+", Kind.FB: "#"}
_LETTERS = {Kind.F: "F", Kind.B: "B", Kind.BI: "I", Kind.BW: "W", Kind.FB: "X"}
_IDLE = "."

LEGEND = "F- forward  B= backward  I~ input gradient  W+ weight gradient  X# forward and backward  . idle"


def timeline(simulation: Simulation, width: int = 100) -> str:
    """One line per rank, at most `width` characters of time: the letter of each action, its micro-batch
    where there is room, and its fill.

    Where the unit of time is too narrow to show an action, the later one of a cell is seen. Stages are told
    apart only by the rank that they lie on.
    """
    makespan = simulation.makespan
    if not makespan:
        return ""
    start = min(row[0].start for row in simulation.events if row)
    columns = min(width, _natural_width(simulation))
    scale = columns / float(makespan)
    label = len(str(len(simulation.events) - 1))
    lines = []
    for rank, row in enumerate(simulation.events):
        cells = [_IDLE] * columns
        for event in row:
            first = round(float(event.start - start) * scale)
            last = round(float(event.end - start) * scale)
            for offset, character in enumerate(_block(event.action, last - first)):
                cells[first + offset] = character
        lines.append(f"rank {rank:>{label}} |{''.join(cells)}|")
    return "\n".join(lines)


def _block(action: Action, room: int) -> str:
    if room <= 0:
        return ""
    text = f"{_LETTERS[action.kind]}{action.micro_batch}"
    if len(text) > room:
        text = text[0]
    return text + _FILL[action.kind] * (room - len(text))


def _natural_width(simulation: Simulation) -> int:
    """The width at which the shortest action shows its letter, its micro-batch and one more character."""
    lengths = [event.end - event.start for row in simulation.events for event in row if event.end > event.start]
    wanted = len(str(simulation.plan.micro_batches - 1)) + 2
    return max(1, round(float(simulation.makespan / min(lengths)) * wanted)) if lengths else 1
