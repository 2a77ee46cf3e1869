"""Heat maps of expert load as SVG: one square per layer and expert, coloured by its tokens over the mean of its layer.

Colours come in steps, so that a reader can tell their value by the legend and a picture of 60 layers × 256 experts is a
few paths: blue gets too little, red too much, black nothing at all. Blue and red differ for people with any form of
colour vision (ColorBrewer's RdBu).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from ultrascale.observe.chart import nice_ticks
from ultrascale.pipeline.colours import ink

EDGES = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Loads at which the colour changes."""
COLOURS = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip
NOTHING, UNKNOWN = "#000000", "#e8e4d4"
_LEFT, _TOP, _BOTTOM = 46, 26, 34
_WIDEST, _HIGHEST = 64, 24
_TEXT = (30, 14)
"""Size of a square from which its number is written into it."""
_GAP = 7
"""Size from which squares are set apart."""
_FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"

Loads = Sequence[Sequence[float | None]]


@dataclass(frozen=True)
class Axes:
    """What rows and columns are: their names, and the number of each one."""

    down: str
    rows: Sequence[int]
    across: str
    columns: Sequence[int]


def loads_of(tokens: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Tokens [layers][experts] → over the mean of their layer; None in a layer that no token reached."""
    return [[n * len(row) / sum(row) if sum(row) else None for n in row] for row in tokens]


def colour(load: float | None) -> str:
    """`#rrggbb`"""
    if load is None:
        return UNKNOWN
    return COLOURS[bisect_right(EDGES, load)] if load > 0 else NOTHING


def heat_map(title: str, loads: Loads, axes: Axes, width: int, height: int) -> str:
    """One SVG element, no larger than so many pixels unless a square would have less than one."""
    across = _size(width - _LEFT - 8, len(axes.columns), _WIDEST)
    down = _size(height - _TOP - _BOTTOM, len(axes.rows), _HIGHEST)
    right, bottom = _LEFT + across * len(axes.columns), _TOP + down * len(axes.rows)
    # Wide enough for the title, however few columns there are.
    full = max(right + 8, _LEFT + 8 * len(title))
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{full}' height='{bottom + _BOTTOM}' "
        f"viewBox='0 0 {full} {bottom + _BOTTOM}' {_FONT} role='img'><title>{escape(title)}</title>",
        f"<text x='{_LEFT}' y='16' font-size='13' font-weight='bold' fill='#111'>{escape(title)}</text>",
        *_squares(loads, across, down),
        f"<rect x='{_LEFT - 0.5}' y='{_TOP - 0.5}' width='{right - _LEFT + 1}' height='{bottom - _TOP + 1}' "
        "fill='none' stroke='#999'/>",
    ]
    for place in _labelled(axes.rows, down, 13):
        y = _TOP + down * (place + 0.5) + 4
        parts.append(_text(str(axes.rows[place]), _LEFT - 6, y, "end"))
    for place in _labelled(axes.columns, across, 8 + 7 * max(len(str(n)) for n in axes.columns)):
        x = _LEFT + across * (place + 0.5)
        parts.append(_text(str(axes.columns[place]), x, bottom + 13, "middle"))
    parts.append(_text(axes.across, (_LEFT + right) / 2, bottom + 28, "middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f"<text transform='translate(12 {middle:.1f}) rotate(-90)' font-size='11' fill='#444' text-anchor='middle'>"
        f"{escape(axes.down)}</text>"
    )
    return "".join([*parts, "</svg>"])


def legend() -> str:
    """What the colours of all maps on a page mean, one SVG element."""
    box, top = 56, 18
    marks = [("0", NOTHING), *zip(map(_range, range(len(COLOURS))), COLOURS, strict=True)]
    width = box * len(marks) + 2
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='40' viewBox='0 0 {width} 40' {_FONT}>"]
    for place, (words, fill) in enumerate(marks):
        parts.append(f"<rect x='{1 + box * place}' y='1' width='{box}' height='{top}' fill='{fill}' stroke='#999'/>")
        parts.append(f"<text x='{1 + box * (place + 0.5):g}' y='{top + 15}' font-size='10' fill='#444' "
                     f"text-anchor='middle'>{words}</text>")  # fmt: skip
    return "".join([*parts, "</svg>"])


def _range(level: int) -> str:
    if level == 0:
        return f"&lt; {EDGES[0]:g}"
    return f"≥ {EDGES[-1]:g}" if level == len(EDGES) else f"{EDGES[level - 1]:g}–{EDGES[level]:g}"


def _size(room: int, count: int, largest: int) -> int:
    """Whole pixels: squares of 3.7 would be blurred."""
    return max(1, min(largest, room // count))


def _squares(loads: Loads, across: int, down: int) -> list[str]:
    """A path for each colour; neighbours of one colour are one rectangle where nothing sets them apart."""
    gap = 1 if min(across, down) >= _GAP else 0
    drawn: dict[str, list[str]] = {}
    numbers = []
    for row, line in enumerate(loads):
        y, place = _TOP + down * row, 0
        for fill, same in groupby(line, key=colour):
            values = list(same)
            for run in [[value] for value in values] if gap else [values]:
                x, wide = _LEFT + across * place, across * len(run) - gap
                drawn.setdefault(fill, []).append(f"M{x} {y}h{wide}v{down - gap}h-{wide}z")
                if across >= _TEXT[0] and down >= _TEXT[1] and run[0] is not None:
                    numbers.append(
                        f"<text x='{x + across / 2:g}' y='{y + down / 2 + 3.5:g}' font-size='10' fill='{ink(fill)}' "
                        f"text-anchor='middle'>{run[0]:.2f}</text>"
                    )
                place += len(run)
    paths = [f"<path fill='{fill}' d='{''.join(d)}' shape-rendering='crispEdges'/>" for fill, d in drawn.items()]
    return paths + numbers


def _labelled(numbers: Sequence[int], size: int, apart: int) -> list[int]:
    """Places whose number is written: all, or round ones that are far enough apart to be read."""
    if size >= apart:
        return list(range(len(numbers)))
    low, high = min(numbers), max(numbers)
    for count in range(max(1, size * len(numbers) // apart), 0, -1):
        ticks = nice_ticks(low, high, count)
        places = sorted({_nearest(numbers, tick) for tick in ticks if low <= tick <= high})
        if all(size * (b - a) >= apart for a, b in pairwise(places)):
            return places
    return [0]


def _nearest(numbers: Sequence[int], tick: float) -> int:
    return min(range(len(numbers)), key=lambda place: abs(numbers[place] - tick))


def _text(words: str, x: float, y: float, anchor: str) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' font-size='11' fill='#444' text-anchor='{anchor}'>{escape(words)}</text>"
