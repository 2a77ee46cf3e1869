"""A timeline as SVG: a row per rank, a box per action, an axis, a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from ultrascale.pipeline.actions import Action, Kind
from ultrascale.pipeline.colours import WORDS, ink, shade
from ultrascale.pipeline.timeline import Event, Timeline

FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
_WIDEST = 2400
"""Pixels of time at most; narrower boxes lose their number, and keep what they say under the pointer."""
_NARROWEST = 640
_LEFT, _RIGHT, _TOP = 64, 24, 56
_LEGEND_ROW, _GLYPH = 20, 0.64  # a digit's width over its height, with a margin


@dataclass(frozen=True)
class _Frame:
    """Where things lie, in pixels."""

    timeline: Timeline
    row: int
    font: int
    time: float
    scale: float

    def x(self, moment: float) -> float:
        return _LEFT + float(moment - self.timeline.start) * self.scale

    def y(self, rank: int) -> int:
        return _TOP + rank * self.row

    @property
    def bottom(self) -> int:
        return self.y(self.timeline.ranks)


def svg(timeline: Timeline, width: int | None = None, until: float | None = None) -> str:
    """The picture as one SVG element.

    width  pixels of the time axis; None for as many as the shortest action needs to show its micro-batch,
           within limits
    until  end of the axis, from the start of the timeline and in its unit, so that two pictures can have the
           same scale; None for the makespan

    Each event is one element of class `event`, whose title says what it is and when it ran.
    """
    lines, total, height = _picture(timeline, width, until)
    return _element([lines], [0], total, height, timeline.title)


def stacked(timelines: Sequence[Timeline], title: str) -> str:
    """One SVG element with several timelines below each other, on one scale."""
    until = max(float(timeline.makespan) for timeline in timelines)
    width = max(_natural_width(timeline, until) for timeline in timelines)
    pictures = [_picture(timeline, width, until) for timeline in timelines]
    tops = [0, *accumulate(height for _, _, height in pictures)]
    total = max(total for _, total, _ in pictures)
    return _element([lines for lines, _, _ in pictures], tops[:-1], total, tops[-1], title)


def _element(pictures: list[list[str]], tops: list[int], width: int, height: int, title: str) -> str:
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT} role='img'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
    ]
    for picture, top in zip(pictures, tops, strict=True):
        lines += [f"<g transform='translate(0 {top})'>", *picture, "</g>"]
    return "\n".join([*lines, "</svg>"])


def _picture(timeline: Timeline, width: int | None, until: float | None) -> tuple[list[str], int, int]:
    """Lines, width and height in pixels."""
    length = float(until if until is not None else timeline.makespan)
    pixels = width or _natural_width(timeline, length)
    row = 26 if timeline.ranks <= 16 else 18
    frame = _Frame(timeline, row, 11 if row > 20 else 10, length, pixels / length if length else 1)
    legend, legend_height = _legend(frame, _LEFT + pixels)
    lines = [
        *_head(timeline),
        *_bands(frame, pixels),
        *_axis(frame),
        *(_box(frame, event) for event in timeline.events()),
        *legend,
    ]
    return lines, math.ceil(_LEFT + pixels + _RIGHT), frame.bottom + 44 + legend_height


def describe(timeline: Timeline, event: Event) -> str:
    """`F0.3 on rank 0, 3 to 4`, for the pointer."""
    unit = f" {timeline.unit}" if timeline.unit else ""
    start, end = (float(moment - timeline.start) for moment in (event.start, event.end))
    return f"{event.action} on rank {event.rank}, {start:.6g} to {end:.6g}{unit}"


def _natural_width(timeline: Timeline, length: float) -> int:
    lengths = [float(event.end - event.start) for event in timeline.events() if event.end > event.start]
    if not lengths:
        return _NARROWEST
    digits = len(str(max(event.action.micro_batch for event in timeline.events())))
    wanted = (digits * 11 * _GLYPH + 8) * length / min(lengths)
    return round(min(max(wanted, _NARROWEST), _WIDEST))


def _head(timeline: Timeline) -> list[str]:
    notes = " · ".join(f"{what} {value}" for what, value in timeline.notes)
    return [
        f"<text x='12' y='22' font-size='15' font-weight='bold' fill='#111111'>{escape(timeline.title)}</text>",
        f"<text x='12' y='42' font-size='12' fill='#444444'>{escape(notes)}</text>",
    ]


def _bands(frame: _Frame, pixels: float) -> list[str]:
    lines = []
    for rank in range(frame.timeline.ranks):
        y = frame.y(rank)
        fill = "#f1f1f1" if rank % 2 else "#f7f7f7"
        lines.append(f"<rect x='{_LEFT}' y='{y}' width='{pixels:g}' height='{frame.row}' fill='{fill}'/>")
        lines.append(
            f"<text x='{_LEFT - 8}' y='{y + frame.row / 2 + 4:g}' font-size='{frame.font}' fill='#333333' "
            f"text-anchor='end'>rank {rank}</text>"
        )
    return lines


def ticks(length: float, most: int) -> list[float]:
    """At most `most` round numbers from 0 to `length`, evenly apart: steps of 1, 2 or 5 times a power of ten."""
    if length <= 0:
        return [0.0]
    raw = length / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * index for index in range(math.floor(length / step * (1 + 1e-9)) + 1)]


def _axis(frame: _Frame) -> list[str]:
    unit = f" {frame.timeline.unit}" if frame.timeline.unit else ""
    lines = []
    for tick in ticks(frame.time, max(2, round(frame.time * frame.scale / 80))):
        x = _LEFT + tick * frame.scale
        lines.append(f"<path d='M{x:.2f} {_TOP}V{frame.bottom + 4}' stroke='#d5d5d5' stroke-width='1'/>")
        lines.append(
            f"<text x='{x:.2f}' y='{frame.bottom + 18}' font-size='11' fill='#333333' text-anchor='middle'>"
            f"{tick:g}{unit}</text>"
        )
    return lines


def _box(frame: _Frame, event: Event) -> str:
    x, end = frame.x(event.start), frame.x(event.end)
    width = max(end - x, 0.3)
    parts = event.action.computes
    height = (frame.row - 2) / len(parts)
    inner = "".join(
        _part(frame, event, part, x, frame.y(event.rank) + 1 + number * height, width, height)
        for number, part in enumerate(parts)
    )
    return f"<g class='event'><title>{escape(describe(frame.timeline, event))}</title>{inner}</g>"


def _part(frame: _Frame, event: Event, part: Action, x: float, y: float, width: float, height: float) -> str:
    fill = shade(part.kind, frame.timeline.variant(event.rank, part), frame.timeline.variants)
    edge = " stroke='#ffffff' stroke-width='0.6'" if width > 3 else ""
    box = f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{fill}'{edge}/>"
    font = min(frame.font, int(height))
    number = str(part.micro_batch)
    if font < 9 or len(number) * font * _GLYPH + 2 > width:
        return box
    return (
        f"{box}<text x='{x + width / 2:.2f}' y='{y + height / 2 + font * 0.36:.2f}' font-size='{font}' "
        f"fill='{ink(fill)}' text-anchor='middle'>{number}</text>"
    )


def legend_items(timeline: Timeline) -> list[tuple[str, list[str]]]:
    """(words, colours of its variants) of each kind that occurs; then what the shades mean."""
    kinds = {part.kind for event in timeline.events() for part in event.action.computes}
    count = timeline.variants
    return [(WORDS[kind], [shade(kind, v, count) for v in range(count)]) for kind in WORDS if kind in kinds]


def legend_words(timeline: Timeline) -> list[str]:
    """What the picture shows beside colours."""
    words = ["number: micro-batch"]
    if timeline.variants > 1:
        what = "direction" if timeline.two_directions else "virtual stage"
        words.append(f"light to dark: {what} 0 to {timeline.variants - 1}")
    if Kind.FB in timeline.kinds():
        words.append("two in one box: run together (FB)")
    return [*words, "grey: idle"]


def _legend(frame: _Frame, right: float) -> tuple[list[str], int]:
    """The lines, and their height: items go on in a new row where there is no room."""
    items = [*legend_items(frame.timeline), *((words, []) for words in legend_words(frame.timeline))]
    lines, x, y = [], float(_LEFT), frame.bottom + 44
    for words, colours in items:
        width = 14 * len(colours) + 6 + 7 * len(words) + 18
        if x > _LEFT and x + width > right:
            x, y = float(_LEFT), y + _LEGEND_ROW
        for number, colour in enumerate(colours):
            lines.append(f"<rect x='{x + 14 * number:g}' y='{y - 10}' width='13' height='13' fill='{colour}'/>")
        at = x + 14 * len(colours) + (6 if colours else 0)
        lines.append(f"<text x='{at:g}' y='{y + 1}' font-size='12' fill='#222222'>{escape(words)}</text>")
        x += width
    return lines, y - frame.bottom - 44 + 24
