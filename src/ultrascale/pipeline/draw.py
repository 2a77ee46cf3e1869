"""A timeline as text for terminals."""

from __future__ import annotations

from ultrascale.pipeline.actions import Kind
from ultrascale.pipeline.timeline import Event, Timeline

_FILL = {Kind.F: "-", Kind.B: "=", Kind.BI: "~", Kind.BW: "+", Kind.FB: "#"}
_LETTERS = {Kind.F: "F", Kind.B: "B", Kind.BI: "I", Kind.BW: "W", Kind.FB: "X"}
_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.BI: "input gradient",
    Kind.BW: "weight gradient",
    Kind.FB: "forward and backward",
}
_IDLE = "."


def text(timeline: Timeline, width: int = 100) -> str:
    """One line per rank, at most `width` characters of time: the letter of each action, its micro-batch
    where there is room, and its fill.

    Where the unit of time is too narrow to show an action, the later one of a cell is seen. Small letters are
    of every second virtual stage, or of the second direction.
    """
    if not timeline.makespan:
        return ""
    columns = min(width, _natural_width(timeline))
    scale = columns / float(timeline.makespan)
    label = len(str(timeline.ranks - 1))
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = [_IDLE] * columns
        for event in row:
            first = round(float(event.start - timeline.start) * scale)
            last = round(float(event.end - timeline.start) * scale)
            for offset, character in enumerate(_block(timeline, event, last - first)):
                cells[first + offset] = character
        lines.append(f"rank {rank:>{label}} |{''.join(cells)}|")
    return "\n".join(lines)


def legend(timeline: Timeline) -> str:
    """What the letters of `text` mean, of those that occur."""
    items = [f"{_LETTERS[kind]}{_FILL[kind]} {_WORDS[kind]}" for kind in timeline.kinds()]
    if timeline.variants > 1:
        items.append(f"small letters {'second direction' if timeline.two_directions else 'odd virtual stage'}")
    return "  ".join([*items, f"{_IDLE} idle"])


def _block(timeline: Timeline, event: Event, room: int) -> str:
    if room <= 0:
        return ""
    action = event.action
    letter = _LETTERS[action.kind]
    if timeline.variant(event.rank, action) % 2:
        letter = letter.lower()
    block = f"{letter}{action.micro_batch}"
    if len(block) > room:
        block = letter
    return block + _FILL[action.kind] * (room - len(block))


def _natural_width(timeline: Timeline) -> int:
    """The width at which the shortest action shows its letter, its micro-batch and one more character."""
    lengths = [event.end - event.start for event in timeline.events() if event.end > event.start]
    largest = max((event.action.micro_batch for event in timeline.events()), default=0)
    wanted = len(str(largest)) + 2
    # The quotient of the longest and the shortest may be more than a float holds; no line is that wide.
    return max(1, round(min(float(timeline.makespan / min(lengths)), 1e9) * wanted)) if lengths else 1
